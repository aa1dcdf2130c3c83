"""The whole job on real processes: two pipeline stages of two model chunks."""

import json
import re

import pytest
from grpo_script import run_grpo
from metrics import IterationMetrics, read

pytest.importorskip("megatron.core")

FLAGS = [
    "--pp=2",
    "--vpp=2",
    "--num-layers=4",
    "--hidden-size=32",
    "--iterations=2",
    "--prompts-per-iteration=4",
    "--global-batch-size=8",
    "--max-tokens-per-gpu=512",
]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    out = tmp_path_factory.mktemp("job")
    done = run_grpo(2, *FLAGS, "--compare", "--out", str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, out


def test_both_runs_have_the_same_curve(job):
    _, out = job
    dynamic, baseline = (
        read(out / name / "metrics.jsonl", IterationMetrics) for name in ("dynamic", "baseline")
    )
    assert len(dynamic) == len(baseline) == 2
    for ours, theirs in zip(dynamic, baseline, strict=True):
        assert len(ours.steps) == len(theirs.steps) == 2
        assert (ours.samples, ours.tokens, ours.reward) == (
            theirs.samples,
            theirs.tokens,
            theirs.reward,
        )
        assert ours.num_microbatches < theirs.num_microbatches == 16
        for step, other in zip(ours.steps, theirs.steps, strict=True):
            for name in ("loss", "policy_loss", "kl", "clipped", "grad_norm"):
                # Float32 sums in another order, through at most four updates.
                assert getattr(step, name) == pytest.approx(getattr(other, name), abs=1e-5), name


def test_the_policy_starts_as_the_reference_and_moves_away(job):
    _, out = job
    first, second = read(out / "dynamic" / "metrics.jsonl", IterationMetrics)
    assert first.steps[0].kl == pytest.approx(0, abs=1e-9)
    assert first.steps[0].loss == pytest.approx(first.steps[0].policy_loss, abs=1e-9)
    assert second.steps[-1].kl > 1e-4
    # Old log-probabilities are those before the iteration's first update.
    assert second.steps[0].clipped == 0


def test_everything_that_is_promised_is_printed_and_written(job):
    printed, out = job
    assert len(re.findall(r"iteration +\d+  loss .* KL .* grad norm .* tokens", printed)) == 4
    assert "micro-batches/rank" in printed
    assert "largest difference in loss over 4 optimizer steps" in printed
    for name in ("dynamic", "baseline"):
        assert (out / name / "micro_batches.png").stat().st_size > 10_000
        assert json.loads((out / name / "settings.json").read_text())["vpp"] == 2
    assert (out / "comparison.png").stat().st_size > 10_000


def test_what_the_user_can_put_right_is_said_once_without_a_traceback(tmp_path):
    done = run_grpo(2, *FLAGS, "--dp=2", "--out", str(tmp_path))
    assert done.returncode != 0
    assert done.stderr.count("grpo.py: error: the layout needs 4 processes") == 1
    assert "bootstrap.py" not in done.stderr
