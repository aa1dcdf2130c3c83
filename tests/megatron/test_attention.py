"""Attention of packed rows and of rows with branches, and the layers that have it: the arithmetic
that does not need several processes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_softmax import SoftmaxOne
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import transformer_block
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from refusals import refusals
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mcore_batching import megatron
from mcore_batching.megatron import attention, compat, specs
from mcore_batching.megatron.attention import (
    PackedAttention,
    RowGeometry,
    _GatherStretches,
    _geometry,
    _sinks,
    host_cu_seqlens,
    why_not_variable_length,
)
from mcore_batching.megatron.cpu_emulation import _RANDOM_NUMBERS
from mcore_batching.megatron.prefix_attention import Paths, attend_to_paths, why_no_branches
from mcore_batching.megatron.specs import SequenceParallelNorm, hybrid_spec

SCALE = 0.3


def offsets(lengths: Sequence[int]) -> list[int]:
    return [*itertools.accumulate(lengths, initial=0)]


def config(**changes: Any) -> TransformerConfig:
    """Of one layer with 4 heads of 8 dims that share 2 keys."""
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
    return TransformerConfig(**shape | changes)


def dense(
    query: Tensor, key: Tensor, value: Tensor, window: int = -1, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention ``[queries, heads, dim]`` of a sequence's last tokens, by one softmax."""
    heads = query.shape[1]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    back = torch.arange(len(key))[-len(query) :, None] - torch.arange(len(key))
    hidden = (back < 0) | ((back > window) if window >= 0 else False)
    softmax = torch.nn.Softmax(-1) if sinks is None else SoftmaxOne(-1, sinks)
    weights = softmax(scores.masked_fill(hidden, -math.inf)[None])[0]
    return torch.einsum("hqk,khd->qhd", weights, value)


def dense_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rows: Any,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """PyTorch 2.13's `varlen_attn`, by its documentation, for the CPU: behind the values offsets of
    queries and of keys, and the most of each."""
    assert (scale, enable_gqa) == (SCALE, query.shape[1] != key.shape[1])
    lengths = [each.diff().tolist() for each in rows[:2]]
    assert ([*map(max, lengths)], window_size[1]) == ([*rows[2:]], 0)
    parts = zip(*map(torch.split, (query, key, value), [*lengths, lengths[1]]), strict=True)
    return torch.cat([dense(*each, window_size[0]) for each in parts])


def local_positions(lengths: list[int], size: int, rank: int) -> Tensor:
    """Where the tokens of a rank stand in the whole row, by the rule of two zigzag chunks."""
    sequences = torch.arange(sum(lengths)).split(lengths)
    chunks = [each.tensor_split(2 * size) for each in sequences]
    return torch.cat([each[place] for each in chunks for place in (rank, 2 * size - 1 - rank)])


def group_of(size: int, rank: int) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


@settings(max_examples=60)
@given(
    st.sampled_from([1, 2, 4]),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.sampled_from([4, 2, 1]),
    st.sampled_from([-1, 0, 3, 50]),
    st.booleans(),
)
def test_packed_row_gives_what_its_sequences_give_alone(
    size: int, units: list[int], key_heads: int, window: int, has_sinks: bool
) -> None:
    """Run by run, with sinks as Megatron's softmax has them, by the variable-length kernel, and
    from keys that ranks gathered: what a rank gathers of its own slice is replaced by the row."""
    lengths = [count * (2 * size if size > 1 else 1) for count in units]
    ends, total = offsets(lengths), sum(lengths)
    generator = torch.Generator().manual_seed(total)
    query = torch.randn(total, 4, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, total, key_heads, 8, generator=generator, dtype=torch.float64)
    sinks = torch.tensor([0.0, 1, -2, 3]).double().requires_grad_() if has_sinks else None
    sequences = zip(*(torch.split(x, lengths) for x in (query, key, value)), strict=True)
    alone = torch.cat([dense(*each, window, sinks) for each in sequences])
    ranks = [local_positions(lengths, size, rank) for rank in range(size)]
    held = torch.cat(ranks)
    gathered = mock.Mock(return_value=torch.cat((key, value), -1)[held])
    for rank, mine in enumerate(ranks):
        geometry = RowGeometry(ends, group_of(size, rank), query.device)
        with mock.patch.object(attention, "gather_from_sequence_parallel_region", gathered):
            own = key[mine], value[mine]
            of_runs = geometry.keys(*own)
        assert (of_runs[0] is own[0]) == (size == 1)  # nothing is copied where all lies so
        found = geometry.attend_run_by_run(query[mine], *of_runs, SCALE, 0.0, window, sinks)
        torch.testing.assert_close(found, alone[mine], rtol=1e-12, atol=1e-12)
        if sinks is not None:
            shares = [each.square().sum() for each in (found, alone[mine])]
            ours, expected = (torch.autograd.grad(x, sinks, retain_graph=True)[0] for x in shares)
            torch.testing.assert_close(ours, expected)
            continue
        with mock.patch.object(attention, "variable_length_kernel", return_value=dense_kernel):
            found = geometry.attend(query[mine], *of_runs, SCALE, window)
        torch.testing.assert_close(found, alone[mine], rtol=1e-12, atol=1e-12)


def packed_attention(
    mask: Any = AttnMaskType.causal, ranks: int = 1, **changes: Any
) -> PackedAttention:
    """On the first of these context-parallel ranks."""
    groups = SimpleNamespace(tp=group_of(1, 0), cp=group_of(ranks, 0))
    options = {"softmax_scale": SCALE, "pg_collection": groups}
    return PackedAttention(config(**changes), 1, mask, "self", **options)


def row_of(*lengths: int) -> Any:
    return SimpleNamespace(host_cu_seqlens=offsets(lengths), cp_group=None)


def test_packed_and_plain_rows_are_sequences_side_by_side() -> None:
    attention = packed_attention(attention_dropout=0.0)
    query, (key, value) = torch.randn(5, 3, 4, 8), torch.randn(2, 5, 3, 2, 8)
    together = attention(query, key, value, None)
    packed = [each.transpose(0, 1).flatten(0, 1) for each in (query, key, value)]
    in_a_row = attention(*packed, None, packed_seq_params=row_of(5, 5, 5))
    for i in range(3):
        alone = dense(query[:, i], key[:, i], value[:, i]).reshape(5, -1)
        torch.testing.assert_close(together[:, i], alone)
        torch.testing.assert_close(in_a_row[5 * i : 5 * i + 5], alone)


@pytest.mark.parametrize("row", [None, row_of(6, 6)])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_tensor_parallel_ranks_drop_out_with_numbers_of_their_own(
    row: Any, sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Megatron's attention; under sequence parallelism its block has set them before."""
    for name, function in _RANDOM_NUMBERS.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(tensor_parallel.random, "_get_cuda_rng_state", torch.cuda.get_rng_state)
    monkeypatch.setattr(tensor_parallel.random, "_set_cuda_rng_state", torch.cuda.set_rng_state)
    attention = packed_attention(attention_dropout=0.5)
    attention.config.sequence_parallel = sequence_parallel
    inputs = torch.ones(12, *([] if row else [1]), 4, 8)

    def dropped(seed_of_rank: int, seed_of_all: int) -> Tensor:
        tracker = tensor_parallel.get_cuda_rng_tracker()
        tracker.reset()
        tracker.add("model-parallel-rng", seed_of_rank)
        torch.manual_seed(seed_of_all)
        out: Tensor = attention(inputs, inputs, inputs, None, packed_seq_params=row)
        return out

    first = dropped(1, 1)
    assert not torch.equal(first, attention.eval()(inputs, inputs, inputs, None, None, None, row))
    attention.train()
    assert torch.equal(dropped(2, 1), first) == sequence_parallel
    assert torch.equal(dropped(1, 2), first) != sequence_parallel


ONE = torch.ones(2, 1, 4, 8)
test_refused = refusals(__file__, torch, attention, megatron, globals())


def test_layers_share_what_a_row_is_laid_out_like() -> None:
    """Or each layer would copy its indices to the device anew."""
    row, group = SimpleNamespace(host_cu_seqlens=(0, 4)), group_of(2, 0)
    first = _geometry(row, group, torch.device("cpu"))
    assert _geometry(row, group, torch.device("cpu")) is first
    assert first._restore_index is first._restore_index


def test_offsets_are_read_back_where_a_row_carries_none_on_the_host() -> None:
    given_by_others = SimpleNamespace(
        cu_seqlens_q=torch.tensor([0, 3]), cu_seqlens_q_padded=torch.tensor([0, 4])
    )
    assert host_cu_seqlens(given_by_others) == [0, 4]
    given_by_others.cu_seqlens_q_padded = None
    assert host_cu_seqlens(given_by_others) == [0, 3]


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_of_several_kinds_make_a_block(
    sequence_parallel: bool, has_norms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With norms, also those of heads, that sequence parallelism takes."""
    monkeypatch.setattr(transformer_block, "LayerNormImpl", None)
    experts = {"num_moe_experts": 2, "moe_layer_freq": [0, 1, 1]}
    made = config(num_layers=3, qk_layernorm=has_norms, **experts)
    made.sequence_parallel = sequence_parallel
    plain = get_gpt_decoder_block_spec(made, False, pp_rank=0)
    block = megatron.use_packed_attention(plain, made)
    assert megatron.packed_layer_spec(config(**experts | {"moe_layer_freq": [1]}))
    ours = SequenceParallelNorm if sequence_parallel else plain.layer_norm
    for layer, local in zip(block.layer_specs, plain.layer_specs, strict=True):
        own, given = (each.submodules.self_attention.submodules for each in (layer, local))
        assert own.core_attention is megatron.PackedAttention is not given.core_attention
        assert own.q_layernorm is own.k_layernorm is (ours if has_norms else IdentityOp)
    assert block.layer_norm is ours
    parameters = SequenceParallelNorm(made, 4).parameters()
    assert [each.sequence_parallel for each in parameters] == [sequence_parallel] * 2
    assert transformer_block.LayerNormImpl is (ours if sequence_parallel else None)


def test_every_hybrid_layer_has_the_norm_that_transformer_engine_fuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The exactness tests' reference has the same layers, and would lack it as well."""
    spec = megatron.packed_hybrid_stack_spec
    assert not hasattr(megatron, "packed_nothing_spec")
    if tuple(map(int, version("megatron-core").split(".")[:2])) < (0, 18):
        with pytest.raises(megatron.DynamicBatchArgumentError, match="HybridModel"):
            build_module(spec)
        return
    layers = {name: getattr(spec.submodules, f"{name}_layer").submodules for name in LAYERS}
    assert {name: getattr(layers[name], norm) for name, norm in LAYERS.items()} == dict.fromkeys(
        LAYERS, SequenceParallelNorm
    )
    attention = layers["attention"].self_attention.submodules
    assert attention.core_attention is PackedAttention
    assert attention.linear_qkv is ColumnParallelLinear
    assert hybrid_spec() is spec
    with pytest.raises(megatron.DynamicBatchArgumentError, match="pattern without D"):
        build_module(spec.submodules.dsa_layer, config=None)
    from megatron.core.models.hybrid import hybrid_layer_specs

    monkeypatch.setattr(specs, "uses_transformer_engine", lambda: True)
    assert hybrid_spec.__wrapped__() is hybrid_layer_specs.hybrid_stack_spec


LAYERS = {
    "attention": "input_layernorm",
    "gdn": "input_layernorm",
    "mamba": "norm",
    "mlp": "pre_mlp_layernorm",
    "moe": "pre_mlp_layernorm",
}


@pytest.mark.parametrize(
    ("dims", "dtype", "device", "reason"),
    [
        ((64, 64), torch.bfloat16, "cuda", ""),
        ((256, 256), torch.float16, "cuda", ""),
        ((64, 64), torch.bfloat16, "cpu", "it runs on CUDA alone"),
        ((64, 64), torch.float32, "cuda", "it takes float16 and bfloat16, not torch.float32"),
        ((192, 128), torch.bfloat16, "cuda", "heads have 192 dims in queries and 128 in values"),
        ((264, 264), torch.bfloat16, "cuda", "up to 256 dims a head, in multiples of 8, not 264"),
        ((20, 20), torch.bfloat16, "cuda", "up to 256 dims a head, in multiples of 8, not 20"),
    ],
)
def test_what_the_variable_length_kernel_cannot_take_has_a_reason(
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FakeTensorMode():
        query, value = (torch.empty(3, 2, dim, dtype=dtype, device=device) for dim in dims)
        found = why_not_variable_length(query, value)
        assert found.endswith(reason)
        assert bool(found) == bool(reason)
        monkeypatch.setattr(attention, "variable_length_kernel", lambda: None)  # older PyTorch
        assert bool(reason) or "has none with scale" in why_not_variable_length(query, value)


@pytest.mark.parametrize("starts", [True, False])
def test_learnt_sinks_start_where_the_config_says(
    starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    drawn: list[Tensor] = []
    starting = {"perform_initialization": starts, "init_method": drawn.append}
    sinks = _sinks(config(softmax_type="learnable", **starting), 2)
    assert [each is sinks for each in drawn] == [True] * starts


class WithOffsets(torch.nn.Module):
    def forward(self, hidden: Tensor, packed_seq_params: Any = None) -> Tensor:
        return hidden


class WithAnything(torch.nn.Module):
    def forward(self, hidden: Tensor, **options: Any) -> Tensor:
        return hidden


class Attention(WithOffsets):
    """Named as Megatron's, with a forward pass of another class."""


@pytest.mark.parametrize("kind", [WithOffsets, WithAnything, Attention])
def test_a_layer_of_the_callers_own_may_not_follow_branches(kind: type[torch.nn.Module]) -> None:
    layers = torch.nn.ModuleDict(
        {"norm": torch.nn.LayerNorm(4), "none": IdentityOp(), "mixer": kind()}
    )
    owner = "WithAnything" if kind is WithAnything else "WithOffsets"
    assert f"mixer is a {owner}, which is not known to follow" in why_no_branches([layers])
    del layers["mixer"]
    assert why_no_branches([layers]) == ""


class Core(torch.nn.Module):
    """Stands for Transformer Engine's attention; notes what it is called with."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        self.called_with = key, value, given
        return query


def test_branches_attend_to_their_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """As drawn at the top of `prefix_attention`, with the arguments of Transformer Engine."""
    nodes = {"offsets": [0, 3, 6, 10], "parents": [-1, 0, 0], "starts": [0, 3, 3]}
    letters = torch.tensor([*map(ord, "abcdefdghi")])[:, None]
    row: Any = SimpleNamespace(
        nodes=SimpleNamespace(segments=[0, 10], **nodes),
        tokens=letters,
        context_parallel_size=1,
        context_parallel_rank=0,
    )
    paths = Paths(row, None)
    assert paths.positions.tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6]
    monkeypatch.setattr(compat, "is_engines_attention", lambda module: isinstance(module, Core))
    monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda: group_of(2, 0))
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0, 1])
    given_back: list[Any] = []
    core: Any = Core()
    core.cp_comm_type, Core.cp_stream = "p2p", "stream"
    core.set_context_parallel_group = lambda *given: given_back.append(given[1:])
    layer = torch.nn.Module()
    layer.core_attention = core
    for _ in range(2):  # hooked once
        attend_to_paths([layer])
    params = SimpleNamespace(attention_geometry=paths)
    core(letters, letters, letters, packed_seq_params=params, attn_mask_type=None)
    key, value, named = core.called_with
    assert "".join(map(chr, key[:, 0].tolist())) == "abcabcdefabcdghi"
    assert torch.equal(key, value)
    assert named["attn_mask_type"].name == "padding_causal_bottom_right"
    found = named["packed_seq_params"]
    assert found.cu_seqlens_q.tolist() == [0, 3, 6, 10]
    assert found.cu_seqlens_kv.tolist() == [0, 3, 9, 16]
    assert (found.max_seqlen_q, found.max_seqlen_kv) == (4, 7)
    # It would gather keys itself otherwise.
    assert (found.cp_group, found.local_cp_size) == (None, 1)
    assert given_back == [([0, 1], "stream", "p2p")]
    other = SimpleNamespace(attention_geometry=None)
    core(letters, letters, letters, packed_seq_params=other, attn_mask_type=None)
    assert core.called_with[0] is letters
    assert len(given_back) == 1


def test_gradients_of_a_beginning_are_added_in_float32() -> None:
    rows = torch.zeros(3, 1, dtype=torch.bfloat16, requires_grad=True)
    stretches = [(0, 1), (0, 3), (0, 2)]
    made = _GatherStretches.apply(rows, stretches)
    assert made.shape == (6, 1)
    # In bfloat16 neither of the two small ones would be added to 256.
    made.backward(torch.tensor([256.0, 1, 5, 7, 1, 11]).bfloat16()[:, None])
    assert rows.grad is not None
    assert rows.grad[:, 0].tolist() == [258.0, 16.0, 7.0]
