"""What runs report: metrics that are read back, and comparisons."""

import dataclasses

import pytest
from comparison import compare
from metrics import IterationMetrics, StepMetrics, append, read
from reporting import Reporter, iteration_line, run_table

STEP = dict.fromkeys(
    ("policy_loss", "kl", "clipped", "entropy", "grad_norm", "learning_rate"), 0.1 + 0.2
)
ITERATION = dict.fromkeys(("reward", "fill", "padding", "rank_balance", "plan_seconds"), 0.25)


def iteration(number, losses, seconds):
    steps = (StepMetrics(loss=loss, seconds=seconds, num_microbatches=3, **STEP) for loss in losses)
    return IterationMetrics(
        iteration=number,
        steps=tuple(steps),
        forward_only_seconds=seconds / 2,
        **dict.fromkeys(("samples", "tokens", "num_microbatches", "placeholders"), 8),
        **ITERATION,
    )


DYNAMIC = [iteration(0, [0.5, 1 / 4], 9.0), iteration(1, [0.125, -1.0], 1.0)]
BASELINE = [iteration(0, [0.5, 1 / 4], 3.0), iteration(1, [0.1875, -1.0], 2.5)]


def test_metrics_are_read_back_to_the_last_bit(tmp_path):
    for each in DYNAMIC:
        append(tmp_path / "metrics.jsonl", each)
    assert read(tmp_path / "metrics.jsonl", IterationMetrics) == DYNAMIC


@pytest.mark.parametrize("speaks", [True, False])
def test_lines_and_table_are_printed_by_one_process_alone(speaks, capsys):
    reporter = Reporter(speaks)
    reporter.begin("a run", len(DYNAMIC))
    for each in DYNAMIC:
        reporter.iteration(each)
    reporter.end(DYNAMIC)
    printed = capsys.readouterr().out
    assert printed.count("  loss +0.37500  ") == printed.count("\niterations  ") == int(speaks)
    assert printed.count("+0.37500") == int(speaks)
    assert printed.count("fill 25.0% (2 full ones would end the steps later)") == 2 * speaks
    if not speaks:
        assert printed == ""
    baseline = [dataclasses.replace(each, fill=1e-8) for each in BASELINE]
    assert "  fill no cap (one sample each)  " in iteration_line(baseline[0])
    assert " no cap " in str(run_table(baseline))


def test_comparison_leaves_the_warm_up_out_of_times_but_not_of_losses():
    result = compare(DYNAMIC, BASELINE)
    assert (result.largest_loss_difference, result.largest_loss) == (0.0625, 1.0)
    assert (result.median_step_seconds, result.step_ratio) == ((1.0, 2.5), 2.5)
    assert "largest difference in loss over 4 optimizer steps: 6.2e-02" in str(result)
    assert compare(DYNAMIC[:1], BASELINE[:1]).step_ratio == pytest.approx(1 / 3)
    for other in ([BASELINE[0], dataclasses.replace(BASELINE[1], samples=7)], BASELINE[:1]):
        with pytest.raises(ValueError, match="run both with the same settings"):
            compare(DYNAMIC, other)
