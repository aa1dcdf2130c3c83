"""The GRPO jobs on real processes: recorded rollouts beside the baseline, and games in play."""

import json
import math
import re
import tempfile
from pathlib import Path

import pytest
from byte_tokens import VOCABULARY
from metrics import IterationMetrics, OnlineMetrics, read

pytest.importorskip("megatron.core")

from kit.harness import launch

from mcore_batching.megatron import compat

REPOSITORY = Path(__file__).resolve().parents[2]
ON_THE_CPU = 10**6
"""Processes for which there are too few GPUs."""
# Two pipeline stages of two model chunks.
RECORDED = ["--pp=2", "--vpp=2", "--num-layers=4", "--hidden-size=32", "--iterations=2"]
RECORDED += ["--prompts-per-iteration=4", "--global-batch-size=8", "--max-tokens-per-gpu=512"]
ONLINE = ["--online", "--iterations=2", "--prompts-per-iteration=6", "--groups-per-step=4"]
ONLINE += ["--max-tokens-per-gpu=256", "--lr-decay-style=linear"]


def run_grpo(nproc, *flags):
    script = str(REPOSITORY / "examples" / "grpo" / "grpo.py")
    with tempfile.TemporaryDirectory() as folder:
        # Without an agent's and each rank's own imports; quickstart.sh has torchrun.
        return launch(
            *("kit.ranks", str(nproc), script, *flags),
            nproc=ON_THE_CPU,
            folder=Path(folder),
            seconds=300,
        )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    out = tmp_path_factory.mktemp("recorded")
    done = run_grpo(2, *RECORDED, "--compare", "--out", str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, out, [read_run(out, name) for name in ("dynamic", "baseline")]


def read_run(out, name, kind=IterationMetrics):
    return read(out / name / "metrics.jsonl", kind)


def test_dynamic_run_and_baseline_have_the_same_curve(recorded):
    _, _, (dynamic, baseline) = recorded
    assert_same_curve(dynamic, baseline)
    for ours, theirs in zip(dynamic, baseline, strict=True):
        assert ours.num_microbatches < theirs.num_microbatches == 16


@pytest.mark.long
@pytest.mark.parametrize(
    "flag", ["--dynamic-batch-context-parallel=2", "--hybrid-layer-pattern=*-|*-|*-|*-"]
)
def test_shared_rows_and_hybrid_models_have_the_same_curve(tmp_path, flag):
    done = run_grpo(4, *RECORDED, flag, "--compare", "--out", str(tmp_path))
    if "hybrid" in flag and not compat.has_hybrid_model():
        assert "from 0.18 on: install a later one" in done.stderr
        return
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_curve(*(read_run(tmp_path, name) for name in ("dynamic", "baseline")))


def assert_same_curve(dynamic, baseline):
    assert len(dynamic) == len(baseline) == 2
    for ours, theirs in zip(dynamic, baseline, strict=True):
        assert len(ours.steps) == len(theirs.steps) == 2
        for name in ("samples", "tokens", "reward"):
            assert getattr(ours, name) == getattr(theirs, name)
        for step, other in zip(ours.steps, theirs.steps, strict=True):
            for name in ("loss", "policy_loss", "kl", "clipped", "entropy", "grad_norm"):
                # Float32 sums in another order, through at most four updates.
                assert getattr(step, name) == pytest.approx(getattr(other, name), abs=1e-5), name


def test_the_policy_starts_as_the_reference_and_moves_away(recorded):
    _, _, ((first, second), _) = recorded
    assert first.steps[0].kl == pytest.approx(0, abs=1e-9)
    assert first.steps[0].loss == pytest.approx(first.steps[0].policy_loss, abs=1e-9)
    assert second.steps[-1].kl > 1e-4
    # Old log-probabilities are those before the iteration's first update.
    assert second.steps[0].clipped == 0
    # An untrained policy draws almost evenly.
    assert 0.9 * math.log(VOCABULARY) < first.steps[0].entropy < math.log(VOCABULARY)


def test_the_recorded_job_prints_and_writes_what_it_promises(recorded):
    printed, out, _ = recorded
    # One process alone, two iterations of two runs.
    assert len(re.findall(r"iteration +\d+  loss .* KL .* grad norm .* tokens", printed)) == 4
    assert printed.count("\niterations  ") == 2
    assert "largest difference in loss over 4 optimizer steps" in printed
    for name in ("dynamic", "baseline"):
        assert json.loads((out / name / "settings.json").read_text())["vpp"] == 2
    for name in ("dynamic/micro_batches.png", "baseline/micro_batches.png", "comparison.png"):
        assert (out / name).stat().st_size > 10_000


@pytest.mark.long
def test_what_the_user_can_put_right_is_said_once_without_a_traceback(tmp_path):
    done = run_grpo(2, *RECORDED, "--dp=2", "--out", str(tmp_path))
    assert done.returncode != 0
    assert done.stderr.count("grpo.py: error: the parallel dims need 4 processes") == 1
    assert "bootstrap.py" not in done.stderr


@pytest.fixture(scope="module")
def online(request, tmp_path_factory):
    """Whole games, and single turns; on two data-parallel ranks, with --long of two stages."""
    # The long warm start teaches enough for games of several turns.
    stages, steps = (2, 50) if request.config.getoption("--long") else (1, 30)
    given = [*ONLINE, f"--pp={stages}", f"--warm-start-steps={steps}"]
    out = tmp_path_factory.mktemp("online")
    runs = []
    for name, flags in (("online", []), ("online-step-wise", ["--step-wise"])):
        done = run_grpo(2 * stages, *given, "--out", str(out), *flags)
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"warm start, step  {steps}  loss" in done.stdout
        for picture in ("reward.png", "micro_batches.png"):
            assert (out / name / picture).stat().st_size > 10_000
        runs.append(read_run(out, name, OnlineMetrics))
    return runs


@pytest.mark.long
def test_a_turn_is_a_sample_only_step_by_step(online):
    whole, turns = online
    assert [each.samples for each in whole] == [48, 48]
    assert [each.samples for each in turns] == [each.turns for each in turns]
    assert turns[0].turns > 48 + 4
    # Optimizer steps and the learning rate depend on prompts alone.
    for run in (whole, turns):
        assert {len(each.steps) for each in run} == {2}
        rates = [step.learning_rate for each in run for step in each.steps]
        assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


@pytest.mark.long
def test_turns_and_whole_games_train_alike(online):
    (whole, _), (turns, _) = online
    # The same weights play the same games, and the loss is a mean over the same tokens.
    for name in ("reward", "games", "games_won", "turns", "sampling_passes"):
        assert getattr(whole, name) == getattr(turns, name), name
    assert whole.sampling_placeholders == turns.sampling_placeholders
    assert whole.steps[0].loss == pytest.approx(turns.steps[0].loss, abs=1e-5)
    assert whole.steps[0].grad_norm == pytest.approx(turns.steps[0].grad_norm, rel=1e-4)
    assert whole.steps[0].grad_norm > 0.1
    # After one update; Adam's first one magnifies rounding.
    assert whole.steps[1].loss == pytest.approx(turns.steps[1].loss, abs=1e-3)


def test_what_was_drawn_is_what_is_trained_from_the_warm_started_reference(online):
    for first, second in online:
        # Float32 log-probabilities of tokens, with other games in the row.
        assert 0 <= first.log_prob_gap < 1e-4
        assert 0 <= second.log_prob_gap < 1e-4
        assert first.steps[0].kl == pytest.approx(0, abs=1e-7)
        assert second.steps[-1].kl > 1e-4
