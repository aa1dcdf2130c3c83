"""Cost models fitted to measured times."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import examples

from mcore_batching.planning import ConfigError, CostModel
from mcore_batching.planning.cost_fit import Timing, fit_cost_model

ROWS = [
    (length,) * number for length in (16, 64, 512, 4096) for number in (1, 4) if length * number
]


def timings(fixed: float, per_token: float, per_pair: float, ratio: float = 2.0) -> list[Timing]:
    made = []
    for lengths in ROWS:
        seconds = fixed + per_token * sum(lengths) + per_pair * sum(n * n for n in lengths)
        made.append(
            Timing(lengths=lengths, forward_seconds=seconds, backward_seconds=ratio * seconds)
        )
    return made


@given(
    fixed=st.floats(1e-6, 1e-2),
    per_token=st.floats(1e-7, 1e-4),
    quadratic=st.floats(1e-6, 1e-3),
    ratio=st.floats(0.5, 4.0),
)
def test_exact_times_give_the_model_that_made_them(
    fixed: float, per_token: float, quadratic: float, ratio: float
) -> None:
    fit = fit_cost_model(timings(fixed, per_token, quadratic * per_token, ratio))
    # Rounding of the normal equations, whose condition is the square of the features'.
    assert fit.max_relative_error < 1e-6
    assert fit.seconds_per_unit == pytest.approx(per_token, rel=1e-3)
    assert fit.cost_model.linear == 1.0
    assert fit.cost_model.quadratic == pytest.approx(quadratic, rel=1e-2, abs=1e-9)
    assert fit.cost_model.per_micro_batch == pytest.approx(fixed / per_token, rel=1e-2, abs=1e-2)
    assert fit.cost_model.backward_ratio == pytest.approx(ratio)


def shared(share: float, fixed: float, sizes: tuple[int, ...] = (2, 4, 8)) -> list[Timing]:
    """Rows on one rank and on several, of a model with these costs of a doubling."""
    model = CostModel(context_parallel_overhead=share, context_parallel_fixed=fixed)
    made = []
    for size in (1, *sizes):
        for lengths in ROWS:
            seconds = 1e-6 * model.on_ranks(size).micro_batch(lengths)
            made.append(
                Timing(
                    lengths=lengths,
                    forward_seconds=seconds,
                    backward_seconds=2 * seconds,
                    context_parallel=size,
                )
            )
    return made


@examples(60)
@given(
    share=st.floats(0.0, 20.0),
    fixed=st.floats(0.0, 5000.0),
    sizes=st.sampled_from([(2,), (2, 4), (2, 4, 8), (6,)]),
)
def test_exact_times_on_several_ranks_give_the_costs_of_a_doubling(
    share: float, fixed: float, sizes: tuple[int, ...]
) -> None:
    fit = fit_cost_model(shared(share, fixed, sizes))
    assert fit.max_relative_error < 1e-6
    assert fit.cost_model.context_parallel_overhead == pytest.approx(share, rel=1e-3, abs=1e-5)
    assert fit.cost_model.context_parallel_fixed == pytest.approx(fixed, rel=1e-3, abs=1e-2)


def test_rows_that_are_sooner_on_two_ranks_than_their_half_have_no_costs_of_a_doubling() -> None:
    faster = [
        dataclasses.replace(t, forward_seconds=t.forward_seconds / t.context_parallel)
        for t in shared(0.0, 0.0, (2,))
    ]
    model = fit_cost_model(faster).cost_model
    assert (model.context_parallel_overhead, model.context_parallel_fixed) == (0.0, 0.0)


def test_costs_of_a_doubling_keep_their_defaults_where_no_row_was_shared() -> None:
    assert fit_cost_model(timings(1e-3, 1e-6, 0.0)).cost_model.context_parallel_overhead == 0.1


def test_no_coefficient_is_negative() -> None:
    # Times that fall off from a line would have a negative attention term.
    concave = [
        Timing(lengths=(n,), forward_seconds=n**0.9 * 1e-6, backward_seconds=n * 1e-6)
        for n in (16, 64, 512, 4096)
    ]
    model = fit_cost_model(concave).cost_model
    assert model.quadratic == 0.0
    assert model.per_micro_batch >= 0.0


def test_short_rows_count_as_much_as_long_ones() -> None:
    fit = fit_cost_model(timings(1e-3, 1e-6, 0.0))
    assert fit.cost_model.per_micro_batch == pytest.approx(1000.0, rel=1e-3)


EXTRA = Timing(lengths=(48,), forward_seconds=1.0, backward_seconds=1.0, context_parallel=2)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (timings(1e-3, 1e-6, 0.0)[:2], "needs timings of 3 rows or more, got 2"),
        (
            [Timing(lengths=(n,), forward_seconds=0.0, backward_seconds=1.0) for n in (1, 2, 3)],
            "must be positive",
        ),
        (
            [Timing(lengths=(n,), forward_seconds=1.0, backward_seconds=1.0) for n in (1, 2, 3)],
            "do not grow with tokens",
        ),
        (
            [*shared(0.1, 64.0, ()), *shared(0.1, 64.0, (2,))[-1:], EXTRA],
            r"a row of \(48,\) was timed on 2 ranks: time it on one, too",
        ),
    ],
)
def test_refusals(rows: list[Timing], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_cost_model(rows)
