#!/usr/bin/env bash
# Supervised fine-tuning through Megatron's stock entry point, with dynamic micro-batches and padded.
#
#     bash examples/sft.sh [--baseline|--dynamic|--compare] [--data FILE] [--short] [--nproc N]
#         [--out DIR] [Megatron's arguments]
#
# Makes .venv (or $MCORE_BATCHING_VENV), installs this package with what the job needs, and trains a
# small GPT model by examples/sft/sft.py on 4 processes, 2 data-parallel ranks of 2 pipeline stages: on
# GPUs if there are enough, on the CPU otherwise. --compare, the default, trains it twice from the
# same start, with the plugin's flag and without (--dynamic and --baseline: once), and draws loss
# and tokens computed per step into runs/sft. --data FILE trains on other JSON lines: messages,
# prompt and completion, or question and answer, such as GSM8K's; samples longer than --seq-length
# are left out and counted. --short runs for seconds. --dynamic-batch-context-parallel 2 lets ranks
# share long samples in the run with the flag. With
# Megatron's --save DIR --load DIR an interrupted job goes on where it was. Needs Python 3.12 or
# 3.13, for which megatron-core 0.19 has wheels.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR
. "$here/environment.sh"

data=$here/data/arithmetic_conversations.jsonl
out=$mcb_root/runs/sft
nproc=4
runs=(dynamic padded)
iterations=12
given=()
moving=() # flags of the run with the flag alone: the padded one has nothing to move
while [ $# -gt 0 ]; do
    case $1 in
        --data | --nproc | --out | --dynamic-batch-context-parallel)
            [ $# -gt 1 ] || mcb_fail "$1 needs a value after it"
            set -- "$1=$2" "${@:3}"
            continue
            ;;
        --data=*) data=${1#*=} ;;
        --out=*) out=${1#*=} ;;
        --nproc=*)
            nproc=${1#*=}
            [[ $nproc =~ ^[1-9][0-9]*$ ]] ||
                mcb_fail "--nproc must be a whole number of 1 or more, got '$nproc'"
            ;;
        --dynamic-batch-context-parallel=* | --dynamic-batch-exchange) moving+=("$1") ;;
        --short) iterations=3 ;;
        --baseline) runs=(padded) ;;
        --dynamic) runs=(dynamic) ;;
        --compare) runs=(dynamic padded) ;;
        -h | --help) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "$0" && exit 0 ;;
        *) given+=("$1") ;;
    esac
    shift
done
[ -f "$data" ] || mcb_fail "no file $data: give --data a file of JSON lines"

# megatron-core has no wheel with megatron.training, the stock entry point, for Python 3.11.
mcb_versions=(3.12 3.13)
python=${MCORE_BATCHING_PYTHON:-}
if [ -n "$python" ] && [ "$(mcb_version_of "$python")" = 3.11 ]; then
    echo "sft.sh: $python is Python 3.11, whose newest megatron-core (0.16.1) ships without" \
        "megatron.training, the stock entry point that this example is about. Name a Python" \
        "3.12 or 3.13 in MCORE_BATCHING_PYTHON; examples/quickstart.sh runs on 3.11." >&2
    exit 3
fi
mcb_make_folder "$out" 'set --out to'
mcb_ensure_environment "${MCORE_BATCHING_VENV:-$mcb_root/.venv}" megatron,plot
python=$mcb_environment/bin/python

backend=nccl
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -lt "$nproc" ]; then
    echo "$nproc processes on the CPU ($gpus GPUs here)"
    export CUDA_VISIBLE_DEVICES='' MCORE_BATCHING_CPU=1
    backend=gloo
else
    echo "$nproc processes on $gpus GPUs"
    unset MCORE_BATCHING_CPU
fi
# One thread a process: there are more processes than cores on most machines this runs on.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUDA_DEVICE_MAX_CONNECTIONS=1
# megatron-core warns of every optional package that is absent.
export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}"
export PYTHONPATH="$mcb_root${PYTHONPATH:+:$PYTHONPATH}"

job=(
    --data-path "$data" --split 90,10,0
    # Text as bytes: 256 of them, an end mark and a padding mark.
    --tokenizer-type NullTokenizer --vocab-size 258
    --seq-length 1024 --max-position-embeddings 1024
    --num-layers 4 --hidden-size 64 --num-attention-heads 4
    --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
    --hidden-dropout 0 --attention-dropout 0
    --pipeline-model-parallel-size 2
    --micro-batch-size 1 --global-batch-size 16 --train-iters "$iterations"
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine
    # The loss is the mean over the tokens of the whole step, however they are batched.
    --calculate-per-token-loss
    --eval-interval 1000 --eval-iters 1 --log-interval 1 --num-workers 0
    # Megatron's layers without Transformer Engine and Apex.
    --transformer-impl local --use-cpu-initialization --distributed-backend "$backend"
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-dropout-fusion
    --no-bias-swiglu-fusion --no-rope-fusion --no-persist-layer-norm
    --no-create-attention-mask-in-dataloader
)
# Of the log's lines these, shortened.
shown='s/.* (iteration +[0-9]+\/ +[0-9]+) .*(consumed samples: +[0-9]+) .*(lm loss: [^ ]+) .*/\1 | \2 | \3/p
/ validation loss at /p
/: left out$/p'
for run in "${runs[@]}"; do
    flags=()
    [ "$run" = padded ] ||
        flags=(--use-dynamic-batch-size --max-tokens-per-gpu 2048 ${moving[@]+"${moving[@]}"})
    echo "== $run: the whole log is in $out/$run.log"
    [ ! -f "$out/$run.log" ] || mv "$out/$run.log" "$out/$run.previous.log"
    "$python" -m torch.distributed.run --standalone --nproc-per-node "$nproc" \
        -m mcore_batching.run "$here/sft/sft.py" "${job[@]}" ${flags[@]+"${flags[@]}"} \
        ${given[@]+"${given[@]}"} 2>&1 | tee "$out/$run.log" | sed -u -n -E "$shown" || {
        grep -m 8 -E '([Ee]rror|Exception)(:|$)' "$out/$run.log" >&2 || tail -n 40 "$out/$run.log" >&2
        mcb_fail "the $run run failed; the whole log is in $out/$run.log"
    }
done
if [ ${#runs[@]} -eq 2 ]; then
    "$python" "$here/sft/sft_figure.py" "$out"
fi
