"""The CPU stand-in patches when it is asked to, and never where CUDA would be forgotten."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_import_touches_nothing() -> None:
    done = run(
        "import torch\n"
        "before = torch.cuda.current_device, torch.cuda.Stream\n"
        "import mcore_batching.megatron.cpu_emulation as cpu\n"
        "assert (torch.cuda.current_device, torch.cuda.Stream) == before\n"
        "assert not cpu.is_enabled()\n"
    )
    assert done.returncode == 0, done.stderr


def test_refuses_where_cuda_is_present_unless_forced() -> None:
    done = run(
        "import torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "from mcore_batching.megatron import cpu\n"
        "try:\n"
        "    cpu.enable()\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
        "assert not cpu.is_enabled()\n"
        "cpu.enable(force=True)\n"
        "assert cpu.is_enabled()\n"
    )
    assert done.returncode == 0, done.stderr
    assert "this machine has CUDA" in done.stdout
    assert "MCORE_BATCHING_CPU" in done.stdout
    assert "force=True" in done.stdout


def test_cuda_tensors_are_cpu_tensors() -> None:
    done = run(
        "import torch\n"
        "from mcore_batching.megatron import cpu\n"
        "cpu.enable(force=True)\n"
        "cpu.enable(force=True)\n"
        "x = torch.ones(2, device='cuda')\n"
        "assert x.device.type == 'cpu' and x.cuda() is x\n"
        "assert x.to('cuda:0', torch.float64).dtype is torch.float64\n"
        "assert x.type() == 'torch.cuda.FloatTensor'\n"
        "assert torch.zeros(1, device=torch.cuda.current_device()).device.type == 'cpu'\n"
        "with torch.cuda.stream(torch.cuda.Stream()):\n"
        "    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())\n"
        "assert torch.cuda.current_stream().record_event().query()\n"
        "torch.cuda.manual_seed(3)\n"
        "a = torch.rand(2)\n"
        "torch.manual_seed(3)\n"
        "assert torch.equal(a, torch.rand(2))\n"
    )
    assert done.returncode == 0, done.stderr


def test_bootstrap_needs_the_stand_in_to_be_asked_for() -> None:
    done = run(
        "import os, torch\n"
        "os.environ.pop('MCORE_BATCHING_CPU', None)\n"
        "torch.cuda.is_available = lambda: False\n"
        "from mcore_batching.megatron.standalone.bootstrap import initialize_process_group\n"
        "try:\n"
        "    initialize_process_group()\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    assert done.returncode == 0, done.stderr
    assert "no CUDA device: set MCORE_BATCHING_CPU=1" in done.stdout
