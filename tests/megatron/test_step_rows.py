"""Rows of a step: made in blocks when they are drawn, of the part of the samples that has them."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from mcore_batching.batch import DEFAULT_SCHEMA, make_placeholder
from mcore_batching.batch.columns import Columns
from mcore_batching.megatron import schedule as schedules
from mcore_batching.megatron.prepare import PreparedStep
from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.planning import ParallelDims, PlannerConfig

LENGTHS = [3, 2, 4, 1, 5, 6, 2]
STEPS = (((0, 1), (2,), (3,), (), (4,)), ((6, 5),))
SAMPLES: dict[str, Any] = {
    "tokens": [torch.arange(1, length + 1) for length in LENGTHS],
    "total_lengths": LENGTHS,
    "response_lengths": [length - 1 for length in LENGTHS],
    "advantages": [torch.arange(length - 1) + 0.5 for length in LENGTHS],
    "multimodal_train_inputs": [{"pixels": torch.ones(2, 3) * length} for length in LENGTHS],
}


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(schedules.parallel_state, "get_context_parallel_rank", lambda: 0)


def schedule(*, in_parts: bool = True) -> Any:
    """Of two steps, the samples of which came one after the other."""
    columns = Columns.read(SAMPLES, DEFAULT_SCHEMA)
    parts = [columns.taken([]), columns.taken(range(5)), columns.taken(range(5, 7))]
    settings = SimpleNamespace(
        dims=ParallelDims(), config=PlannerConfig(max_tokens_per_gpu=16, pad_each_to=4)
    )
    options = SimpleNamespace(checked_pad_token_id=lambda: 0)
    return MicroBatchSchedule(
        samples=SimpleNamespace(settings=settings, job=SimpleNamespace(options=options)),  # type: ignore[arg-type]
        moves=SimpleNamespace(own=0),  # type: ignore[arg-type]
        parts=parts if in_parts else [columns],
        template=make_placeholder(DEFAULT_SCHEMA, list(SAMPLES), SAMPLES),
        steps=STEPS,
    )


def prepared(of: MicroBatchSchedule, step: int = 0) -> PreparedStep:
    return PreparedStep(of, step, 0, False, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("in_parts", [True, False])
def test_rows_are_those_of_the_plan_whichever_part_has_their_samples(
    step: int, in_parts: bool
) -> None:
    of = schedule(in_parts=in_parts)
    totals = of.totals(step, 0)[0]
    # Samples without a prompt have no predecessor of their first token, here none.
    assert totals.num_tokens == sum(LENGTHS[i] - 1 for row in STEPS[step] for i in row)
    (rows,) = ([*each] for each in prepared(of, step).iterators(1))
    assert len(of.parts) == (3 if in_parts else 1)  # without a copy of all
    assert [row.sample_indices for row in rows] == [*STEPS[step]]
    assert [row.num_samples for row in rows] == [len(row) for row in STEPS[step]]
    for row in rows:
        for place, index in enumerate(row.sample_indices):
            assert torch.equal(row["tokens"][place], SAMPLES["tokens"][index])
            assert torch.equal(row["advantages"][place], SAMPLES["advantages"][index])
            assert row["multimodal_train_inputs"][place]["pixels"][0, 0] == LENGTHS[index]
            start = row.host_cu_seqlens_padded[place]
            found = row.tokens[0, start : start + LENGTHS[index]]
            assert torch.equal(found, SAMPLES["tokens"][index])
        with pytest.raises(KeyError):
            row["rewards"]
    names = ("tokens", "advantages")
    whole = of.rollout_data
    assert len(of.parts) == 1
    assert all(
        torch.equal(one, other)
        for name in names
        for one, other in zip(whole[name], SAMPLES[name], strict=True)
    )


def test_a_rollout_is_freed_as_soon_as_nothing_refers_to_it() -> None:
    """The garbage collector may not run for many steps: it counts objects, not their bytes."""
    of = schedule()
    step = prepared(of)
    iterators = step.iterators(2)
    rows = [row for each in iterators for row in each]
    read = [[row["tokens"], row["advantages"], row.index.positions] for row in rows]
    totals = of.totals(0, 0)
    alive = [*map(weakref.ref, (of, *of.parts, *rows, rows[0].tokens))]
    gc.disable()
    try:
        del of, step, iterators, rows, read, totals
        assert [ref() for ref in alive] == [None] * len(alive)
    finally:
        gc.enable()


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


def test_blocks_end_where_the_context_parallel_size_changes_or_they_are_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = schedule()
    # The first alone, for which the device waits; a placeholder's sample is another's.
    cases = [
        (4, [1, 1, 1, 1, 1], [[0], [1], [2], [3], [4]]),
        (5, [1, 1, 1, 1, 1], [[0], [1, 2], [3], [4]]),
        (99, [1, 1, 2, 2, 2], [[0], [1], [2], [3], [4]]),
    ]
    for tokens, sizes, blocks in cases:
        monkeypatch.setattr(schedules, "_BLOCK_TOKENS", tokens)
        monkeypatch.setattr(MicroBatchSchedule, "row_sizes", mock.Mock(return_value=sizes))
        assert of.slots_at_once(0) == blocks
