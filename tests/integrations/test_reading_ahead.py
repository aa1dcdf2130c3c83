"""Batches that are read before they are drawn: the same draws, in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core import rerun_state_machine
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode

from mcore_batching.integrations.megatron_lm import stock_steps
from mcore_batching.integrations.megatron_lm.stock_steps import (
    StockDataError,
    StockSteps,
    batches_ahead,
    draw_batches,
)


@pytest.fixture(autouse=True)
def _rerun_machine() -> Iterator[None]:
    rerun_state_machine.initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    yield
    rerun_state_machine.destroy_rerun_state_machine()


def numbered(count: int, error: Exception | None = None) -> Iterator[dict[str, int]]:
    for number in range(count):
        yield {"number": number}
    if error is not None:
        raise error


def numbers(batches: Any) -> list[int]:
    return [batch["number"] for batch in batches]


def test_no_more_is_read_than_the_next_step_draws() -> None:
    """The job may end there, or its data with an error that is nobody's yet."""
    values = numbered(9)
    assert numbers(batches_ahead(RerunDataIterator(values), 4)) == [0, 1, 2, 3]
    assert next(values) == {"number": 4}


def test_another_number_may_be_drawn_than_was_read() -> None:
    """As where the batch size ramps up or down, or evaluation has been read for in between."""
    iterator = RerunDataIterator(numbered(9))
    assert numbers(batches_ahead(iterator, 4)) == [0, 1, 2, 3]
    buffer = iterator.iterable
    assert numbers(draw_batches(iterator, 2)) == [0, 1]
    assert numbers(batches_ahead(iterator, 2)) == [2, 3]
    assert iterator.iterable is buffer  # not one in front of another, more every step
    assert numbers(draw_batches(iterator, 4)) == [2, 3, 4, 5]
    assert numbers(batches_ahead(iterator, 3)) == [6, 7, 8]
    assert numbers(draw_batches(iterator, 3)) == [6, 7, 8]


def test_iterators_of_all_model_chunks_are_read_and_the_first_given() -> None:
    iterators = [RerunDataIterator(numbered(4)), None, RerunDataIterator(numbered(4))]
    assert numbers(batches_ahead(iterators, 2)) == [0, 1]
    assert iterators[2].iterable.next_values(2) == [{"number": 0}, {"number": 1}]
    assert numbers(draw_batches(iterators, 2)) == [0, 1]
    assert numbers(draw_batches(iterators, 2)) == [2, 3]
    assert [next(each, None) for each in iterators[::2]] == [None, None]


@pytest.mark.parametrize("iterator", [None, [None, None], iter([{"number": 0}])])
def test_others_than_megatrons_iterators_are_left_alone(iterator: Any) -> None:
    assert batches_ahead(iterator, 1) is None
    assert not isinstance(iterator, list | None) or draw_batches(iterator, 1) is None


def test_the_end_of_the_data_is_an_error_where_it_is_drawn() -> None:
    iterator = RerunDataIterator(numbered(5))
    assert numbers(batches_ahead(iterator, 4)) == [0, 1, 2, 3]
    draw_batches(iterator, 4)
    with pytest.raises(StopIteration):
        batches_ahead(iterator, 4)
    with pytest.raises(StockDataError, match="ended after 1 of 4 micro-batches"):
        draw_batches(iterator, 4)
    with pytest.raises(StockDataError, match="ended after 0 of 4 micro-batches"):
        draw_batches(iterator, 4)


def test_an_error_of_the_data_is_raised_where_it_is_drawn() -> None:
    iterator = RerunDataIterator(numbered(1, OSError("the disk is gone")))
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            batches_ahead(iterator, 2)
    with pytest.raises(OSError, match="the disk is gone"):
        draw_batches(iterator, 2)


def test_a_rerun_replays_what_its_step_drew_though_more_was_read() -> None:
    iterator = RerunDataIterator(numbered(9))
    iterator.advance()
    assert numbers(draw_batches(iterator, 2)) == [0, 1]
    assert numbers(batches_ahead(iterator, 2)) == [2, 3]
    iterator.rewind()
    assert numbers(draw_batches(iterator, 2)) == [0, 1]
    assert numbers(batches_ahead(iterator, 2)) == [2, 3]
    # What a checkpoint of the rerun saves is what the step drew.
    assert numbers(iterator.state_dict()["saved_microbatches"]) == [0, 1]
    iterator.advance()
    assert numbers(draw_batches(iterator, 2)) == [2, 3]


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
