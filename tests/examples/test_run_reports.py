import dataclasses

import pytest
from comparison import compare
from metrics import IterationMetrics, StepMetrics, append, read
from reporting import COLUMNS, iteration_line, run_table


def step(loss, seconds=1.0):
    return StepMetrics(
        loss=loss,
        policy_loss=loss,
        kl=0.02,
        clipped=0.0,
        grad_norm=2.0,
        num_microbatches=3,
        seconds=seconds,
    )


def iteration(number, losses, seconds=1.0, samples=8):
    return IterationMetrics(
        iteration=number,
        samples=samples,
        tokens=1000,
        reward=0.5,
        num_microbatches=3 * len(losses),
        placeholders=number,
        fill=0.75,
        padding=0.0,
        rank_balance=1.25,
        plan_seconds=0.125,
        forward_only_seconds=seconds / 2,
        steps=tuple(step(loss, seconds) for loss in losses),
    )


DYNAMIC = [iteration(0, [0.5, 0.25], 9.0), iteration(1, [0.125, -1.0], 1.0)]
BASELINE = [iteration(0, [0.5, 0.25], 3.0), iteration(1, [0.1875, -1.0], 2.5)]


def test_metrics_are_read_back_to_the_last_bit(tmp_path):
    path = tmp_path / "metrics.jsonl"
    run = [*DYNAMIC, iteration(2, [0.1 + 0.2, 1 / 3])]
    for each in run:
        append(path, each)
    assert read(path, IterationMetrics) == run
    assert len(path.read_text().splitlines()) == 3


def test_an_iterations_line_and_row_say_what_its_steps_average_to():
    line = iteration_line(DYNAMIC[0])
    for text in (
        "loss +0.37500",
        "KL 0.02000",
        "grad norm 2.000",
        "1000 tokens",
        "6 micro-batches/rank",
        "fill 75.0%",
        "0 placeholders",
        "balance 1.250",
        "22.62 s",  # two steps of 9 s, 4.5 s of forward-only passes, 0.125 s of planning
    ):
        assert text in line
    table = run_table(DYNAMIC)
    assert table.columns == COLUMNS
    assert table.rows[0] == (
        *("0", "+0.37500", "0.02000", "2.000", "1000", "6", "75.0%", "0", "1.250"),
        *("4.50", "18.00"),
    )
    assert table.total is not None
    assert table.total[1] == "-0.03125"
    assert table.total[4:8] == ("2000", "12", "75.0%", "1")


def test_comparison_leaves_the_warm_up_out_of_times_but_not_of_losses():
    result = compare(DYNAMIC, BASELINE)
    assert result.largest_loss_difference == 0.0625
    assert result.largest_loss == 1.0
    assert result.median_step_seconds == (1.0, 2.5)
    assert result.step_ratio == 2.5
    assert result.forward_only_ratio == 2.5
    assert "largest difference in loss over 4 optimizer steps: 6.2e-02" in str(result)
    assert "ratio 2.50" in str(result)
    assert compare(DYNAMIC[:1], BASELINE[:1]).step_ratio == pytest.approx(1 / 3)


def test_runs_of_other_steps_are_not_compared():
    other = [BASELINE[0], dataclasses.replace(BASELINE[1], samples=7)]
    with pytest.raises(ValueError, match="run both with the same settings"):
        compare(DYNAMIC, other)
    with pytest.raises(ValueError, match="run both with the same settings"):
        compare(DYNAMIC, BASELINE[:1])
