"""Samples on their way to a plan: read, cut into steps, packed where they stay."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_batching.batch import DEFAULT_SCHEMA, SchemaError
from mcore_batching.batch.columns import Columns, map_tensors
from mcore_batching.megatron.plan import _local_units
from mcore_batching.megatron.samples import (
    Share,
    read_fields,
    read_share,
    steps_by_size,
    template_of,
)
from mcore_batching.planning import ConfigError, CostModel, ParallelDims, PlannerConfig
from mcore_batching.planning.forest import forest_of_groups
from mcore_batching.planning.local import fill_local, least_count, pack_local

STEPS = [[3, 1], [0, 2]]
SHARES = st.lists(st.integers(0, 12), min_size=1, max_size=8)


def batch(samples: int, **fields: Any) -> dict[str, Any]:
    return {
        "tokens": [[1, 2, 3] for _ in range(samples)],
        "total_lengths": [3] * samples,
        "response_lengths": [2] * samples,
        **fields,
    }


def columns(samples: int, **fields: Any) -> Columns:
    read = read_fields(batch(samples, **fields), DEFAULT_SCHEMA, 9)
    assert read is not None
    return read


def share(samples: int, steps: Any = None, size: int | None = None, **fields: Any) -> Share:
    return read_share(batch(samples, **fields), [3] * samples, steps, size)


GIVEN_AS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "iter": iter,
    "generator": lambda steps: (iter(step) for step in steps),
    "map": lambda steps: map(tuple, steps),
    "zip": lambda steps: zip(*zip(*steps, strict=True), strict=True),
    "array": np.array,
    "arrays": lambda steps: [np.array(step) for step in steps],
    "tensor": torch.tensor,
    "tensors": lambda steps: [torch.tensor(step) for step in steps],
}


@pytest.mark.parametrize("given_as", GIVEN_AS)
def test_steps_may_be_whatever_gives_indices(given_as: str) -> None:
    """A generator was read by a check, and the whole batch was lost."""
    read = share(4, GIVEN_AS[given_as](STEPS)).steps
    assert read == STEPS
    assert all(type(index) is int for step in read for index in step)


def test_steps_that_were_read_before_are_refused() -> None:
    steps = iter(STEPS)
    share(4, steps)
    with pytest.raises(ValueError, match="steps must hold each of this rank's 4 samples exactly"):
        share(4, steps)


@pytest.mark.parametrize("steps", [5, [0, 1, 2, 3], [[0, 1], [2, 3.0]], [[0, 1], None], "0123"])
def test_steps_without_indices_are_refused(steps: Any) -> None:
    with pytest.raises(ConfigError, match="steps must be one list of sample indices for each"):
        share(4, steps)


@given(SHARES, st.integers(1, 20))
def test_steps_take_samples_in_the_order_of_their_middles(shares: list[int], size: int) -> None:
    middles = [
        (Fraction(2 * index + 1, 2 * share), rank)
        for rank, share in enumerate(shares)
        for index in range(share)
    ]
    order = sorted(range(len(middles)), key=middles.__getitem__)
    steps = steps_by_size(shares, size)
    whole, left = divmod(len(order), size)
    assert [*map(len, steps)] == ([size] * whole + [left] * bool(left) or [0])
    assert [sorted(order[n * size : (n + 1) * size]) for n in range(len(steps))] == steps


def test_a_step_counts_as_what_cut_it() -> None:
    assert share(4, size=2).samples_per_step == 2
    assert share(4, size=2, dynamic_global_batch_size=3).samples_per_step == 3
    assert share(4, size=2, dynamic_global_batch_size=None).samples_per_step == 2
    assert share(4, STEPS, size=2).samples_per_step is None
    assert share(4, STEPS, size=2, dynamic_global_batch_size=8).samples_per_step == 8
    assert share(4).samples_per_step is None


def test_without_a_batch_size_all_samples_are_one_step() -> None:
    assert steps_by_size([3, 5], None) == [[*range(8)]]
    assert steps_by_size([0, 0], None) == [[]]


def test_samples_are_tensors_in_lists_of_their_own() -> None:
    """What the caller does to its lists afterwards changes no row."""
    given = [np.array([1, 2, 3], "uint16"), [4, 5, 6]]
    mine = {
        "values": [torch.ones(2), torch.ones(2)],
        "returns": [torch.ones(2), torch.ones(2).double()],
        "multimodal_train_inputs": [{"pixels": torch.ones(2)}, None],
    }
    data = columns(2, tokens=given, **mine)
    given.clear()
    map_tensors(mine, torch.Tensor.zero_)
    assert [value.tolist() for value in data["tokens"]] == [[1, 2, 3], [4, 5, 6]]
    assert all(isinstance(value, torch.Tensor) for value in data["tokens"])
    values = [value.tolist() for name in ("values", "returns") for value in data[name]]
    assert values == [[1.0, 1.0]] * 4
    assert data["multimodal_train_inputs"][0]["pixels"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("given_as", [tuple, np.array, torch.tensor])
def test_fields_may_be_anything_with_one_value_per_sample(given_as: Callable[[Any], Any]) -> None:
    fields = {"rewards": [1.0, 0.5], "loss_masks": [[1, 0], [1, 1]], "total_lengths": [3, 3]}
    listed = columns(2, **fields)
    given = columns(2, **{name: given_as(values) for name, values in fields.items()})
    assert [*map(float, given["rewards"])] == listed["rewards"]
    assert given.flat("loss_masks").tolist() == listed.flat("loss_masks").tolist()
    assert given["total_lengths"] == listed["total_lengths"] == [3, 3]


@pytest.mark.parametrize("values", [[1.0], torch.ones(3), "ab", 1.0, {0: 1.0, 1: 2.0}])
def test_another_number_of_values_than_samples_is_refused(values: Any) -> None:
    with pytest.raises(SchemaError, match=r"'rewards': expected 2 values, one per sample, found"):
        columns(2, rewards=values)


def test_without_samples_a_placeholder_is_like_the_one_that_there_was() -> None:
    values = [torch.zeros(3, 2, dtype=torch.bfloat16)]
    read = columns(1, feature=values)
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

    settings = SimpleNamespace(
        dims=ParallelDims(data_parallel=2),
        config=PlannerConfig(max_tokens_per_gpu=CAP),
        cost_model=CostModel(),
        forward_only=False,
        naming=lambda numbers: contextlib.nullcontext(),
    )
    given_samples: Any = SimpleNamespace(
        settings=settings,
        steps=[range(len(lengths))],
        lengths=lengths,
        beginnings=SimpleNamespace(forest=forest) if shares else None,
    )
    places = {number: at for at, number in enumerate(held)}
    moves: Any = SimpleNamespace(places=places, origin=lambda number: (0, number))
    units, problem = _local_units(given_samples, moves, 0)
    assert sorted(i for unit in units for i in unit.samples) == held
    assert [unit.size for unit in units] == list(problem.lengths)
    assert shares or all(len(unit.samples) == 1 for unit in units)
    packed = pack_local(problem)
    rows = fill_local(problem, packed, least_count(problem, packed))
    assert sorted(at for row in rows for at in row) == list(range(len(units)))
    assert all(sum(units[at].size for at in row) <= CAP for row in rows)
