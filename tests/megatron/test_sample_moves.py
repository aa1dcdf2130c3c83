"""Where samples go, by the numbers; on real processes in `tests/distributed/test_exactness.py`."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batch_cases import equal
from hypothesis import given
from hypothesis import strategies as st

from mcore_batching.batch import DEFAULT_SCHEMA, Kind, OrderError, SchemaError
from mcore_batching.batch.columns import Columns
from mcore_batching.megatron.exchange import SampleMoves, copied_output, deserialize, leaving
from mcore_batching.megatron.schedule import MicroBatchSchedule

# Rank 0 brought 0 1 2, rank 1 brought 3 4, rank 2 nothing; 1 is shared by ranks 0 and 1.
FIRST = [0, 3, 5, 5]
RUNS_ON = [[1, 4], [0, 1, 3], [2]]
BROUGHT = [["aa", "bb", "cc"], ["dd", "ee"], []]


def moves(rank: int) -> SampleMoves:
    return SampleMoves(rank, FIRST, RUNS_ON)


def columns(names: list[str], **fields: list[Any]) -> Columns:
    """Samples of these names, and of as many tokens as their names' letters."""
    lengths = [len(name) for name in names]
    tokens = [torch.tensor([ord(letter) for letter in name]) for name in names]
    own = {"total_lengths": lengths, "response_lengths": [0] * len(names)}
    return Columns.read(own | {"tokens": tokens, "uids": names} | fields, DEFAULT_SCHEMA)


@st.composite
def exchanges(draw: st.DrawFn) -> list[SampleMoves]:
    """Of every rank: any samples of any ranks, each on one rank or on several."""
    sharing = draw(st.sampled_from([1, 1, 2]))
    counts = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    first = [0, *itertools.accumulate(counts)]
    ranks = range(len(counts) * sharing)
    some_ranks = st.sets(st.sampled_from(ranks), min_size=1)
    runners = [draw(some_ranks) for _ in range(first[-1])]
    held = [[n for n, on in enumerate(runners) if rank in on] for rank in ranks]
    runs_on = [draw(st.permutations(numbers)) for numbers in held]
    return [SampleMoves(rank, first, runs_on, sharing=sharing) for rank in ranks]


@given(exchanges())
def test_fields_go_to_every_rank_that_runs_a_sample_and_outputs_to_all_that_brought_it(
    moves: list[SampleMoves],
) -> None:
    """Fields from the ranks at the same place, outputs from the first rank that runs a sample."""
    outgoing = [each.outgoing(columns([f"s{10**n}" for n in each.brought])) for each in moves]
    for rank, each in enumerate(moves):
        replica, place = divmod(rank, each.sharing)
        found = each.arranged([parts[replica] for parts in outgoing[place :: each.sharing]])
        expected = [f"s{10**number}" for number in each.runs_on[rank]]
        assert found["uids"] == expected
        assert ["".join(map(chr, tokens.tolist())) for tokens in found["tokens"]] == expected
        assert found.total_lengths == [*map(len, expected)]
        assert found.flat("tokens").shape[0] == sum(map(len, expected)) + 1
        assert [*each.brought] == [*range(each.first[replica], each.first[replica + 1])]
        sent = [(n, source) for source in range(len(moves)) for n in each._sent(source, rank)]
        runners = (
            (n, min(r for r, runs in enumerate(each.runs_on) if n in runs)) for n in each.brought
        )
        assert sorted(sent) == [*runners]


def test_a_rank_without_samples_need_not_give_a_field() -> None:
    given_ = [columns(BROUGHT[0], rewards=[1, 2, 3]), columns(BROUGHT[1], rewards=[4, 5])]
    outgoing = [moves(rank).outgoing(own) for rank, own in enumerate([*given_, columns([])])]
    found = [moves(rank).arranged([parts[rank] for parts in outgoing]) for rank in range(3)]
    assert [each["rewards"] for each in found] == [[2, 5], [1, 2, 4], [3]]


def test_a_field_that_one_rank_lacks_is_named_with_that_rank() -> None:
    given_ = columns(BROUGHT[0], rewards=[1, 2, 3]), columns(BROUGHT[1])
    outgoing = [moves(rank).outgoing(own) for rank, own in enumerate(given_)]
    for rank in (0, 1):  # which run its last sample, and its first
        with pytest.raises(SchemaError, match=r"none of ranks \[1\]: give the field on them too"):
            moves(rank).arranged([parts[rank] for parts in outgoing])


def test_what_stays_is_sent_to_nobody_and_what_leaves_comes_whole() -> None:
    values = [torch.rand(len(name), 2) for name in BROUGHT[0]]
    given_ = columns(BROUGHT[0], position_ids=[torch.arange(2).expand(3, -1)] * 3)
    given_ = given_.extended({"mine": values}, DEFAULT_SCHEMA.declare("mine", Kind.PER_TOKEN))
    staying, sent = leaving(moves(0), given_)
    assert staying["uids"] == BROUGHT[0][1:2]
    assert deserialize(sent[0]) is None
    found = deserialize(sent[1])
    assert found.keys() == found.schema.keys() == given_.keys()
    chosen = given_.taken([0, 1])
    assert all(equal(found[name], chosen[name]) for name in given_)
    assert found.schema["mine"] == given_.schema["mine"]


def test_samples_that_stay_are_not_sent() -> None:
    first, names = [0, 2, 3], ["aa", "bb"]
    moves, brought = SampleMoves(0, first, [range(2), [2]]), columns(names)
    assert leaving(moves, brought) == (brought, [])
    assert moves.returned({"output": [torch.ones(1), torch.zeros(1)]}) == {
        "output": [torch.ones(1), torch.zeros(1)]
    }
    for runs_on in ([[1, 0], [2]], [[0], [1, 2]], [[0, 1, 2], [2]]):
        assert not SampleMoves(0, first, runs_on).stay


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
        assert copied_output("log_probs", torch.ones(3, dtype=dtype)[1:2].expand(4)).shape == (4,)
    with pytest.raises(OrderError, match="'log_probs', which cannot go back to the sample's rank"):
        copied_output("log_probs", value)
