"""Runs ``examples/grpo.py`` under torchrun on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SECONDS = 300


def run_grpo(nproc, *flags):
    environment = os.environ | {
        "MCORE_BATCHING_CPU": "1",
        "TORCHDYNAMO_DISABLE": "1",  # the stand-in sets it too, with the compiler loaded
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(REPOSITORY),
    }
    return subprocess.run(
        [
            sys.executable,
            *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"),
            str(REPOSITORY / "examples" / "grpo.py"),
            *flags,
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
