"""Runs the parts of the acceptance test, each in processes of its own, and prints their table.

A part that fails, runs out of time or says nothing is a miss, and so is one that this machine
cannot run though it has a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SECONDS = 470.0
"""Of a part: eight minutes, with the start of the interpreter."""
SHARED_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "TORCHDYNAMO_DISABLE": "1",
}
"""For ranks that share a GPU, from NCCL 2.30 on."""
EXACTNESS = "tests/distributed/test_exactness.py"


@dataclasses.dataclass(frozen=True)
class Part:
    """One command, and what takes its place on a CPU."""

    name: str
    shows: str
    command: tuple[str, ...]  # after the interpreter
    twin: tuple[str, ...] | None = None  # on a CPU; None: the same command
    processes: int = 1  # on as many GPUs, or sharing one
    engine: bool | None = None  # with Transformer Engine, with it hidden, None: as it is


def pytest(*words: str) -> tuple[str, ...]:
    """A command that runs tests."""
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", *words)


def part(*words: str) -> tuple[str, ...]:
    """A command that runs a part of ``parts.py``."""
    return (str(HERE / "parts.py"), *words)


PARTS = [
    Part(
        "kernel",
        "PyTorch's variable-length attention equals one attention per sample",
        pytest("tests/gpu/test_cuda.py", "-k", "kernel"),
        twin=pytest("tests/megatron/test_attention.py", "-k", "packed_row"),
    ),
    Part(
        "packed-pytorch",
        "packed rows against one sample a row, PyTorch's kernel",
        part("packed", "--attention", "pytorch"),
        engine=False,
    ),
    Part(
        "packed-te",
        "packed rows against one sample a row, Transformer Engine",
        part("packed", "--attention", "te"),
        engine=True,
    ),
    Part(
        "waits",
        "where the host waits for the device in a step",
        part("waits"),
        twin=pytest("tests/device/test_device.py", "-k", "test_a_step"),
    ),
    Part(
        "memory",
        "peak memory at vocabulary 152064 × 16384 tokens, against the prediction",
        part("memory"),
        twin=pytest("tests/device/test_device.py", "-k", "large"),
    ),
    Part(
        "throughput",
        "packed against padded rows; predicted against measured step",
        part("throughput"),
    ),
    Part(
        "ranks-2",
        "DP2, TP2 and CP2 of the exactness matrix",
        pytest(EXACTNESS, "-k", "random-27267 or random-209830 or branches-cp2"),
        processes=2,
        engine=False,
    ),
    Part(
        "ranks-4",
        "DP2×PP2×VPP2 and DP2×CP2 of the exactness matrix",
        pytest(EXACTNESS, "-k", "random-26801 or random-118395"),
        processes=4,
        engine=False,
    ),
    Part(
        "packed-te-cp2",
        "packed rows against one sample a row on two context-parallel ranks, Transformer Engine",
        (
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *part("packed", "--attention", "te", "--context-parallel", "2"),
        ),
        processes=2,
        engine=True,
    ),
]


def main() -> None:
    """Run the parts that were asked for, print the table, exit 1 on a miss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="all if none is named")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    parser.add_argument("--lengths", type=Path, help="real lengths, one a line (throughput, waits)")
    options = parser.parse_args()
    known = {part.name: part for part in PARTS}
    unknown = sorted(set(options.parts) - set(known))
    if unknown:
        parser.error(f"no part {', '.join(unknown)}: choose from {', '.join(known)}")
    if options.lengths is not None and not options.lengths.is_file():
        parser.error(f"--lengths {options.lengths}: no such file")
    chosen = [known[name] for name in options.parts] or PARTS
    gpus = torch.cuda.device_count()
    if options.list or not gpus:
        reason = "" if gpus else "no CUDA device: on a GPU this "
        print(f"{reason}would run")
        for each in chosen:
            print(f"  {each.name:<16}{each.processes} process(es): {each.shows}")
        if options.list:
            return
        print("now the CPU twin of each, in small sizes", flush=True)
    rows = [row for each in chosen for row in run(each, gpus, options.lengths)]
    print(table(rows, gpus))
    sys.exit(not all(row["ok"] for row in rows))


def run(part: Part, gpus: int, lengths: Path | None) -> list[dict[str, Any]]:
    """The rows that a part reports."""
    has_engine = importlib.util.find_spec("transformer_engine") is not None
    if part.engine and gpus and not has_engine:
        return [row(part, "Transformer Engine is not installed", "not run", False)]
    if part.engine and not gpus and part.processes > 1:
        return [row(part, "needs Transformer Engine, so a GPU", "not run", True)]
    command = part.twin if part.twin and not gpus else part.command
    if lengths is not None and command is part.command and part.name in ("throughput", "waits"):
        command = (*command, "--lengths", str(lengths.resolve()))
    if part.engine is None and part.processes == 1 and has_engine and command[0] == part()[0]:
        command = (*command, "--attention", "te")
    print(f"== {part.name}: {part.shows}", flush=True)
    code, output = output_of(command, environment(part, gpus))
    rows = [
        {"part": part.name, **json.loads(line.removeprefix("ROW "))}
        for line in output.splitlines()
        if line.startswith("ROW ")
    ]
    if not rows:
        counts = re.findall(r"^\d+ (?:passed|failed|skipped).*$", output, re.MULTILINE)
        skipped = bool(counts) and "passed" not in counts[-1]
        found = counts[-1] if counts else ("as it must be" if code == 0 else "failed")
        rows = [row(part, part.shows, found, code == 0 and not skipped)]
    elif code:
        rows.append(row(part, "ended", f"with status {code}", False))
    if not all(each["ok"] for each in rows):
        print(output[-4000:], flush=True)
    return rows


def row(part: Part, what: str, found: str, ok: bool) -> dict[str, Any]:
    """A row of the table that this module makes itself."""
    return {"part": part.name, "what": what, "found": found, "wanted": "", "ok": ok}


def environment(part: Part, gpus: int) -> dict[str, str]:
    """Variables of a part's processes."""
    variables = dict(os.environ) | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore"}
    folders = (ROOT, ROOT / "examples" / "grpo", ROOT / "tests" / "distributed")
    paths = [*map(str, folders), variables.get("PYTHONPATH", "")]
    if part.engine is False:
        paths.insert(0, str(HERE / "without_te"))
    variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if not gpus:
        return variables | {"MCORE_BATCHING_CPU": "1", "TORCHDYNAMO_DISABLE": "1"}
    return variables | (SHARED_GPU if gpus < part.processes else {})


def output_of(command: Sequence[str], variables: dict[str, str]) -> tuple[int, str]:
    """Exit status and output; all processes are ended when the time is up."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun's workers are in sessions of their own, and ended by it
        try:
            output, _ = process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        return 124, f"{output}\nstopped after {SECONDS:.0f} s"
    return process.returncode, output


def table(rows: Sequence[dict[str, Any]], gpus: int) -> str:
    """The rows in Markdown, under the machine, the versions and the date."""
    from importlib.metadata import PackageNotFoundError, version

    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    for name in ("megatron-core", "transformer-engine"):
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found = importlib.util.find_spec(name.replace("-", "_")) is not None
            versions.append(f"{name} of unknown version" if found else f"no {name}")
    device = f"{gpus} × {torch.cuda.get_device_name()}" if gpus else "CPU twin"
    if gpus:
        versions.append("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))
    lines = [
        f"{device}; {', '.join(versions)}; {datetime.date.today()}",
        "",
        "| part | what | found | wanted | |",
        "|---|---|---|---|---|",
    ]
    for each in rows:
        verdict = "yes" if each["ok"] else "**missed**"
        cells = (each["part"], each["what"], each["found"], each["wanted"], verdict)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
