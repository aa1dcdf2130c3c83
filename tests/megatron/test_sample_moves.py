"""Where samples go, by the numbers; on real processes in `tests/distributed/test_exactness.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_batching.batch import OrderError, SchemaError
from mcore_batching.megatron.rows.sample_moves import SampleMoves, check_output
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule

# Rank 0 brought 0 1 2, rank 1 brought 3 4, rank 2 nothing; 1 is shared by ranks 0 and 1.
FIRST = [0, 3, 5, 5]
RUNS_ON = [[1, 4], [0, 1, 3], [2]]
BROUGHT = [["a", "b", "c"], ["d", "e"], []]


def moves(rank: int) -> SampleMoves:
    return SampleMoves(rank, FIRST, RUNS_ON)


def arrived(columns: list[dict[str, Any]]) -> list[dict[str, list[Any]]]:
    """What each rank arranges, if each rank hands over its columns."""
    outgoing = [moves(rank).outgoing(own) for rank, own in enumerate(columns)]
    return [moves(rank).arranged([parts[rank] for parts in outgoing]) for rank in range(3)]


def test_fields_go_to_every_rank_that_runs_their_sample() -> None:
    found = arrived([{"name": names} for names in BROUGHT])
    assert found == [{"name": ["b", "e"]}, {"name": ["a", "b", "d"]}, {"name": ["c"]}]


def test_a_rank_without_samples_need_not_give_a_field() -> None:
    found = arrived([{"name": BROUGHT[0]}, {"name": BROUGHT[1]}, {}])
    assert found[2] == {"name": ["c"]}


def test_a_field_that_one_rank_lacks_is_named_with_that_rank() -> None:
    outgoing = [moves(0).outgoing({"name": BROUGHT[0]}), moves(1).outgoing({})]
    for rank in (0, 1):  # which run its last sample, and its first
        with pytest.raises(SchemaError, match=r"none of ranks \[1\]: give the field on them too"):
            moves(rank).arranged([parts[rank] for parts in outgoing])


def test_one_value_is_needed_for_each_sample_that_came_from_here() -> None:
    with pytest.raises(SchemaError, match="one value for each of the 3 samples"):
        moves(0).outgoing({"name": ["a", "b"]})


def test_each_output_comes_from_the_first_rank_that_runs_its_sample() -> None:
    sent = {(s, t): moves(0)._sent(s, t) for s in range(3) for t in range(3)}
    assert {pair: numbers for pair, numbers in sent.items() if numbers} == {
        (0, 0): [1],
        (0, 1): [4],
        (1, 0): [0],
        (1, 1): [3],
        (2, 0): [2],
    }
    assert moves(1).brought == range(3, 5)


def test_samples_are_named_as_the_ranks_that_brought_them_count_them() -> None:
    """Rank 2 brought none, and runs one of rank 0's."""
    named = [
        MicroBatchSchedule.names_of(SimpleNamespace(moves=moves(rank)), places)  # type: ignore[arg-type]
        for rank, places in ((0, (0, 1)), (1, (2, 0, 1)), (2, (0,)), (2, ()))
    ]
    assert named == [
        "samples [1] of data-parallel rank 0, samples [1] of data-parallel rank 1",
        "samples [0, 1] of data-parallel rank 0, samples [0] of data-parallel rank 1",
        "samples [2] of data-parallel rank 0",
        "a placeholder",
    ]
    assert pair(2).origins([0]) == {1: [0]}


# Ranks 0 and 1 brought 0 1 2, ranks 2 and 3 brought 3; 1 is shared by ranks 0 and 1, 3 by 2 and 3.
PAIRS = [[1, 2], [0, 1], [3], [3]]


def pair(rank: int) -> SampleMoves:
    return SampleMoves(rank, [0, 3, 4], PAIRS, sharing=2)


def test_ranks_that_brought_the_same_samples_each_hand_on_to_their_counterparts() -> None:
    brought = [BROUGHT[0], BROUGHT[0], ["d"], ["d"]]
    outgoing = [pair(rank).outgoing({"name": names}) for rank, names in enumerate(brought)]
    for place in (0, 1):
        parts = outgoing[place::2]
        for replica, rank in enumerate((place, place + 2)):
            found = pair(rank).arranged([each[replica] for each in parts])
            assert found == {"name": [["a", "b", "c", "d"][number] for number in PAIRS[rank]]}


def test_outputs_go_to_all_ranks_that_brought_their_samples() -> None:
    sent = {(s, t): pair(0)._sent(s, t) for s in range(4) for t in range(4)}
    assert {ways: numbers for ways, numbers in sent.items() if numbers} == {
        (0, 0): [1, 2],
        (0, 1): [1, 2],
        (1, 0): [0],
        (1, 1): [0],
        (2, 2): [3],
        (2, 3): [3],
    }
    assert [pair(rank).brought for rank in range(4)] == [range(3)] * 2 + [range(3, 4)] * 2


@pytest.mark.parametrize(
    "value",
    [
        0.5,
        None,
        torch.ones(2).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2)]),
        torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        torch.ones(2, device="meta"),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'layout', '')}",
)
def test_outputs_that_cannot_travel_are_refused(value: Any) -> None:
    for dtype in (torch.float32, torch.float8_e4m3fn, torch.complex64):
        check_output("log_probs", torch.ones(3, dtype=dtype)[1:2].expand(4))
    with pytest.raises(OrderError, match="'log_probs', which cannot go back to the rank"):
        check_output("log_probs", value)
