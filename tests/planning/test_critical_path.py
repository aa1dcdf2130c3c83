"""The longest chain of passes: as long as the step, and a bound for all other costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import examples

from mcore_batching.planning import ParallelDims
from mcore_batching.planning.critical_path import critical_path
from mcore_batching.planning.pipeline import pipeline_time


@st.composite
def schedules(draw: st.DrawFn) -> tuple[ParallelDims, list[float], list[float]]:
    """A schedule, and two kinds of costs of its micro-batches."""
    stages = draw(st.sampled_from([1, 2, 3, 4, 8]))
    chunks = draw(st.sampled_from([1, 1, 2, 3])) if stages > 1 else 1
    dims = ParallelDims(pipeline_parallel=stages, virtual_pipeline=chunks)
    count = dims.round_up_num_microbatches(draw(st.integers(1, 20)))
    costs = st.lists(
        st.sampled_from([0.0, 1.0, 50.0]) | st.floats(0, 5), min_size=count, max_size=count
    )
    return dims, draw(costs), draw(costs)


@examples(500)
@given(schedules(), st.sampled_from([0.5, 1.0, 2.0, 3.3]), st.booleans())
def test_as_long_as_the_step_and_never_longer_than_another(
    schedule: tuple[ParallelDims, list[float], list[float]], ratio: float, forward_only: bool
) -> None:
    dims, costs, others = schedule
    options = {"backward_ratio": ratio, "forward_only": forward_only}
    end, weights = critical_path(costs, dims, **options)  # type: ignore[arg-type]
    assert end == pytest.approx(pipeline_time(costs, dims, **options), rel=1e-12)  # type: ignore[arg-type]
    length = sum(w * cost for w, cost in zip(weights, costs, strict=True))
    assert length == pytest.approx(end, rel=1e-9)
    bound = sum(w * cost for w, cost in zip(weights, others, strict=True))
    assert bound <= pipeline_time(others, dims, **options) * (1 + 1e-9)  # type: ignore[arg-type]


def test_written_out() -> None:
    """Two stages; the long second micro-batch is waited for on its way down and back."""
    dims = ParallelDims(pipeline_parallel=2)
    assert critical_path([1.0, 5.0, 1.0], dims) == (33.0, [1.0, 6.0, 2.0])
