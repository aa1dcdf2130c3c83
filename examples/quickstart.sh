#!/usr/bin/env bash
# From a bare machine to a GRPO run with dynamic micro-batches, beside the same run without them.
#
#     bash examples/quickstart.sh [--online] [--short] [--nproc N] [--out DIR] [flags of grpo.py]
#
# Makes .venv (or $MCORE_BATCHING_VENV), installs this package with what the job needs, and runs
# examples/grpo/grpo.py --compare on 4 processes, 2 data-parallel ranks of 2 pipeline stages: on GPUs if
# there are enough, on the CPU otherwise. --dp, --pp, --vpp, --tp and --cp change the layout, and
# with it the number of processes; --rollouts FILE takes other rollouts; --short runs for seconds;
# --hybrid-layer-pattern '*-*-|*-*-' trains a HybridModel of these layers in place of a GPTModel.
# What samples of a group have in common is computed once (--no-dynamic-batch-share-prefixes: not).
#
# --online runs, instead, a policy that plays a game of several turns itself and learns from what it
# won (minutes; the reward's curve is in runs/quickstart/online/reward.png). With --step-wise, too,
# a training sample is one turn and not a whole game.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR
. "$here/environment.sh"

nproc='' dp=2 pp=2 tp=1 cp=1 out=$mcb_root/runs/quickstart
given=()
chosen=() online='' short='' length=()
while [ $# -gt 0 ]; do
    case $1 in
        --nproc | --dp | --pp | --tp | --cp | --out)
            [ $# -gt 1 ] || mcb_fail "$1 needs a value after it"
            set -- "$1=$2" "${@:3}"
            continue
            ;;
        --out=*) out=${1#*=} ;;
        --*=*)
            name=${1%%=*} value=${1#*=}
            case $name in
                --nproc | --dp | --pp | --tp | --cp)
                    [[ $value =~ ^[1-9][0-9]*$ ]] ||
                        mcb_fail "$name must be a whole number of 1 or more, got '$value'"
                    printf -v "${name#--}" %s "$value"
                    ;;
            esac
            [ "$name" = --nproc ] || given+=("$1")
            ;;
        --online) online=yes ;;
        --short) short=yes ;;
        --baseline | --compare) chosen=("$1") ;;
        -h | --help) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "$0" && exit 0 ;;
        *) given+=("$1") ;;
    esac
    shift
done
if [ "$online" ]; then
    chosen+=(--online) # grpo.py refuses it beside --baseline or --compare
elif [ ${#chosen[@]} -eq 0 ]; then
    chosen=(--compare)
fi
if [ "$short" ]; then
    length=(--iterations 2 --prompts-per-iteration 16)
    if [ "$online" ]; then length+=(--warm-start-steps 60); else length+=(--global-batch-size 32); fi
fi
: "${nproc:=$((dp * pp * tp * cp))}"

mcb_make_folder "$out" 'set --out to'
mcb_ensure_environment "${MCORE_BATCHING_VENV:-$mcb_root/.venv}" megatron,plot
python=$mcb_environment/bin/python

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -lt "$nproc" ]; then
    echo "$nproc processes on the CPU ($gpus GPUs here)"
    export CUDA_VISIBLE_DEVICES='' MCORE_BATCHING_CPU=1
else
    echo "$nproc processes on $gpus GPUs"
    unset MCORE_BATCHING_CPU
fi
# One thread a process: there are more processes than cores on most machines this runs on.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUDA_DEVICE_MAX_CONNECTIONS=1
# megatron-core warns of every optional package that is absent.
export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}"
export PYTHONPATH="$mcb_root${PYTHONPATH:+:$PYTHONPATH}"
"$python" -m torch.distributed.run --standalone --nproc-per-node "$nproc" "$here/grpo/grpo.py" \
    --out "$out" "${chosen[@]}" --dynamic-batch-share-prefixes \
    ${length[@]+"${length[@]}"} ${given[@]+"${given[@]}"}
