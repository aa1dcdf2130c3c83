"""Runs a stock training script with the plugin installed.

    torchrun … -m mcore_batching.run pretrain_gpt.py --use-dynamic-batch-size \\
        --max-tokens-per-gpu 16384 <usual arguments>

Without ``--use-dynamic-batch-size`` the script runs as if started by itself. With
``MCORE_BATCHING_CPU=1`` it runs on the CPU stand-in.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

# Without one of these, neither the engine nor Megatron is imported before the script runs.
_FLAGS = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "--dynamic-batch-")


def main(arguments: Sequence[str] | None = None) -> None:
    """Install the plugin if its flag is there, then run the script as ``__main__``.

    Args:
        arguments: the script and its arguments; None: this process's.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0].startswith("-"):
        print(
            "usage: python -m mcore_batching.run SCRIPT [its arguments]: name the training script "
            "first" + (f", got {words[0]}" if words else ""),
            file=sys.stderr,
        )
        sys.exit(2)
    script = words[0]
    if not os.path.isfile(script):
        print(f"mcore_batching.run: no script {script}: give its path", file=sys.stderr)
        sys.exit(2)
    sys.argv = words
    # As Python does for a script: its own folder first.
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    if os.environ.get("MCORE_BATCHING_CPU", "") not in ("", "0"):
        import mcore_batching.megatron  # noqa: F401 - turns it on
    if any(word.startswith(_FLAGS) for word in words[1:]):
        from mcore_batching.integrations.megatron_lm import install

        installation = install(words[1:])
        if os.environ.get("RANK", "0") == "0":
            print(installation, flush=True)
    runpy.run_path(script, run_name="__main__")
    _end_process_group()


def _end_process_group() -> None:
    """Destroy the process group that the script left behind, if its backend is gloo.

    A thread of gloo may still hold tensors of the last collective. If it frees them while Python
    shuts down, the process ends with SIGABRT ("terminate called without an active exception"), in
    about one of three exits right after a collective with PyTorch 2.13.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
