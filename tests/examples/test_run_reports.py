"""What runs report: metrics that are read back, comparisons, and the measured passes of a step."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from comparison import compare
from metrics import IterationMetrics, StepMetrics, append, read

pytest.importorskip("megatron.core")

from timeline import record

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


def test_comparison_leaves_the_warm_up_out_of_times_but_not_of_losses():
    result = compare(DYNAMIC, BASELINE)
    assert (result.largest_loss_difference, result.largest_loss) == (0.0625, 1.0)
    assert (result.median_step_seconds, result.step_ratio) == ((1.0, 2.5), 2.5)
    assert "largest difference in loss over 4 optimizer steps: 6.2e-02" in str(result)
    assert compare(DYNAMIC[:1], BASELINE[:1]).step_ratio == pytest.approx(1 / 3)
    for other in ([BASELINE[0], dataclasses.replace(BASELINE[1], samples=7)], BASELINE[:1]):
        with pytest.raises(ValueError, match="run both with the same settings"):
            compare(DYNAMIC, other)


def test_every_pass_is_noted_in_any_order_and_no_gradient_changes():
    config = SimpleNamespace(timers="before")
    model = [torch.nn.Linear(2, 2) for _ in range(2)]
    for chunk in model:
        chunk.config = config

    def forward(chunk):
        config.timers("forward-compute", log_level=2).start()
        output = chunk(torch.ones(1, 2)).sum()
        config.timers("forward-compute").stop()
        return output

    with record(model) as recorder:
        outputs = [forward(model[chunk]) for chunk in (0, 0, 1, 1)]
        for output in (outputs[2], outputs[0], outputs[3], outputs[1]):
            config.timers("backward-compute", log_level=2).start()
            output.backward()
            config.timers("backward-compute").stop()
    assert [(chunk, slot, back) for chunk, slot, back, _, _ in recorder.passes] == [
        *[(0, 0, False), (0, 1, False), (1, 0, False), (1, 1, False)],
        *[(1, 0, True), (0, 0, True), (1, 1, True), (0, 1, True)],
    ]
    times = [time for _, _, _, start, end in recorder.passes for time in (start, end)]
    assert times == sorted(times)
    assert torch.equal(model[0].weight.grad, torch.full((2, 2), 2.0))
    with pytest.raises(RuntimeError, match="in the step"), record(model):
        raise RuntimeError("in the step")
    assert config.timers == "before"
    assert not model[0]._forward_hooks
