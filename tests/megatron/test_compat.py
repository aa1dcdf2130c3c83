"""What differs between versions of Megatron, and a CPU in place of the CUDA device.

The CPU stand-in patches when asked to, and never where a GPU would be forgotten: all in one
process, in which it is turned on last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
import torch
from kit import cpu_kernels
from kit.patience import patience
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_batching.megatron import compat, prepare_packed_model
from mcore_batching.megatron.checks import settings
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.options import Options
from mcore_batching.planning import ParallelDims


def test_what_rows_have_beside_megatrons_fields_is_not_declared() -> None:
    """Transformer Engine's wrapper passes on every declared field but those it knows to drop."""
    params = compat.packed_seq_params(torch.tensor([0, 4], dtype=torch.int32), 4, [0, 4])
    assert params.host_cu_seqlens == (0, 4)
    assert "host_cu_seqlens" not in {field.name for field in dataclasses.fields(params)}


@pytest.mark.skipif(not hasattr(PackedSeqParams, "seq_idx"), reason="made by Mamba layers itself")
def test_mamba_layers_number_the_tokens_of_rows_as_megatron_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once a row, and not where its maker did."""

    class Mixer:
        def _ssm_training(self, inputs: Any, packed_seq_params: Any = None) -> Any:
            return packed_seq_params and packed_seq_params.seq_idx

    name = "megatron.core.ssm.mamba_mixer"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(MambaMixer=Mixer))
    monkeypatch.setattr(settings, "current_dims", lambda chunks: ParallelDims())
    model: Any = torch.nn.Identity()
    model.config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    prepare_packed_model(model)
    offsets, inputs = torch.tensor([0, 4, 12, 13], dtype=torch.int32), torch.zeros(13)
    expected = PackedSeqParams(cu_seqlens_q=offsets, total_tokens=13).seq_idx
    row = compat.packed_seq_params(offsets, 8, [0, 4, 12, 13])
    made = Mixer()._ssm_training(inputs, row)
    assert made.dtype == expected.dtype
    assert torch.equal(made, expected)
    assert Mixer()._ssm_training(inputs, row) is made
    padded: Any = SimpleNamespace(cu_seqlens_q_padded=torch.tensor([0, 2, 3]), seq_idx=None)
    assert Mixer()._ssm_training(torch.zeros(3), padded).tolist() == [[0, 0, 1]]
    assert Mixer()._ssm_training(torch.zeros(3)) is None


@pytest.mark.parametrize(
    ("version", "frees_outputs", "waits"),
    [
        ("0.17.1", True, False),
        ("0.18.0rc1", True, True),
        ("0.19.2", True, True),
        ("0.19.2", False, False),
        ("1.0.0", True, True),
    ],
)
def test_who_waits_for_sends(
    version: str, frees_outputs: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron.core, "__version__", version)
    config = SimpleNamespace(deallocate_pipeline_outputs=frees_outputs)
    assert compat.waits_for_sends(config) is waits


OUTPUT_LAYERS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {}, ""),
    ({}, {"use_mup": False}, ""),  # a setting that some releases lack
    ({}, {"use_mup": True}, "scales its logits (--use-mup)"),
    ({"bias": torch.zeros(1)}, {}, "has a bias"),
    ({"gather_output": True}, {}, "gathers its output (parallel_output=False)"),
    ({"gtp_remat_size": 2}, {}, "gathers its weight (generalized tensor parallelism)"),
    ({"kind": torch.nn.Identity}, {}, "is a Identity"),
]


@pytest.mark.parametrize(("changes", "config", "reason"), OUTPUT_LAYERS)
def test_output_layers_that_are_more_than_a_product_cannot_be_fused(
    changes: dict[str, Any], config: dict[str, Any], reason: str
) -> None:
    layer = object.__new__(changes.get("kind", ColumnParallelLinear))
    layer.__dict__.update({"bias": None, "gather_output": False, "gtp_remat_size": 1} | changes)
    chunk = SimpleNamespace(output_layer=layer, config=SimpleNamespace(**config))
    settings.check_logits(Options(), [chunk])
    refused = pytest.raises(DynamicBatchArgumentError, match=re.escape(f"layer {reason}, so it"))
    with refused if reason else contextlib.nullcontext():
        settings.check_logits(Options(fuse_output_layer=True), [chunk])


def test_all_losses_that_routers_record_are_scaled() -> None:
    def values(each: Any) -> Any:  # an object from 0.18 on
        return (each if isinstance(each, dict) else vars(each))["values"]

    recorded = compat._moe_metrics()
    before = dict(recorded)
    recorded.clear()
    group: Any = object()
    for name, groups in (("load_balancing_loss", {"reduce_group": group}), ("z_loss", {})):
        save_to_aux_losses_tracker(name, torch.tensor(6.0), layer_number=1, num_layers=1, **groups)
    # Of 4 slots one is of a row on two ranks, one of one on each.
    compat.scale_moe_metrics(4, rows=3.0, passes=2)
    assert [values(each).tolist() for each in recorded.values()] == [[8.0], [12.0]]
    recorded.clear()
    recorded.update(before)


@pytest.mark.skipif(
    not hasattr(multi_token_prediction, "_compute_mtp_acceptance_counts"),
    reason="this Megatron counts no hits",
)
def test_hits_of_multi_token_prediction_are_counted_by_megatron() -> None:
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])[:, None]
    labels, mask = torch.tensor([[1, 1, 0]]), torch.tensor([[1.0, 1.0, 0.0]])
    layer = SimpleNamespace(gather_output=True)
    guessed, trained = compat.multi_token_hits(logits, labels, mask, layer, None)
    assert (float(guessed), float(trained)) == (1.0, 2.0)


class Layer(torch.nn.Module):
    """Returns what its forward pass finds: the groups of its attention and router, and the mask."""

    def __init__(self, **router: Any) -> None:
        super().__init__()
        self.pg_collection = SimpleNamespace(cp="the model's")
        self.mlp = SimpleNamespace(**router)

    def forward(self, padding_mask: Any = None, **unused: Any) -> tuple[Any, ...]:
        router = getattr(self.mlp, "router", None)
        return self.pg_collection.cp, getattr(router, "tp_cp_group", None), padding_mask


def test_layers_follow_the_groups_of_rows_and_those_with_routers_their_masks() -> None:
    """While they run, set up anew by every step. A router's losses stay logged by the model's
    group."""
    routed = (Layer(router=SimpleNamespace(tp_cp_group="the model's")) for _ in range(2))
    model = torch.nn.ModuleList([*routed, Layer()])
    attention, expert, plain = model
    for _ in range(2):
        compat.let_rows_have_groups(attention)
        compat.let_router_have_groups(expert, expert.mlp.router)
        compat.mask_padding(model)
    row = SimpleNamespace(cp_group="the row's", own_padding_mask="the mask")
    assert attention(packed_seq_params=row) == ("the row's", "the model's", "the mask")
    assert expert(packed_seq_params=row) == ("the model's", "the row's", "the mask")
    assert plain(packed_seq_params=row) == ("the model's", None, None)
    assert expert.mlp.router.models_group == "the model's"
    hooks = [(len(each._forward_pre_hooks), len(each._forward_hooks)) for each in model]
    assert hooks == [(2, 1), (2, 1), (0, 0)]
    for layer in (attention, expert):
        for params in (None, SimpleNamespace(cp_group=None)):
            found = layer(padding_mask="given", packed_seq_params=params)
            assert found == ("the model's", "the model's", "given")


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

from mcore_batching import ParallelDims, ParallelDimsError
import bootstrap
os.environ.update(RANK='0', WORLD_SIZE='1', LOCAL_RANK='0')
os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='0')
initialize_process_group()
try:
    bootstrap.initialize_model_parallel(ParallelDims(data_parallel=2))
except ParallelDimsError as error:
    found['dims'] = str(error)
print(json.dumps(found))
"""


def test_the_cpu_stands_for_cuda_where_it_is_asked_to(tmp_path: Path) -> None:
    """With a Transformer Engine on the path that no CPU can import."""
    (tmp_path / "transformer_engine.py").write_text("raise RuntimeError('no GPU')\n")
    bootstrap = Path(__file__).resolve().parents[2] / "examples" / "grpo"
    paths = os.pathsep.join([str(tmp_path), str(bootstrap), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=patience(240),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # Nothing is touched unless asked to, nor where CUDA is present.
    assert found["import"] == [True, False]
    assert "no CUDA device: set MCORE_BATCHING_CPU=1" in found["bootstrap"]
    name, message, is_runtime_error = found["refused"]
    assert (name, is_runtime_error) == ("DeviceError", True)
    assert "this machine has CUDA: unset MCORE_BATCHING_CPU" in message
    assert "set it to force" in message
    assert "cannot run with Transformer Engine" in found["engine imported"]
    assert "set MCORE_BATCHING_CPU=1 before" in found["engine imported"]
    # The variable alone turns it on before Megatron looks for kernels, under plain torchrun, too.
    assert [name for name, right in found["enabled"].items() if not right] == []
    assert found["engine hidden"] == "ModuleNotFoundError"
    assert found["dims"] == (
        "the parallel dims need 2 processes, torchrun started 1: set --nproc-per-node to 2 or "
        "change the dims"
    )


def test_mambas_state_runs_on_from_token_to_token() -> None:
    """To the end of the sequence: else jobs would not show whether samples are kept apart."""
    projected = torch.randn(1, 5, 5, generator=torch.Generator().manual_seed(0))
    sizes = {"headdim": 1, "ngroups": 1, "seq_idx": torch.tensor([[0, 0, 0, 1, 1]])}
    weights = torch.ones(3, 1), torch.zeros(3), torch.tensor([0.3]), torch.tensor([-0.7])
    found, changed = (
        cpu_kernels._mamba(each, *weights, D=torch.tensor([0.5]), **sizes)[0, :, 0]
        for each in (projected, projected.index_fill(1, torch.tensor(0), 1.0))
    )
    assert found.ne(changed).tolist() == [True, True, True, False, False]
