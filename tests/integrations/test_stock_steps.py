"""A stock loop's batches become unpadded samples, of which nothing that is trained is lost; batches
that are read before they are drawn are the same draws in the same order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from megatron.core import rerun_state_machine
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode
from planning_cases import examples
from torch import Tensor

from mcore_batching.batch import SchemaError
from mcore_batching.integrations.megatron_lm import stock_steps
from mcore_batching.integrations.megatron_lm.stock_steps import (
    StockDataError,
    StockSteps,
    batches_ahead,
    draw_batches,
    num_truncated,
    unpadded_samples,
)
from mcore_batching.planning import CostModel

Rows = list[list[tuple[int, bool]]]
"""For every row its positions: which one of its document, and whether it is trained."""


def batch(rows: Rows) -> dict[str, Tensor]:
    """A stock batch of rows of one length; every token and label has a number of its own."""
    number, length = len(rows), len(rows[0])
    tokens = torch.arange(number * length).reshape(number, length)
    return {
        "tokens": tokens,
        "labels": tokens + 1000,
        "loss_mask": torch.tensor([[float(on) for _, on in row] for row in rows]),
        "position_ids": torch.tensor([[at for at, _ in row] for row in rows]),
    }


def masked(*masks: list[int]) -> dict[str, Tensor]:
    """A batch of rows of one document each, with these loss masks."""
    return batch([[(at, bool(on)) for at, on in enumerate(mask)] for mask in masks])


@st.composite
def rows_of_documents(draw_from: st.DrawFn) -> tuple[Rows, list[list[int]]]:
    """The rows, of which the first document may have begun before; and offsets of conversations."""
    length = draw_from(st.integers(1, 12))
    cuts = st.sets(st.integers(1, length), max_size=3)
    rows, offsets = [], []
    for _ in range(draw_from(st.integers(1, 4))):
        starts = {-draw_from(st.integers(0, 2)), *draw_from(cuts)}
        mask = draw_from(st.lists(st.booleans(), min_size=length, max_size=length))
        begun = [max(start for start in starts if start <= at) for at in range(length)]
        rows.append([(at - begun[at], mask[at]) for at in range(length)])
        # The row's end fills them up, from 0.19 on.
        ends = sorted({0, length, *draw_from(cuts)})
        offsets.append(ends + [length] * (length + 1 - len(ends)))
    return rows, offsets


@pytest.mark.parametrize("form", ["rows", "conversations", "listed"])
@given(drawn=rows_of_documents(), split=st.booleans())
def test_samples_are_runs_of_their_rows_without_a_tail(
    drawn: tuple[Rows, list[list[int]]], split: bool, form: str
) -> None:
    """Every trained position is in one sample, and every row has one. Under
    ``--use-varlen-dataset`` a micro-batch is a list of rows."""
    rows, offsets = drawn
    given_batch: Any = batch(rows)
    if form == "conversations":
        given_batch["cu_seqlens"] = torch.tensor(offsets)
    expected, length = [], len(rows[0])
    for number, row in enumerate(rows):
        cuts = {0, length, *(offsets[number] if form == "conversations" else ())}
        cuts |= {at for at in range(length) if split and row[at][0] == 0}
        for start, end in itertools.pairwise(sorted(cuts)):
            last = max((at for at in range(start, end) if row[at][1]), default=-1)
            if last >= 0 or start == 0:
                first = number * length
                expected.append([*range(first + start, first + max(last, 0) + 1)])
    if form == "listed":
        given_batch = [
            {name: values[at] for name, values in given_batch.items()} for at in range(len(rows))
        ]
    data = unpadded_samples([given_batch] * 2, split_documents=split)
    assert data["total_lengths"] == [len(each) for each in expected] * 2
    assert data["response_lengths"] == [0] * len(expected) * 2
    for name, values in batch(rows).items():
        flat = values.flatten().tolist()
        found = [each.tolist() for each in data[name]]
        assert found == [[flat[at] for at in each] for each in expected] * 2


def packed(length: int, *conversations: int) -> dict[str, Any]:
    """A row of ``--sft``: conversations of these lengths, cut at the row's end; its last label is
    padding, as `SFTDataset` makes it."""
    tokens = torch.arange(1, length + 1) * (torch.arange(length) < sum(conversations))
    offsets = [0, *np.cumsum(conversations[:-1]).tolist(), length]
    row = {"tokens": tokens, "labels": torch.cat((tokens[1:], tokens.new_zeros(1)))}
    row |= {name: torch.ones(length) for name in ("loss_mask", "position_ids")}
    row["cu_seqlens"] = torch.tensor(offsets + [length] * (4 - len(offsets)))
    return {name: values[None] for name, values in row.items()}


def test_rows_that_end_inside_a_conversation_are_counted() -> None:
    rows = [packed(6, 3, 2), packed(6, 3, 5), packed(6, 9), packed(6, 5)]
    assert num_truncated(rows) == 2
    assert num_truncated([{name: torch.cat([row[name] for row in rows]) for name in rows[0]}]) == 2
    assert num_truncated([masked([1, 1, 1])]) == 0


def test_lacking_fields_and_unequal_numbers_of_rows_are_errors() -> None:
    given_batch: dict[str, Any] = masked([1], [1]) | {"attention_mask": None}
    with pytest.raises(ValueError, match="zip"):
        unpadded_samples(
            [given_batch | {"labels": given_batch["labels"][:1]}], split_documents=False
        )
    lacking = r"lacks labels, it has .*: yield tokens, labels"
    with pytest.raises(StockDataError, match=lacking):
        unpadded_samples([given_batch | {"labels": None}], split_documents=False)
    del given_batch["labels"]
    with pytest.raises(StockDataError, match=lacking):
        unpadded_samples([given_batch], split_documents=False)


@pytest.mark.parametrize(("is_reset", "lengths"), [(True, [1, 1]), (False, [3])])
def test_documents_are_samples_where_the_script_separates_them(
    is_reset: bool, lengths: list[int]
) -> None:
    steps = StockSteps(SimpleNamespace(reset_attention_mask=is_reset))
    documents = batch([[(0, True), (1, False), (0, True)]])
    read = steps._read([SimpleNamespace(vocab_size=2000)], [documents])
    assert read is not None
    assert read.total_lengths == lengths


def test_labels_that_are_trained_are_of_the_vocabulary() -> None:
    given_batch = masked([1, 0, 1]) | {"labels": torch.tensor([[2, -100, 64]])}
    steps, model = StockSteps(SimpleNamespace()), SimpleNamespace(vocab_size=65)
    assert steps._read([model], [given_batch])
    model.vocab_size = 64
    with pytest.raises(SchemaError, match=r"'labels', sample 0: .* found 64 at place 2"):
        steps._read([model], [given_batch])


@pytest.fixture(scope="module")
def _rerun_machine() -> Iterator[None]:
    rerun_state_machine.initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    yield
    rerun_state_machine.destroy_rerun_state_machine()


NUMBER = 12


def numbered(fails: bool = False) -> Iterator[dict[str, int]]:
    for number in range(NUMBER):
        yield {"number": number}
    if fails:
        raise OSError("the disk is gone")


def drawn(iterators: Any, count: int) -> list[int] | str:
    """Numbers of the batches, or the error."""
    try:
        return [batch["number"] for batch in draw_batches(iterators, count) or ()]
    except (StockDataError, OSError) as error:
        return str(error)


STEPS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5), st.booleans()), max_size=6)


@pytest.mark.usefixtures("_rerun_machine")
@examples(150)
@given(STEPS, st.booleans(), st.booleans())
@example([(4, 4, True), (2, 2, True), (3, 1, False), (4, 3, False)], True, True)
def test_draws_are_those_without_reading_ahead(
    steps: list[tuple[int, int, bool]], is_chunked: bool, fails: bool
) -> None:
    """Each step draws some batches, reads some ahead, and may be rerun. No more is read: the job
    may end there, or its data with an error that is nobody's yet."""
    sources = [[numbered(fails) for _ in range(1 + is_chunked)] for _ in range(2)]
    ours, theirs = ([RerunDataIterator(each) for each in of_chunk] for of_chunk in sources)
    all_chunks = [ours[0], None, ours[1]] if is_chunked else ours[0]
    position = furthest = 0
    buffers = set()
    for count, ahead, is_rerun in steps:
        for each in (*ours, *theirs):
            each.advance()
        found = drawn(all_chunks, count)
        expected = [drawn(each, count) for each in theirs]
        assert [found] * len(theirs) == expected
        if isinstance(found, str):  # the end of the job
            furthest = NUMBER
            break
        position = min(position + count, NUMBER)
        furthest = min(max(furthest, position + ahead), NUMBER)
        if position + ahead <= NUMBER:
            numbers = [batch["number"] for batch in batches_ahead(all_chunks, ahead) or ()]
            assert numbers == [*range(position, position + ahead)]
        else:
            with pytest.raises((StopIteration, OSError)):
                batches_ahead(all_chunks, ahead)
        buffers.add(ours[0].iterable)  # not one in front of another, more every step
        if is_rerun:
            for each in (*ours, *theirs):
                each.rewind()
            assert drawn(all_chunks, count) == found
            assert [drawn(each, count) for each in theirs] == expected
        # Megatron saves them with a checkpoint.
        states = [each.state_dict() for each in theirs]
        assert [each.state_dict() for each in ours] == states
    assert len(buffers) <= 1
    if furthest < NUMBER:
        assert next(sources[0][0]) == {"number": furthest}


def test_the_end_of_the_data_is_an_error_where_it_is_drawn() -> None:
    assert drawn(numbered(), NUMBER) == [*range(NUMBER)]
    assert "ended after 1 of 4 micro-batches: lower --train-iters or" in drawn(
        iter([{"number": 0}]), 4
    )


@pytest.mark.parametrize("iterator", [None, [None, None], numbered()])
def test_others_than_megatrons_iterators_are_left_alone(iterator: Any) -> None:
    assert batches_ahead(iterator, 1) is None
    assert not isinstance(iterator, list | None) or draw_batches(iterator, 1) is None


def test_samples_read_ahead_are_those_of_the_very_batches_that_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: Any = StockSteps(SimpleNamespace())
    monkeypatch.setattr(steps, "_read", lambda chunks, batches: "read now")
    monkeypatch.setattr(stock_steps, "brought_by", str)
    one, other = {"number": 1}, {"number": 1}
    steps._ahead = [one, other], "read ahead"
    assert steps._draw([], iter([one, other]), 2) == "read ahead"
    for batches in ([one], [other, one]):
        assert steps._draw([], iter(batches), len(batches)) == "read now"
    assert steps._draw([], None, 2) == "read now"  # of stages that read nothing


def test_a_step_that_megatron_reruns_is_planned_by_the_same_costs() -> None:
    """What was learnt meanwhile would change its rounding, which Megatron compares."""
    steps = StockSteps(SimpleNamespace())
    planned = CostModel(per_micro_batch=7.0)
    assert steps._cost_model_of_rerun(3) is None
    steps._last_planned = 3, planned
    assert steps._cost_model_of_rerun(3) is planned
    assert steps._cost_model_of_rerun(4) is None
    assert steps._cost_model_of_rerun(None) is None
