"""A step's rows: made when they are drawn, checked against the model, run forward; what losses get
of them, and what pipeline stages send each other."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from batch_cases import pack
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from refusals import refusals

from mcore_batching import batch
from mcore_batching.batch import DEFAULT_SCHEMA, Schema, make_placeholder
from mcore_batching.batch.columns import Columns
from mcore_batching.megatron import DynamicBatchArgumentError, compat, job, routing
from mcore_batching.megatron import schedule as schedules
from mcore_batching.megatron.forward_only import _evaluation_mode
from mcore_batching.megatron.log_probs import response_log_probs
from mcore_batching.megatron.logits import FusedLogits, noting_use, present_use
from mcore_batching.megatron.loss_shares import attached
from mcore_batching.megatron.prepare import PreparedStep
from mcore_batching.megatron.run_pipeline import (
    PlannedTransfers,
    joined_multimodal_inputs,
    row_params,
)
from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.planning import ParallelDims, PlannerConfig

LENGTHS = [3, 2, 4, 1, 5, 6, 2, 4]
STEPS = (((0, 1), (2,), (3,), (), (4,)), ((6, 5),), ((7,),))


def samples_of(*lengths: int, **fields: Any) -> dict[str, Any]:
    """Samples with a prompt of one token each."""
    return {
        "tokens": [torch.arange(1, length + 1) for length in lengths],
        "total_lengths": [*lengths],
        "response_lengths": [length - 1 for length in lengths],
        **fields,
    }


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without a GPU or context parallelism."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(schedules.parallel_state, "get_context_parallel_rank", lambda: 0)


def schedule() -> Any:
    """Of three steps, the samples of which came one after the other."""
    advantages = [torch.arange(length - 1) + 0.5 for length in LENGTHS]
    samples = samples_of(*LENGTHS, advantages=advantages)
    columns = Columns.read(samples, DEFAULT_SCHEMA)
    settings = SimpleNamespace(
        dims=ParallelDims(), config=PlannerConfig(max_tokens_per_gpu=16, pad_each_to=4)
    )
    options = SimpleNamespace(checked_pad_token_id=lambda: 0)
    return MicroBatchSchedule(
        samples=SimpleNamespace(settings=settings, job=SimpleNamespace(options=options)),  # type: ignore[arg-type]
        moves=SimpleNamespace(own=0),  # type: ignore[arg-type]
        parts=[columns.taken(each) for each in ([], range(5), (5, 6), (7,))],
        template=make_placeholder(DEFAULT_SCHEMA, list(samples), samples),
        steps=STEPS,
    )


def prepared(of: MicroBatchSchedule, step: int = 0) -> PreparedStep:
    return PreparedStep(of, step, 0, False, None, None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("alone")
def test_a_rollout_is_freed_as_soon_as_nothing_refers_to_it() -> None:
    """The garbage collector may not run for many steps: it counts objects, not their bytes."""
    of = schedule()
    step = prepared(of)
    iterators = step.iterators(2)
    rows = [row for each in iterators for row in each]
    read = [[row["tokens"], row["advantages"], row.index.positions] for row in rows]
    assert len(of.parts) == 4  # of all there is no copy
    totals = of.totals(0, 0)
    alive = [*map(weakref.ref, (of, *of.parts, *rows, rows[0].tokens))]
    gc.disable()
    try:
        del of, step, iterators, rows, read, totals
        assert [ref() for ref in alive] == [None] * len(alive)
    finally:
        gc.enable()


@pytest.mark.usefixtures("alone")
def test_rows_are_packed_in_blocks_when_they_are_drawn_and_once_for_all_epochs() -> None:
    of = schedule()
    for epoch in range(2):
        step = prepared(of)
        assert len(of.made_rows) == (4 if epoch else 0)
        assert step.blocks == [[0], [1, 2], [3], [4]]
        first, second = (list(each) for each in step.iterators(2))
        assert all(one is other for one, other in zip(first, second, strict=True))
        assert torch.equal(first[0]["advantages"][0], torch.tensor([0.5, 1.5]))
        assert first[0].labels[0, :2].tolist() == [2, 3]
        first[0]["advantages"][0].zero_()  # a loss function's own, until the next epoch
        first[0].labels.zero_()
    assert of.totals(0, 0) is of.totals(0, 0)
    masks = [torch.zeros(length - 1) for length in LENGTHS]
    masked = of.rollout_data.extended({"loss_masks": masks}, DEFAULT_SCHEMA)
    of.replace_fields(masked, of.template)
    assert not of.made_rows
    assert of.totals(0, 0)[0].num_tokens == 0


@pytest.mark.parametrize(
    ("tokens", "sizes", "blocks"),
    [
        # The first alone, for which the device waits; a placeholder's sample is another's.
        (4, [1, 1, 1, 1, 1], [[0], [1], [2], [3], [4]]),
        (5, [1, 1, 1, 1, 1], [[0], [1, 2], [3], [4]]),
        (99, [1, 1, 2, 2, 2], [[0], [1], [2], [3], [4]]),
    ],
)
def test_blocks_end_where_the_context_parallel_size_changes_or_they_are_long(
    tokens: int, sizes: list[int], blocks: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "_BLOCK_TOKENS", tokens)
    monkeypatch.setattr(MicroBatchSchedule, "row_sizes", mock.Mock(return_value=sizes))
    assert schedule().slots_at_once(0) == blocks


FIELD = "rollout_routed_experts"


def model(**changes: Any) -> list[Any]:
    """Chunks of a model of 4 layers, experts in every second one."""
    options: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_layer_freq": 2,
        "moe_enable_routing_replay": True,
    }
    config = TransformerConfig(**options)
    vars(config).update(changes)
    return [SimpleNamespace(config=config)]


def check(model: list[Any], *experts: Any, schema: Schema = DEFAULT_SCHEMA, **others: Any) -> None:
    """Check the experts of samples of three tokens, in a step of one micro-batch."""
    samples = samples_of(*[3] * len(experts), **{FIELD: [*experts]} if experts else {}, **others)
    of: Any = SimpleNamespace(
        rollout_data=Columns.read(samples, schema),
        steps=[(tuple(range(len(experts))), ())],
        names_of=lambda indices: f"sample{list(indices)}",
    )
    routing.check_replay(model, of, 0)


EXPERTS = torch.tensor([0, 3]).expand(2, 4, 2)
test_refused = refusals(__file__, torch, batch, globals())


def test_a_placeholder_gets_as_many_layers_as_the_model() -> None:
    """A rank that has no sample has not seen any."""
    fabricated = make_placeholder(DEFAULT_SCHEMA, [*samples_of(), FIELD], None)
    placeholder = pack(fabricated, is_placeholder=True, row_align=6)
    found = routing._experts(placeholder, FIELD, model()[0].config)
    assert found.shape == (6, 4, 2)
    assert bool((found[..., 0] != found[..., 1]).all())
    assert found.unique().tolist() == [0, 1, 2, 3]


def test_experts_of_all_layers_or_of_routed_ones_are_replayed_and_others_left_alone() -> None:
    for layers in (4, 2):
        check(model(), [[[0, 3]] * layers] * 2)
    check(model())
    for changes in ({"moe_enable_routing_replay": False}, {"num_moe_experts": None}):
        check(model(**changes), torch.zeros(2, 9, 9).long())


def test_routers_route_by_themselves_after_a_pipeline_that_failed() -> None:
    """Also where the next forward pass has no recorded experts, as in an evaluation."""
    chunk, router = torch.nn.Module(), torch.nn.Module()
    chunk.config, chunk.router, router.router_replay = model()[0].config, router, RouterReplay()
    with contextlib.suppress(ArithmeticError), routing.replayed_step([chunk]):
        router.router_replay.set_target_indices(torch.zeros(3, 2, dtype=torch.int64))
        router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        raise ArithmeticError
    assert router.router_replay.router_replay_action is None
    assert router.router_replay.target_topk_idx is None


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
        unused = torch.full((2,), torch.inf, requires_grad=True)
        made = attached(each, logits, unused)
        assert made == each  # 0 times an infinite entry would be NaN
        found = torch.autograd.grad(made, (unused, logits), retain_graph=True)
        assert [each.tolist() for each in found] == [[0.0] * 2, [gradient] * 3]


def test_forward_passes_leave_each_module_in_its_mode() -> None:
    """Also one that is kept in evaluation mode, with dropout off, while others train."""
    frozen = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Dropout()).eval()
    model: list[Any] = [torch.nn.Sequential(torch.nn.Dropout()), torch.nn.Identity().eval()]
    model[0].append(frozen)
    model[0].config = model[1].config = SimpleNamespace(timers="a clock")
    modules = [module for chunk in model for module in chunk.modules()]
    modes = [module.training for module in modules]
    with contextlib.suppress(ZeroDivisionError), _evaluation_mode(model):
        assert not any(module.training for module in modules)
        assert model[0].config.timers is None
        raise ZeroDivisionError
    assert [module.training for module in modules] == modes == [True] * 2 + [False] * 4
    assert model[0].config.timers == "a clock"


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[None]:
    """Megatron's, of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    job._memory = None
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def row_of(length: int) -> Any:
    return pack(samples_of(length))


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
    found, halved = (response_log_probs(each, row_of(6))[0] for each in (logits, expected / 2))
    torch.testing.assert_close(found, halved)
    assert len(times) == 1


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("reads_first", [True, False])
def test_a_loss_may_read_logits_beside_log_probs(reads_first: bool) -> None:
    """With the same gradients, in whichever order it does."""
    found = []
    for is_fused in (True, False):
        torch.manual_seed(0)
        factors = torch.randn(1, 6, 4), torch.randn(8, 4)
        hidden, weight = (each.requires_grad_() for each in factors)
        logits = fused(hidden, weight)[0] if is_fused else hidden @ weight.t()
        spread = logits.square().mean() if reads_first else 0.0
        share = response_log_probs(logits, row_of(6), overwrite_logits=is_fused)[0].sum() + spread
        if not reads_first:
            share = share + logits.square().mean()
        found.append((share, *torch.autograd.grad(share, (hidden, weight))))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)


def test_use_is_noted_of_the_innermost_step() -> None:
    """Also after one that failed inside of another."""
    with noting_use() as outer:
        with contextlib.suppress(ZeroDivisionError), noting_use() as inner:
            assert present_use() is inner
            raise ZeroDivisionError
        assert present_use() is outer
    assert present_use() is not outer


def test_fused_rope_sees_few_lengths() -> None:
    """An eighth longer at most; unfused, which goes by the exact length, the row's own."""

    def longest(length: int, is_fused: bool) -> int:
        settings = {"num_moe_experts": None, "mtp_num_layers": None, "apply_rope_fusion": is_fused}
        return int(row_params(SimpleNamespace(**settings), row_of(length), None).max_seqlen_q)

    lengths = range(131072 - 10 * 305, 131072 + 10 * 305, 305)
    rounded = [longest(length, is_fused=True) for length in lengths]
    assert len(lengths) == 20
    assert len({*rounded}) == 2
    assert all(own <= given <= 9 / 8 * own for own, given in zip(lengths, rounded, strict=True))
    assert longest(131073, is_fused=False) == 131073


def test_tensors_that_the_plan_does_not_have_are_refused_before_they_are_sent() -> None:
    dims = ParallelDims(pipeline_parallel=2)
    first = PlannedTransfers([[1, 1, 4], [2, 1, 4]], dims, 0, forward_only=False)
    assert first(torch.zeros(1, 1, 4), None, False, True) == ([0, 0, 0], [1, 1, 4])
    other_shape = (
        r"sends shape \[2, 1, 8\], but its neighbour expects \[2, 1, 4\]; "
        "set --dynamic-batch-no-planned-shapes"
    )
    with pytest.raises(DynamicBatchArgumentError, match=other_shape):
        first(torch.zeros(2, 1, 8), None, False, False)
    first(None, None, False, True)
    too_many = "a stage has more transfers than its schedule"
    for transfer in ((torch.zeros(1, 1, 4), None, False, False), (None, None, False, True)):
        with pytest.raises(DynamicBatchArgumentError, match=too_many):
            first(*transfer)


def test_megatrons_exchange_is_replaced_inside_the_block_alone() -> None:
    exchange, known = P2PCommunicator._communicate_shapes, mock.Mock(return_value=([1], [2]))
    with contextlib.suppress(ZeroDivisionError), compat.shapes_of_transfers(known):
        stage = object.__new__(P2PCommunicator)
        assert stage._communicate_shapes(None, None, True, False) == ([1], [2])
        raise ZeroDivisionError
    known.assert_called_once_with(None, None, True, False)
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
