"""A process that has imported torch and Megatron, and forks a process off itself for each launch.

    python -m kit.server MODULE...

Importing costs six seconds of a processor: more than most launches need afterwards. A line of the
input is a launch, ``{"module": ..., "arguments": [...], "output": PATH, "errors": PATH}``: the
module's `main` runs in a session of its own. Two lines of the output are its process and, once it
has ended, its exit code.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from typing import Any


def main() -> None:
    modules = {name: importlib.import_module(name) for name in sys.argv[1:]}
    # What is imported stays: each rank would collect it anew, and copy its pages to do so.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        launch = json.loads(line)
        process = os.fork()
        if process == 0:
            _move(launch)
            modules[launch["module"]].main()
            sys.exit()
        print(process, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


def _move(launch: dict[str, Any]) -> None:
    """Leave the server's session, input, output and arguments."""
    os.setsid()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(launch["output"], flags), 1)
    os.dup2(os.open(launch["errors"], flags), 2)
    sys.argv = [launch["module"], *launch["arguments"]]


if __name__ == "__main__":
    main()
