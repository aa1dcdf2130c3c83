"""Cost models fitted to measured times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_batching.planning import ConfigError
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
    ],
)
def test_refusals(rows: list[Timing], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_cost_model(rows)
