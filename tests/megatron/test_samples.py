"""Samples on their way to a plan: read, cut into steps, handed to the ranks that run them as bytes
and back, packed where they stay. On real processes in `tests/distributed/test_exactness.py`."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from batch_cases import equal
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusals

from mcore_batching import batch as batching
from mcore_batching import planning
from mcore_batching.batch import DEFAULT_SCHEMA, Kind
from mcore_batching.batch.columns import Columns, map_tensors
from mcore_batching.megatron.exchange import (
    SampleMoves,
    copied_output,
    deserialize,
    leaving,
    serialize,
)
from mcore_batching.megatron.plan import _local_units
from mcore_batching.megatron.plan_inputs import PlanInputs
from mcore_batching.megatron.samples import (
    Share,
    read_fields,
    read_share,
    steps_by_size,
    template_of,
)
from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig
from mcore_batching.planning.forest import forest_of_groups
from mcore_batching.planning.local import fill_local, least_count, pack_local


def batch(*names: str, **fields: Any) -> dict[str, Any]:
    """Samples of these names, of as many tokens as these have letters, half of them a response."""
    return {
        "tokens": [[*map(ord, name)] for name in names],
        "total_lengths": [len(name) for name in names],
        "response_lengths": [-(-len(name) // 2) for name in names],
        "uids": [*names],
        **fields,
    }


def columns(*names: str, **fields: Any) -> Columns:
    read = read_fields(batch(*names, **fields), DEFAULT_SCHEMA, 128)
    assert read is not None
    return read if names else Columns.read(read, read.schema)  # read once others show the kinds


STEPS = [[3, 1], [0, 2]]


def share(steps: Any = None, size: int | None = None, **fields: Any) -> Share:
    """Of a rank with four samples."""
    return read_share(batch(*"abcd", **fields), [1] * 4, steps, size)


@pytest.mark.parametrize(
    "give",
    [
        *(tuple, iter, np.array, torch.tensor),
        *(lambda steps: map(iter, steps), lambda steps: (tuple(step) for step in steps)),
        *(lambda steps: [*map(np.array, steps)], lambda steps: [*map(torch.tensor, steps)]),
    ],
)
def test_steps_may_be_whatever_gives_indices(give: Callable[[Any], Any]) -> None:
    """A generator was read by a check, and the whole batch was lost."""
    read = share(give(STEPS)).steps
    assert read == STEPS
    assert all(type(index) is int for step in read for index in step)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.none() | st.integers(1, 20))
def test_steps_take_samples_in_the_order_of_their_middles(
    shares: list[int], size: int | None
) -> None:
    """All in one step without a batch size."""
    middles = [
        (Fraction(2 * index + 1, 2 * share), rank)
        for rank, share in enumerate(shares)
        for index in range(share)
    ]
    order = sorted(range(len(middles)), key=middles.__getitem__)
    steps, size = steps_by_size(shares, size), size or len(order) or 1
    whole, left = divmod(len(order), size)
    assert [*map(len, steps)] == ([size] * whole + [left] * bool(left) or [0])
    assert [sorted(order[n * size : (n + 1) * size]) for n in range(len(steps))] == steps


def test_a_step_counts_as_what_cut_it() -> None:
    def counts_as(steps: Any = None, **of_data: Any) -> Any:
        return share(steps, size=2, **of_data).samples_per_step

    assert counts_as() == counts_as(dynamic_global_batch_size=None) == 2
    assert counts_as(dynamic_global_batch_size=3) == 3
    assert counts_as(STEPS) is None
    assert counts_as(STEPS, dynamic_global_batch_size=8) == 8


@pytest.mark.parametrize("given_as", [tuple, np.array, torch.tensor])
def test_fields_may_be_anything_with_one_value_per_sample(given_as: Callable[[Any], Any]) -> None:
    fields = {"rewards": [1.0, 0.5], "loss_masks": [[1, 0], [1, 1]], "total_lengths": [3, 3]}
    listed = columns("abc", "def", **fields)
    read = columns("abc", "def", **{name: given_as(values) for name, values in fields.items()})
    assert [*map(float, read["rewards"])] == listed["rewards"]
    assert read.flat("loss_masks").tolist() == listed.flat("loss_masks").tolist()
    assert read["total_lengths"] == listed["total_lengths"] == [3, 3]


def test_without_samples_a_placeholder_is_like_the_one_that_there_was() -> None:
    read = columns("abc", feature=[torch.zeros(3, 2, dtype=torch.bfloat16)])
    nothing = Columns.read({name: [] for name in read}, read.schema)
    made = template_of(nothing, template_of(read))
    assert made["feature"][0].dtype == torch.bfloat16
    assert made["feature"][0].shape == (1, 2)


CAP = 40
SAMPLES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 2), st.booleans()), min_size=1, max_size=12
)
"""Tokens, group and whether this rank has it, of each sample of a step."""


@pytest.mark.parametrize("shares", [False, True])
@given(samples=SAMPLES)
def test_every_sample_of_the_rank_is_in_one_unit_that_fits(
    samples: list[tuple[int, int, bool]], shares: bool
) -> None:
    """Also one without tokens, and one of a group with samples of other ranks."""
    lengths, groups, is_here = (list(each) for each in zip(*samples, strict=True))
    held = [place for place, here in enumerate(is_here) if here]

    def forest(all_lengths: list[int], numbers: list[int]) -> Any:
        own = [all_lengths[n] for n in numbers]
        return forest_of_groups(own, [min(7, n) for n in own], [groups[n] for n in numbers])

    config = PlannerConfig(max_tokens_per_gpu=CAP)
    step: Any = SimpleNamespace(
        settings=PlanInputs(ParallelDims(data_parallel=2), config, CostModel()),
        steps=[range(len(lengths))],
        lengths=lengths,
        beginnings=SimpleNamespace(forest=forest) if shares else None,
    )
    units, problem = _local_units(step, SampleMoves(0, [0, len(lengths)], [held]), 0)
    assert sorted(i for unit in units for i in unit.samples) == held
    assert [unit.size for unit in units] == list(problem.lengths)
    assert shares or all(len(unit.samples) == 1 for unit in units)
    packed = pack_local(problem)
    rows = fill_local(problem, packed, least_count(problem, packed))
    assert sorted(at for row in rows for at in row) == list(range(len(units)))
    assert all(sum(units[at].size for at in row) <= CAP for row in rows)


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
    """Fields from the ranks at the same place, outputs from the first rank that runs a sample. A
    rank without samples may lack fields."""
    outgoing = []
    for each in moves:
        rewards = {"rewards": [float(n) for n in each.brought]} if each.brought else {}
        outgoing.append(each.outgoing(columns(*[f"s{10**n}" for n in each.brought], **rewards)))
    for rank, each in enumerate(moves):
        replica, place = divmod(rank, each.sharing)
        found = each.arranged([parts[replica] for parts in outgoing[place :: each.sharing]])
        expected = [f"s{10**number}" for number in each.runs_on[rank]]
        assert found["uids"] == expected
        assert not expected or found["rewards"] == [*each.runs_on[rank]]
        assert ["".join(map(chr, tokens.tolist())) for tokens in found["tokens"]] == expected
        assert found.total_lengths == [*map(len, expected)]
        assert found.flat("tokens").shape[0] == sum(map(len, expected)) + 1
        assert [*each.brought] == [*range(each.first[replica], each.first[replica + 1])]
        sent = [(n, source) for source in range(len(moves)) for n in each._sent(source, rank)]
        runners = (
            (n, min(r for r, runs in enumerate(each.runs_on) if n in runs)) for n in each.brought
        )
        assert sorted(sent) == [*runners]


def moves(rank: int) -> SampleMoves:
    """Rank 0 brought 0 1 2, rank 1 brought 3 4, rank 2 nothing; 1 runs on ranks 0 and 1."""
    return SampleMoves(rank, [0, 3, 5, 5], [[1, 4], [0, 1, 3], [2]])


BROUGHT = ["aa", "bb", "cc"]


def test_what_stays_is_sent_to_nobody_and_what_leaves_comes_whole() -> None:
    values = [torch.rand(len(name), 2) for name in BROUGHT]
    own = columns(*BROUGHT, position_ids=[torch.arange(2).expand(3, -1)] * 3)
    own = own.extended({"mine": values}, DEFAULT_SCHEMA.declare("mine", Kind.PER_TOKEN))
    staying, sent = leaving(moves(0), own)
    assert staying["uids"] == BROUGHT[1:2]
    assert deserialize(sent[0]) is None
    found = deserialize(sent[1])
    assert found.keys() == found.schema.keys() == own.keys()
    chosen = own.taken([0, 1])
    assert all(equal(found[name], chosen[name]) for name in own)
    assert found.schema["mine"] == own.schema["mine"]
    # Nothing at all where every sample stays, in its order.
    all_stay = SampleMoves(0, [0, 2, 3], [range(2), [2]])
    assert leaving(all_stay, own) == (own, [])
    outputs = {"output": [torch.ones(1), torch.zeros(1)]}
    assert all_stay.returned(outputs) == outputs
    for runs_on in ([[1, 0], [2]], [[0], [1, 2]], [[0, 1, 2], [2]]):
        assert not SampleMoves(0, [0, 2, 3], runs_on).stay


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
    # Ranks 2 and 3 brought 3 together.
    shared = SampleMoves(2, [0, 3, 4], [[1, 2], [0, 1], [3], [3]], sharing=2)
    assert shared.origins([0]) == {1: [0]}


COMPLEX = torch.tensor([1 + 2j, 3 - 4j])
QUANTISED = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
VALUES: dict[str, Any] = {
    "nothing": None,
    "numbers": {"total_lengths": [3, 5], "rewards": [0.5, -1.0], "names": ["a", "b"]},
    "no tensors": [],
    "tensors": [torch.arange(3), torch.tensor(2.5), torch.zeros(0, 4), torch.tensor([True])],
    "alike": [torch.arange(3.0), torch.tensor(2.5), torch.zeros(0, 4), torch.ones(2, 3).t()],
    "alike for a time": [COMPLEX[:1].conj(), COMPLEX],
    "alike, some negative": [COMPLEX[:1].conj().imag, torch.ones(1)],
    "nested, alike": [NESTED] * 2,
    "quantised, alike": [QUANTISED] * 2,
    "kinds": [torch.ones(3, dtype=torch.bfloat16), torch.ones(2, dtype=torch.complex64)],
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "inside": ([1, 2], {"tokens": [torch.arange(5)], "images": [{"pixels": torch.rand(2, 2)}]}),
    "an array": np.arange(6).reshape(2, 3),
    "twice": [torch.arange(2)] * 2,
    # Contiguous at any stride, but no bytes at another than 1.
    "one of a column": torch.arange(6.0).view(3, 2)[1:2, 1],
    "one for all": torch.tensor([3, 4])[1].expand(2, 3),
    "negative in passing": COMPLEX.conj().imag,
    "conjugate in passing": COMPLEX.conj(),
    "eight bits": torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
    "sparse": torch.eye(3).to_sparse(),
    "sparse with a gradient": torch.eye(3, requires_grad=True).to_sparse(),
    "nested": NESTED,
    "nested and ragged": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "meta": [torch.ones(2), torch.empty(3, 4, device="meta")],
    "a gradient": torch.ones(2, requires_grad=True),
    "quantised": QUANTISED,
}


test_refused = refusals(__file__, torch, batching, planning, globals())


def comparable(value: Any) -> Any:
    """The value with all that has to arrive of its tensors, which `==` compares."""
    return map_tensors(value.tolist() if isinstance(value, np.ndarray) else value, _kept)


def _kept(tensor: torch.Tensor) -> Any:
    if tensor.is_nested:
        values: Any = [*map(_kept, tensor.unbind())]
    elif tensor.is_meta:
        values = tensor.shape
    else:
        plain = tensor.dequantize() if tensor.is_quantized else tensor
        values = (plain if plain.layout == torch.strided else plain.to_dense()).tolist()
    return tensor.dtype, tensor.layout, tensor.device, tensor.is_quantized, values


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
    header, body = serialize(tensor)
    assert len(header) + len(body) < tensor.nbytes + 200 < len(pickle.dumps(tensor))
    part = torch.ones(2, 10**6)[:, :2]  # of a storage that is not to be sent
    assert sum(map(len, serialize(part))) < 1000
    for dtype in (torch.float32, torch.float8_e4m3fn, torch.complex64):
        assert copied_output("log_probs", torch.ones(3, dtype=dtype)[1:2].expand(4)).shape == (4,)
