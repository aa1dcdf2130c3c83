"""A script on several ranks, as torchrun would start it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from kit.ranks import fork_ranks


def main() -> None:
    """Run the script of the second argument on as many ranks as the first one says."""
    nproc, script, *words = sys.argv[1:]
    fork = fork_ranks(int(nproc))
    if fork.rank is None:
        sys.exit(fork.first_failure())
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
