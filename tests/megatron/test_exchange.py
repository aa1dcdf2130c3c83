"""Where samples go, by the numbers, and values as bytes and back; on real processes in
`tests/distributed/test_exactness.py`."""

from __future__ import annotations

import itertools
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from batch_cases import equal
from hypothesis import given
from hypothesis import strategies as st

from mcore_batching.batch import DEFAULT_SCHEMA, Kind, OrderError, SchemaError
from mcore_batching.batch.columns import Columns, map_tensors
from mcore_batching.megatron.exchange import (
    SampleMoves,
    copied_output,
    deserialize,
    leaving,
    serialize,
)
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


VALUES: dict[str, Any] = {
    "nothing": None,
    "numbers": {"total_lengths": [3, 5], "rewards": [0.5, -1.0], "names": ["a", "b"]},
    "no tensors": [],
    "tensors": [torch.arange(3), torch.tensor(2.5), torch.zeros(0, 4), torch.tensor([True])],
    "alike": [torch.arange(3.0), torch.tensor(2.5), torch.zeros(0, 4), torch.ones(2, 3).t()],
    "alike for a time": [torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j, 3 - 4j])],
    "alike, some negative": [torch.tensor([1 + 2j]).conj().imag, torch.ones(1)],
    "nested, alike": [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])] * 2,
    "quantised, alike": [torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)] * 2,
    "kinds": [torch.ones(3, dtype=torch.bfloat16), torch.ones(2, dtype=torch.complex64)],
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "inside": ([1, 2], {"tokens": [torch.arange(5)], "images": [{"pixels": torch.rand(2, 2)}]}),
    "an array": np.arange(6).reshape(2, 3),
    "twice": [torch.arange(2)] * 2,
    # Contiguous at any stride, but no bytes at another than 1.
    "one of a column": torch.arange(6.0).view(3, 2)[1:2, 1],
    "one for all": torch.tensor([3, 4])[1].expand(2, 3),
    "negative in passing": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "conjugate in passing": torch.tensor([1 + 2j]).conj(),
    "eight bits": torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
    "sparse": torch.eye(3).to_sparse(),
    "sparse with a gradient": torch.eye(3, requires_grad=True).to_sparse(),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "nested and ragged": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "meta": [torch.ones(2), torch.empty(3, 4, device="meta")],
    "a gradient": torch.ones(2, requires_grad=True),
    "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
}

UNSENT = ("sparse", "nested", "nested and ragged", "quantised", "nothing")


@pytest.mark.parametrize("name", [*UNSENT, "meta"])
def test_outputs_that_cannot_travel_are_refused(name: str) -> None:
    for dtype in (torch.float32, torch.float8_e4m3fn, torch.complex64):
        assert copied_output("log_probs", torch.ones(3, dtype=dtype)[1:2].expand(4)).shape == (4,)
    value = VALUES[name][1] if name == "meta" else VALUES[name]
    with pytest.raises(OrderError, match="'log_probs', which cannot go back to the sample's rank"):
        copied_output("log_probs", value)


def kept(tensor: torch.Tensor) -> Any:
    """What has to arrive of a tensor, as a value that `==` compares."""
    if tensor.is_nested:
        values: Any = [*map(kept, tensor.unbind())]
    elif tensor.is_meta:
        values = tensor.shape
    else:
        plain = tensor.dequantize() if tensor.is_quantized else tensor
        values = (plain if plain.layout == torch.strided else plain.to_dense()).tolist()
    return tensor.dtype, tensor.layout, tensor.device, tensor.is_quantized, values


def comparable(value: Any) -> Any:
    value = value.tolist() if isinstance(value, np.ndarray) else value
    return map_tensors(value, kept)


@pytest.mark.parametrize("name", VALUES)
def test_what_arrives_is_what_was_sent(name: str) -> None:
    """Also where the bytes of its tensors begin at any byte, and the header is longer."""
    header, body = serialize(VALUES[name])
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), body, body])[1:]
    found = deserialize((header + b"  ", shifted))
    assert comparable(found) == comparable(VALUES[name])
    if name == "a gradient":
        assert not found.requires_grad


def test_tensors_are_not_pickled() -> None:
    tensor = torch.arange(1000)
    text = pickle.dumps(tensor)
    header, body = serialize(tensor)
    assert len(header) + len(body) < tensor.nbytes + 200 < len(text)
    part = torch.ones(2, 10**6)[:, :2]  # of a storage that is not to be sent
    assert sum(map(len, serialize(part))) < 1000


@pytest.mark.parametrize("value", [lambda: None, (each for each in ()), threading.Lock()])
def test_what_cannot_be_pickled_is_said_with_what_to_do(value: Any) -> None:
    with pytest.raises(TypeError, match=r"values cannot be pickled: .*; give others, or leave"):
        serialize({"tokens": [torch.ones(2)], "judge": [value]})
