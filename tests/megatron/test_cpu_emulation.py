"""The CPU stand-in patches when asked to, and never where a GPU would be forgotten.

All in one process, in which it is turned on last.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kit import cpu_kernels
from kit.patience import patience
from torch.nn.functional import silu, softplus

PROGRAM = """
import importlib, json, os, sys, types, torch
found = {}
before = torch.cuda.current_device, torch.cuda.Stream
has_cuda = True
torch.cuda.is_available = lambda: has_cuda

os.environ['MCORE_BATCHING_CPU'] = '1'
try:
    import mcore_batching.megatron
except Exception as error:
    found['refused'] = [type(error).__name__, str(error), isinstance(error, RuntimeError)]
try:
    import transformer_engine
except ImportError as error:
    found['engine hidden'] = type(error).__name__

os.environ['MCORE_BATCHING_CPU'] = '0'
import mcore_batching.megatron
from mcore_batching.megatron import cpu_emulation
from bootstrap import initialize_process_group
after = torch.cuda.current_device, torch.cuda.Stream
found['import'] = [after == before, cpu_emulation.is_enabled()]
has_cuda = False
try:
    initialize_process_group()
except cpu_emulation.DeviceError as error:
    found['bootstrap'] = str(error)
sys.modules['transformer_engine'] = types.ModuleType('transformer_engine')
try:
    cpu_emulation.enable(force=True)
except cpu_emulation.DeviceError as error:
    found['engine imported'] = str(error)
del sys.modules['transformer_engine']

has_cuda = True
os.environ['MCORE_BATCHING_CPU'] = 'force'
importlib.reload(mcore_batching.megatron)
cpu_emulation.enable(force=True)
torch.cuda.manual_seed(3)
a = torch.rand(2)
torch.manual_seed(3)
found['enabled'] = {
    'is enabled': cpu_emulation.is_enabled(),
    'on the host': torch.ones(2, device='cuda').device.type == 'cpu',
    'event': torch.cuda.current_stream().record_event().query(),
    'seed': torch.equal(a, torch.rand(2)),
    'not for torch': not torch.cuda.is_available(),
}

from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from mcore_batching import ParallelDims, ParallelDimsError
import bootstrap
os.environ.update(RANK='0', WORLD_SIZE='1', LOCAL_RANK='0')
os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='0')
initialize_process_group()
try:
    bootstrap.initialize_model_parallel(ParallelDims(data_parallel=2))
except ParallelDimsError as error:
    found['dims'] = str(error)
bootstrap.initialize_model_parallel(ParallelDims(), timeout_seconds=30.0)
group = parallel_state.get_context_parallel_group()
found['timeout'] = group._get_backend(torch.device('cpu')).options._timeout.total_seconds()
settings = bootstrap.pipeline_config(ParallelDims())
config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **settings)
config.bf16, config.params_dtype = True, torch.bfloat16
(chunk,) = bootstrap.build_model(config, vocab_size=8, max_sequence_length=8)
found['model'] = [type(each).__name__ for each in (chunk, chunk.module, chunk.module.module)]
config.mtp_num_layers = 2
(later,) = bootstrap.build_model(config, vocab_size=8, max_sequence_length=8, wrap=False)
found['depths'] = [len(each.mtp.layers) if each.mtp_process else 0 for each in
                   (chunk.module.module, later.module)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What `PROGRAM` found, with a Transformer Engine on the path that no CPU can import."""
    folder = tmp_path_factory.mktemp("engine")
    (folder / "transformer_engine").mkdir()
    (folder / "transformer_engine" / "__init__.py").write_text("raise RuntimeError('no GPU')\n")
    bootstrap = Path(__file__).resolve().parents[2] / "examples" / "grpo"
    paths = os.pathsep.join([str(folder), str(bootstrap), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=patience(240),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcome: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return outcome


def test_nothing_is_touched_unless_asked_to_nor_where_cuda_is_present(
    found: dict[str, object],
) -> None:
    assert found["import"] == [True, False]
    assert "no CUDA device: set MCORE_BATCHING_CPU=1" in str(found["bootstrap"])
    name, message, is_runtime_error = found["refused"]  # type: ignore[misc]
    assert (name, is_runtime_error) == ("DeviceError", True)
    assert "this machine has CUDA: unset MCORE_BATCHING_CPU" in message
    assert "set it to force" in message
    assert "cannot run with Transformer Engine" in str(found["engine imported"])
    assert "set MCORE_BATCHING_CPU=1 before" in str(found["engine imported"])


def test_the_variable_alone_turns_it_on_before_megatron_looks_for_kernels(
    found: dict[str, object],
) -> None:
    """In a loop of one's own, under plain torchrun; CUDA tensors are then the host's."""
    enabled = found["enabled"]
    assert isinstance(enabled, dict)
    assert [name for name, right in enabled.items() if not right] == []
    assert found["engine hidden"] == "ModuleNotFoundError"


def test_programs_without_a_training_script_start(found: dict[str, object]) -> None:
    """With the processes that their dims need, and collectives that wait as long as they say."""
    assert found["dims"] == (
        "the parallel dims need 2 processes, torchrun started 1: set --nproc-per-node to 2 or "
        "change the dims"
    )
    assert found["timeout"] == 30.0
    assert found["model"] == ["DistributedDataParallel", "Float16Module", "GPTModel"]
    assert found["depths"] == [0, 2]  # of multi-token prediction, as configured


def test_mambas_state_decays_from_token_to_token() -> None:
    """The quadratic form is the recurrence that it stands for, anew with every sequence."""
    projected = torch.randn(1, 5, 5, generator=torch.Generator().manual_seed(0))
    rates, step_bias, skip = torch.tensor([-0.7]), torch.tensor([0.3]), torch.tensor([0.5])
    numbers = torch.tensor([[0, 0, 0, 1, 1]])
    settings = {"headdim": 1, "ngroups": 1, "seq_idx": numbers, "D": skip}
    convolution = torch.ones(3, 1), torch.zeros(3)
    found = cpu_kernels._mamba(projected, *convolution, step_bias, rates, **settings)
    state = torch.zeros(1)
    for token, (gate, *mixed, step) in enumerate(projected[0]):
        x, key, query = silu(torch.stack(mixed))
        if token == 3:
            state = torch.zeros(1)
        step = softplus(step + step_bias)
        state = (step * rates).exp() * state + step * x * key
        assert torch.allclose(found[0, token], (state * query + x * skip) * silu(gate), atol=1e-6)
