"""The next step's batches, read with this one, so that its plan is made while this one runs.

    draws of the step    b0 b1 b2 b3 | b4 b5 b6 b7 | ...      as without reading ahead
    reads    b0 b1 b2 b3 b4 b5 b6 b7 ...                  before the step's pipeline

Batches that no step has drawn (another number is wanted, or the job ends) are only read, not lost.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from megatron.core.rerun_state_machine import RerunDataIterator

Batches = Sequence[Mapping[str, Any]]


class Buffered:
    """An iterator, of which some values have been read before they are drawn."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._read: collections.deque[tuple[Any, Exception | None]] = collections.deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._read:
            return next(self._iterator)
        value, error = self._read.popleft()
        if error is not None:  # in the place where it would have been raised
            raise error
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def next_values(self, count: int) -> list[Any]:
        """The values that are drawn next; raises what reading one did, as drawing it will again."""
        while len(self._read) < count and not (self._read and self._read[-1][1]):
            try:
                self._read.append((next(self._iterator), None))
            except Exception as error:
                self._read.append((None, error))
        ahead = [*self._read][:count]
        for _, raised in ahead:
            if raised is not None:
                raise raised
        return [value for value, _ in ahead]


def batches_ahead(data_iterator: Any, num_batches: int) -> Batches | None:
    """Batches that `draw_batches` would draw next; None if there are none, or not Megatron's.

    Raises what reading a batch did, as drawing it will again.
    """
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    read = []
    for iterator in iterators:
        if isinstance(iterator, RerunDataIterator):
            # Megatron's iterators stay in front: they record and replay the same batches, and
            # consumed samples are counted as they are drawn.
            if not isinstance(iterator.iterable, Buffered):
                iterator.iterable = Buffered(iterator.iterable)
            read.append(iterator.iterable.next_values(num_batches))
    return read[0] if read else None


def outcome_of(read: Callable[[], Batches | None]) -> Callable[[], Batches | None]:
    """Call a function that reads now; the result gives or raises what it did, each time."""
    outcome: Future[Batches | None] = Future()
    # Raised later, inside an agreement: the other ranks would wait for this one.
    try:
        outcome.set_result(read())
    except (Exception, SystemExit) as exception:
        outcome.set_exception(exception)
    return outcome.result


def are_same(drawn: Batches | None, ahead: Batches | None) -> bool:
    """True if the batches that were read ahead are those that have been drawn."""
    return [*map(id, drawn or ())] == [*map(id, ahead or ())]
