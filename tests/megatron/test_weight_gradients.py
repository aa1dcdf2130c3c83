"""The queue of weight gradients that split backward passes leave for later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.split_backward import weight_gradients
from mcore_batching.megatron.split_backward.linear_layers import leaving_weights
from mcore_batching.megatron.split_backward.plan import planned_split
from mcore_batching.megatron.split_backward.weight_gradients import WeightGradients
from mcore_batching.planning import ParallelDims, PlannerConfig
from mcore_batching.planning.pipeline import PARTS, Pass, SplitStage

LAYERS = 3
WEIGHTS = [torch.nn.Parameter(torch.zeros(1)) for _ in range(LAYERS)]
INPUT = torch.zeros(5)  # 20 bytes
ORDER = [Pass("F", 0, 0), Pass("B", 0, 0), Pass("F", 0, 1), Pass("B", 0, 1), Pass("F", 0, 2)]
Log = list[tuple[int, int]]
"""Layer and slot of each weight gradient that has run."""


@pytest.fixture(autouse=True)
def _marks(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(weight_gradients, "mark", lambda: float(next(ticks)))


def queue(parts_before: list[int], split: str = "BB") -> WeightGradients:
    wanted = iter(split)
    is_split = [each.kind == "B" and next(wanted) == "B" for each in ORDER]
    return WeightGradients(ORDER, SplitStage(tuple(is_split), tuple(parts_before)))


def pass_of(weights: WeightGradients, what: Pass, log: Log) -> None:
    with weights.passing(what.kind == "B"):
        if weights.splits_now:
            for layer in reversed(range(LAYERS)):
                weights.put(WEIGHTS[layer], [INPUT], adding(log, layer, what.slot))


def adding(log: Log, layer: int, slot: int) -> Callable[[], None]:
    return lambda: log.append((layer, slot))


def ran(weights: WeightGradients) -> Iterator[Log]:
    """What runs before each pass and in it."""
    log: Log = []
    for what in ORDER:
        weights.run_due()
        yield list(log)
        log.clear()
        pass_of(weights, what, log)
        assert not log
    weights.run_due()
    assert not log  # what is left runs after the last pass's transfers


def test_parts_run_oldest_first_and_by_whole_layers() -> None:
    weights = queue([0, 0, 3, 5, PARTS])
    assert list(ran(weights)) == [
        [],
        [],
        [(2, 0), (1, 0)],  # three parts of eight: one layer of three, and a part of the next
        [(0, 0)],
        [(2, 1), (1, 1), (0, 1)],
    ]
    assert (weights.num_bytes, weights.peak_bytes) == (0, 60)


def test_parts_go_on_with_the_next_micro_batch() -> None:
    weights = queue([0, 0, 0, 0, PARTS + 5])
    *_, last = ran(weights)
    assert last == [(2, 0), (1, 0), (0, 0), (2, 1), (1, 1)]
    assert weights.peak_bytes == 120


def test_whole_passes_leave_nothing() -> None:
    weights = queue([0, 0, 0, 0, PARTS], split=" B")
    *_, last = ran(weights)
    assert last == [(2, 1), (1, 1), (0, 1)]


def test_the_flush_follows_the_calls_that_it_holds_back() -> None:
    weights, log = queue([0] * 5), []
    for what in ORDER[:4]:
        pass_of(weights, what, log)
    for layer in (1, 0, 2):
        weights.hold(WEIGHTS[layer], adding(log, layer, -1))
    weights.flush(WEIGHTS[:1])
    assert log == [(0, 0), (0, 1), (0, -1)]
    weights.flush()
    assert log[3:] == [(1, 0), (1, 1), (1, -1), (2, 0), (2, 1), (2, -1)]
    assert weights.num_bytes == 0
    weights.flush()
    assert len(log) == 9


def test_parts_left_after_some_parameters_were_flushed() -> None:
    weights, log = queue([0, 0, 4, 0, 4]), []
    for what in ORDER[:2]:
        pass_of(weights, what, log)
    weights.flush([WEIGHTS[2]])
    pass_of(weights, ORDER[2], log)
    assert log == [(2, 0), (1, 0)]
    weights.flush()
    assert log == [(2, 0), (1, 0), (0, 0)]


def test_what_was_sent_last_is_waited_for_when_all_weights_have_run() -> None:
    weights, log = queue([0] * 5), []
    for what in ORDER:
        assert not weights.passes_are_over
        pass_of(weights, what, log)
    assert weights.passes_are_over
    weights.wait_after_flush(adding(log, -1, -1))
    weights.flush([WEIGHTS[2]])
    assert len(log) == 2
    weights.flush()
    assert log[-1] == (-1, -1)
    assert len(log) == 2 * LAYERS + 1
    weights.flush()
    assert len(log) == 2 * LAYERS + 1


def test_why_no_pass_is_split_is_said() -> None:
    said: list[str] = []
    job: Any = SimpleNamespace(say_once=lambda key, text: said.append(text))
    config = PlannerConfig(max_tokens_per_gpu=9, split_backward="auto")
    for dims, has_plans in (
        (ParallelDims(), True),
        (ParallelDims(data_parallel=2, pipeline_parallel=2, expert_parallel=2), False),
    ):
        schedule: Any = SimpleNamespace(config=config, dims=dims, plans=has_plans)
        assert planned_split(job, schedule, 0) == ()
    reasons = ("without pipeline", "with expert")
    for text, reason in zip(said, reasons, strict=True):
        assert text.startswith(f"--dynamic-batch-split-backward has no effect {reason}")


def test_other_passes_than_planned_are_named() -> None:
    weights = queue([0] * 5)
    with (
        pytest.raises(DynamicBatchArgumentError, match="pass 0 of this stage is backward, planned"),
        weights.passing(True),
    ):
        pass
    for what in ORDER:
        pass_of(weights, what, [])
    with (
        pytest.raises(
            DynamicBatchArgumentError,
            match=r"another schedule .* unset --dynamic-batch-split-backward",
        ),
        weights.passing(False),
    ):
        pass


def test_saved_tensors_are_unpacked_once() -> None:
    """Whoever computes them anew, or brings them back, does it once."""
    saved = [(INPUT, WEIGHTS[0])]

    class Context:
        gradient_accumulation_fusion = False

        @property
        def saved_tensors(self) -> Any:
            return saved.pop()

    backward = leaving_weights(lambda ctx, gradient: ctx.saved_tensors, queue([0] * 5), ())
    assert backward(Context(), INPUT) == (INPUT, WEIGHTS[0])


def test_a_failed_step_leaves_nothing() -> None:
    weights, log = queue([0] * 5), []
    pass_of(weights, ORDER[0], log)
    with contextlib.suppress(ZeroDivisionError), weights.passing(True):
        weights.put(WEIGHTS[0], [INPUT], adding(log, 0, 0))
        raise ZeroDivisionError
    weights.hold(WEIGHTS[0], adding(log, 0, -1))
    weights.wait_after_flush(adding(log, -1, -1))
    weights.clear()
    weights.flush()
    assert (log, weights.num_bytes, weights.splits_now) == ([], 0, False)


def test_times_say_whose_weights_ran() -> None:
    weights = queue([0, 0, 3, 0, PARTS])
    list(ran(weights))
    weights.flush()
    runs = [(run.num_bytes, run.start < run.end) for run in weights.timed]
    first, second = ORDER[1], ORDER[3]
    assert runs == [
        ({first: 40}, True),
        ({first: 20}, True),
        ({second: 40}, True),
        ({second: 20}, True),
    ]
    assert all(one.end < other.start for one, other in pairwise(weights.timed))
