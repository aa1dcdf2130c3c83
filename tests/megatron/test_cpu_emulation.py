"""The CPU stand-in patches when asked to, and never where a GPU would be forgotten.

Each in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def output_of(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_touches_nothing() -> None:
    output_of("""
import torch
before = torch.cuda.current_device, torch.cuda.Stream
from mcore_batching.megatron import cpu_emulation
assert (torch.cuda.current_device, torch.cuda.Stream) == before
assert not cpu_emulation.is_enabled()
""")


def test_refuses_where_cuda_is_present_unless_forced() -> None:
    message = output_of("""
import torch
torch.cuda.is_available = lambda: True
from mcore_batching.megatron import cpu_emulation
try:
    cpu_emulation.enable()
except cpu_emulation.DeviceError as error:
    assert isinstance(error, RuntimeError)
    print(error)
assert not cpu_emulation.is_enabled()
cpu_emulation.enable(force=True)
assert cpu_emulation.is_enabled()
""")
    assert "this machine has CUDA: unset MCORE_BATCHING_CPU" in message
    assert "force=True" in message


def test_cuda_tensors_are_cpu_tensors() -> None:
    output_of("""
import torch
from mcore_batching.megatron import cpu_emulation
cpu_emulation.enable(force=True)
cpu_emulation.enable(force=True)
x = torch.ones(2, device='cuda')
assert x.device.type == 'cpu' and x.cuda() is x
assert x.to('cuda:0', torch.float64).dtype is torch.float64
assert x.type() == 'torch.cuda.FloatTensor'
assert torch.zeros(1, device=torch.cuda.current_device()).device.type == 'cpu'
with torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
assert torch.cuda.current_stream().record_event().query()
torch.cuda.manual_seed(3)
a = torch.rand(2)
torch.manual_seed(3)
assert torch.equal(a, torch.rand(2))
""")


def test_bootstrap_needs_the_stand_in_to_be_asked_for() -> None:
    message = output_of("""
import os, torch
os.environ.pop('MCORE_BATCHING_CPU', None)
torch.cuda.is_available = lambda: False
from mcore_batching.megatron.standalone.bootstrap import initialize_process_group
from mcore_batching.megatron.cpu_emulation import DeviceError
try:
    initialize_process_group()
except DeviceError as error:
    print(error)
""")
    assert "no CUDA device: set MCORE_BATCHING_CPU=1" in message
