"""The policy plays and learns on two data-parallel ranks of two stages: whole games, and turns."""

import json

import pytest
from grpo_script import run_grpo
from metrics import OnlineMetrics, read

pytest.importorskip("megatron.core")

FLAGS = [
    "--online",
    "--iterations=2",
    "--prompts-per-iteration=6",
    "--groups-per-step=4",
    "--warm-start-steps=50",
    "--max-tokens-per-gpu=256",
]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    out = tmp_path_factory.mktemp("online")
    printed = ""
    for flags in ([], ["--step-wise"]):
        done = run_grpo(4, *FLAGS, "--out", str(out), *flags)
        assert done.returncode == 0, done.stderr[-3000:]
        printed += done.stdout
    runs = [
        read(out / name / "metrics.jsonl", OnlineMetrics) for name in ("online", "online-step-wise")
    ]
    return printed, out, runs


def test_a_turn_is_a_sample_only_step_by_step(job):
    _, _, (whole, turns) = job
    assert [each.samples for each in whole] == [48, 48]
    assert [each.samples for each in turns] == [each.turns for each in turns]
    # The warm start has taught it enough for games of several turns.
    assert turns[0].turns > 48 + 4


def test_optimizer_steps_depend_on_prompts_alone(job):
    _, _, runs = job
    assert {len(each.steps) for run in runs for each in run} == {2}
    assert len({each.turns for run in runs for each in run}) > 1


def test_turns_and_whole_games_train_alike(job):
    _, _, ((whole, _), (turns, _)) = job
    # The same weights play the same games, and the loss is a mean over the same tokens.
    for name in (
        "reward",
        "games",
        "games_won",
        "turns",
        "sampling_passes",
        "sampling_placeholders",
    ):
        assert getattr(whole, name) == getattr(turns, name), name
    assert whole.steps[0].loss == pytest.approx(turns.steps[0].loss, abs=1e-5)
    assert whole.steps[0].grad_norm == pytest.approx(turns.steps[0].grad_norm, rel=1e-4)
    assert whole.steps[0].grad_norm > 0.1
    # After one update; Adam's first one magnifies rounding.
    assert whole.steps[1].loss == pytest.approx(turns.steps[1].loss, abs=1e-3)


def test_what_was_drawn_is_what_is_trained(job):
    _, _, runs = job
    for each in (each for run in runs for each in run):
        # Float32 log-probabilities of tokens, with other games in the row.
        assert 0 <= each.log_prob_gap < 1e-4


def test_the_reference_is_the_policy_after_the_warm_start(job):
    _, _, runs = job
    for first, second in runs:
        assert first.steps[0].kl == pytest.approx(0, abs=1e-7)
        assert second.steps[-1].kl > 1e-4


def test_everything_that_is_promised_is_printed_and_written(job):
    printed, out, _ = job
    assert printed.count("warm start, step  50  loss") == 2
    assert printed.count("optimizer steps  KL") == 4
    assert printed.count("in the last 2; ") == 2
    for name in ("online", "online-step-wise"):
        settings = json.loads((out / name / "settings.json").read_text())
        assert settings["step_wise"] is (name == "online-step-wise")
        for picture in ("reward.png", "micro_batches.png"):
            assert (out / name / picture).stat().st_size > 10_000
