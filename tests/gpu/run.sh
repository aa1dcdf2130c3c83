#!/usr/bin/env bash
# What a GPU must show, in parts of less than eight minutes; prints a table, fails on a miss.
#
#     bash tests/gpu/run.sh [--lengths FILE] [--list] [PART...]
#
# Without a GPU it says what it would run, and runs the CPU twin of each part in small sizes.
# MCORE_BATCHING_PYTHON names an interpreter with torch and megatron-core (default: that of .venv,
# else python3).
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${MCORE_BATCHING_PYTHON:-}
if [ -z "$python" ]; then
    python=$root/.venv/bin/python
    [ -x "$python" ] || python=python3
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$python" "$root/tests/gpu/run_parts.py" "$@"
