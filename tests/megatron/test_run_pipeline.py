"""A row's forward pass, what losses are given of it, and what pipeline stages send each other."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.packing import pack
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from mcore_batching.megatron import DynamicBatchArgumentError, compat, job
from mcore_batching.megatron.forward_only import _evaluation_mode
from mcore_batching.megatron.log_probs import response_log_probs
from mcore_batching.megatron.logits import FusedLogits, noting_use
from mcore_batching.megatron.loss_shares import attached
from mcore_batching.megatron.run_pipeline import (
    PlannedTransfers,
    joined_multimodal_inputs,
    run_for_losses,
)
from mcore_batching.planning import ParallelDims


def test_multimodal_inputs_are_joined_name_by_name() -> None:
    pixels, more = torch.zeros(2, 3), torch.ones(1, 3)
    grid = torch.tensor([[1, 2]])
    joined = joined_multimodal_inputs([{"pixels": pixels, "grid": grid}, None, {"pixels": more}])
    assert joined.keys() == {"pixels", "grid"}
    assert torch.equal(joined["pixels"], torch.cat([pixels, more]))
    assert torch.equal(joined["grid"], grid)
    assert joined_multimodal_inputs([None, {}]) == {}


def test_a_share_is_attached_only_to_what_it_does_not_depend_on() -> None:
    """A zero gradient of logits that have one anyway would take as much memory as they do."""
    logits = torch.ones(3, requires_grad=True)
    share = (2.0 * logits).sum()
    assert attached(share, logits) is share
    for each, gradient in ((share, 2.0), (torch.zeros(()), 0.0)):
        logits.grad, unused = None, torch.full((2,), torch.inf, requires_grad=True)
        made = attached(each, logits, unused)
        assert made == each  # 0 times an infinite entry would be NaN
        made.backward()
        assert unused.grad is not None
        assert unused.grad.tolist() == [0.0] * 2
        assert logits.grad is not None
        assert logits.grad.tolist() == [gradient] * 3


def test_forward_passes_leave_each_module_in_its_mode() -> None:
    """Also one that is kept in evaluation mode, with dropout off, while others train."""
    frozen, dropout = (
        torch.nn.Sequential(torch.nn.Identity(), torch.nn.Dropout()),
        torch.nn.Dropout(),
    )
    first, second = torch.nn.Sequential(frozen, dropout), torch.nn.Identity().eval()
    config: Any = SimpleNamespace(timers="a clock")
    first.config = second.config = config
    frozen.eval()
    modules = [*first.modules(), *second.modules()]
    modes = [module.training for module in modules]
    with contextlib.suppress(ZeroDivisionError), _evaluation_mode([first, second]):
        assert not any(module.training for module in modules)
        assert config.timers is None
        raise ZeroDivisionError
    assert [module.training for module in modules] == modes == [True, *[False] * 3, True, False]
    assert config.timers == "a clock"


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[None]:
    """Megatron's, of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    job._memory = None
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def fused(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[FusedLogits, list[None]]:
    """Logits that are not made yet, and an entry for each time that they are."""
    times: list[None] = []
    logits = FusedLogits(
        hidden,
        weight,
        sequence_parallel=False,
        dtype=torch.float32,
        multiply=lambda by_token: (by_token @ weight.t(), None),
        when_made=lambda: times.append(None),
    )
    return logits, times


@pytest.mark.usefixtures("groups")
def test_logits_are_made_once_for_what_else_reads_them() -> None:
    """Not for their shape or type; what is written over them stays, also for log-probs."""
    hidden, weight = torch.randn(1, 6, 4), torch.randn(8, 4)
    logits, times = fused(hidden, weight)
    assert isinstance(logits, torch.Tensor)
    assert (logits.shape, logits.size(2), logits.dtype) == ((1, 6, 8), 8, torch.float32)
    assert (logits.device.type, logits.requires_grad, times) == ("cpu", False, [])
    expected = hidden @ weight.t()
    torch.testing.assert_close(logits[:, 1:3], expected[:, 1:3])
    torch.testing.assert_close(torch.cat([logits, logits]), torch.cat([expected, expected]))
    logits.div_(2.0)
    torch.testing.assert_close(logits.whole, expected / 2)
    torch.testing.assert_close(logits.log_softmax(-1), (expected / 2).log_softmax(-1))
    samples = {"tokens": [torch.arange(6)], "total_lengths": [6], "response_lengths": [5]}
    row = pack(samples, sample_indices=[0])
    found, halved = (response_log_probs(each, row)[0] for each in (logits, expected / 2))
    torch.testing.assert_close(found, halved)
    assert len(times) == 1


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("reads_first", [True, False])
def test_a_loss_may_read_logits_beside_log_probs(reads_first: bool) -> None:
    """With the same gradients, in whichever order it does."""
    samples = {"tokens": [torch.arange(6)], "total_lengths": [6], "response_lengths": [5]}
    row, found = pack(samples, sample_indices=[0]), []
    for is_fused in (True, False):
        torch.manual_seed(0)
        factors = torch.randn(1, 6, 4), torch.randn(8, 4)
        hidden, weight = (each.requires_grad_() for each in factors)
        logits = fused(hidden, weight)[0] if is_fused else hidden @ weight.t()
        spread = logits.square().mean() if reads_first else 0.0
        share = response_log_probs(logits, row, overwrite_logits=is_fused)[0].sum() + spread
        if not reads_first:
            share = share + logits.square().mean()
        found.append((share, *torch.autograd.grad(share, (hidden, weight))))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.usefixtures("groups")
def test_temperatures_are_of_the_innermost_step() -> None:
    """Also after one that failed inside of another."""
    samples = {"tokens": [torch.arange(3)], "total_lengths": [3], "response_lengths": [1]}
    row, logits = pack(samples, sample_indices=[0]), torch.zeros(1, 3, 8)
    with noting_use() as outer:
        with contextlib.suppress(ZeroDivisionError), noting_use() as inner:
            response_log_probs(logits, row, temperature=2.0)
            raise ZeroDivisionError
        response_log_probs(logits, row)
    response_log_probs(logits, row, temperature=0.7)
    assert (outer.temperatures, inner.temperatures) == ({1.0}, {2.0})


class _Chunk(torch.nn.Module):
    """A model that returns the length of the longest sequence, as its layers are given it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_moe_experts=None, mtp_num_layers=None, **settings)

    def forward(self, *, packed_seq_params: Any, **unused: Any) -> int:
        return int(packed_seq_params.max_seqlen_q)


@pytest.mark.usefixtures("groups")
def test_fused_rope_sees_few_lengths() -> None:
    """An eighth longer at most; unfused, which goes by the exact length, the row's own."""
    own = job.job_of(SimpleNamespace(max_tokens_per_gpu=1 << 18))

    def length_in(length: int, **settings: Any) -> int:
        samples = {"tokens": [torch.zeros(length, dtype=torch.int64)], "total_lengths": [length]}
        row = pack(samples | {"response_lengths": [1]}, sample_indices=[0])
        return int(run_for_losses(own, _Chunk(**settings), row)[0])

    lengths = range(131072 - 10 * 305, 131072 + 10 * 305, 305)
    rounded = [length_in(length, apply_rope_fusion=True) for length in lengths]
    assert len(lengths) == 20
    assert len({*rounded}) == 2
    assert all(own <= given <= 9 / 8 * own for own, given in zip(lengths, rounded, strict=True))
    assert length_in(131073, apply_rope_fusion=False) == 131073


def planned(dims: ParallelDims, num_microbatches: int, forward_only: bool) -> list[Any]:
    """The transfers of every stage; micro-batch i has rows of i + 1 tokens."""
    shapes = [[slot + 1, 1, 4] for slot in range(num_microbatches)]
    return [
        PlannedTransfers(shapes, dims, stage, forward_only=forward_only)
        for stage in range(dims.pipeline_parallel)
    ]


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize(
    ("pipeline", "virtual", "group"), [(2, 1, None), (4, 1, None), (2, 2, 3), (3, 2, 3), (2, 3, 2)]
)
def test_a_stage_expects_what_its_neighbour_sends(
    pipeline: int, virtual: int, group: int | None, forward_only: bool
) -> None:
    dims = ParallelDims(
        pipeline_parallel=pipeline, virtual_pipeline=virtual, microbatch_group_size=group
    )
    count = dims.round_up_num_microbatches(2 * pipeline + 1)
    stages = planned(dims, count, forward_only)
    for stage, following in itertools.pairwise([*stages, stages[0]]):
        sent, received = list(stage._to_next), list(following._from_previous)
        assert sent == received
        chunks = virtual - (following is stages[0])
        assert len(sent) == count * chunks
        back_sent, back_received = list(following._to_previous), list(stage._from_next)
        assert back_sent == back_received
        assert len(back_sent) == (0 if forward_only else count * chunks)


def test_tensors_that_the_plan_does_not_have_are_refused_before_they_are_sent() -> None:
    first, _ = planned(ParallelDims(pipeline_parallel=2), 2, False)
    assert first(torch.zeros(1, 1, 4), None, False, True) == ([0, 0, 0], [1, 1, 4])
    with pytest.raises(
        DynamicBatchArgumentError,
        match=r"sends shape \[2, 1, 8\], but its neighbour expects \[2, 1, 4\]; "
        r"set --dynamic-batch-no-planned-shapes",
    ):
        first(torch.zeros(2, 1, 8), None, False, False)
    first(None, None, False, True)
    for transfer in ((torch.zeros(1, 1, 4), None, False, False), (None, None, False, True)):
        with pytest.raises(
            DynamicBatchArgumentError, match="a stage has more transfers than its schedule"
        ):
            first(*transfer)


def test_megatrons_exchange_is_replaced_inside_the_block_alone() -> None:
    exchange = P2PCommunicator._communicate_shapes
    answers: list[Any] = []

    def known(*transfer: Any) -> tuple[list[int], list[int]]:
        answers.append(transfer)
        return [1], [2]

    with contextlib.suppress(ZeroDivisionError), compat.shapes_of_transfers(known):
        stage = object.__new__(P2PCommunicator)
        assert stage._communicate_shapes(None, None, True, False) == ([1], [2])
        raise ZeroDivisionError
    assert answers == [(None, None, True, False)]
    assert P2PCommunicator._communicate_shapes is exchange


def test_an_exchange_of_another_kind_is_left_alone_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def exchange(self: Any, tensors: Any) -> Any:
        return self, tensors

    monkeypatch.setattr(P2PCommunicator, "_communicate_shapes", exchange)
    with warnings.catch_warnings(record=True) as caught:
        for _ in range(3):
            with compat.shapes_of_transfers(lambda *transfer: ([], [])):
                assert P2PCommunicator._communicate_shapes is exchange
    assert [str(each.message).split(":")[0] for each in caught] == [
        "this Megatron-LM exchanges shapes between pipeline stages in a way that is not known here"
    ]
