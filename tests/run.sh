#!/usr/bin/env bash
# Installs what is needed and runs lint, types and tests.
#
#     bash tests/run.sh [--long] [arguments of pytest]
#
# --long runs the tests marked so as well, and three times as many random cases.
# MCORE_BATCHING_VENV names the environment (default: .venv), MCORE_BATCHING_PYTHON the interpreter
# it is made with; where it has another one, say 3.12, that environment is .venv-3.12.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR/../examples
. "$here/../examples/environment.sh"

mcb_ensure_environment "${MCORE_BATCHING_VENV:-$mcb_root/.venv}" megatron,dev
python=$mcb_environment/bin/python
export PYTHONPATH="$mcb_root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
cd "$mcb_root" || exit 1
if ! [ -w "$mcb_root" ]; then # no caches beside the sources
    export PYTHONDONTWRITEBYTECODE=1 RUFF_NO_CACHE=true MYPY_CACHE_DIR=/dev/null
    set -- -p no:cacheprovider "$@"
fi

# Not the documentation: newer releases of ruff format code in Markdown, older ones do not.
sources=(mcore_batching tests examples)
failed=()
check() { # NAME COMMAND...
    local name=$1
    shift
    echo "== $name"
    "$@" || failed+=("$name")
}
check 'ruff check' "$python" -m ruff check "${sources[@]}"
check 'ruff format' "$python" -m ruff format --check "${sources[@]}"
check 'mypy' "$python" -m mypy
check 'mypy examples' env MYPYPATH="$mcb_root/examples/grpo:$mcb_root/examples/sft" \
    "$python" -m mypy examples/grpo/grpo.py examples/data/arithmetic_game.py examples/sft/sft.py \
    examples/sft/sft_figure.py examples/data/game_conversations.py
# Tests of several ranks beside those of one process: neither keep two cores busy by themselves.
# A process that is killed takes its test with it; started anew, xdist would wait for it for ever.
check 'pytest' "$python" -m pytest -n 2 --max-worker-restart=0 --durations=25 "$@"

if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: $(printf '%s, ' "${failed[@]}" | sed 's/, $//')" >&2
    exit 1
fi
