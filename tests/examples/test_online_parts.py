"""What an online job is made of: steps of its ranks, warm start's loss, reports."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

import reward_figure
import warm_start
from batches import share_of_rank
from figures import save
from metrics import OnlineMetrics, StepMetrics, append, read
from online import steps_of_rank, uids_of_iteration
from online_reporting import COLUMNS, iteration_line, reward_summary, run_table
from options import parse_arguments

from mcore_batching.batch import DEFAULT_SCHEMA, pack, step_totals


@given(
    num_groups=st.integers(1, 12),
    num_ranks=st.integers(1, 5),
    groups_per_step=st.integers(1, 13),
    turns=st.lists(st.integers(0, 6), min_size=12, max_size=12),
)
def test_optimizer_steps_depend_on_prompts_alone(num_groups, num_ranks, groups_per_step, turns):
    everyone = [f"u{i}" for i in range(num_groups)]
    held = []
    for rank in range(num_ranks):
        mine = share_of_rank(everyone, rank, num_ranks)
        samples = [uid for uid in mine for _ in range(turns[everyone.index(uid)])]
        steps = steps_of_rank(samples, everyone, groups_per_step)
        assert len(steps) == -(-num_groups // groups_per_step)
        assert sorted(i for step in steps for i in step) == list(range(len(samples)))
        held.append([{samples[i] for i in step} for step in steps])
    for number, of_ranks in enumerate(zip(*held, strict=True)):
        expected = everyone[number * groups_per_step :][:groups_per_step]
        played = {uid for uid in expected if turns[everyone.index(uid)]}
        assert set().union(*of_ranks) == played


def test_games_differ_between_iterations_and_seeds():
    names = [
        uid
        for seed in ("1", "11")
        for iteration in range(12)
        for uid in uids_of_iteration(
            parse_arguments(["--online", "--seed", seed, "--prompts-per-iteration", "12"]),
            iteration,
        )
    ]
    assert len(set(names)) == len(names) == 2 * 12 * 12


def test_imitation_is_the_mean_over_the_players_tokens(monkeypatch):
    row = pack(
        {
            "tokens": [torch.arange(5), torch.arange(3)],
            "total_lengths": [5, 3],
            "response_lengths": [3, 1],
            "loss_masks": [torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0])],
        },
        schema=DEFAULT_SCHEMA,
        sample_indices=[0, 1],
    )
    log_probs = [torch.tensor([-1.0, -100.0, -2.0]), torch.tensor([-6.0])]
    monkeypatch.setattr(warm_start, "response_log_probs", lambda logits, row: log_probs)
    loss, metrics = warm_start.imitation_loss(torch.zeros(1), row, step_totals([row]))
    assert loss.item() == pytest.approx((1 + 2 + 6) / 3)
    assert metrics == {}


def iteration(number, reward, turns):
    step = StepMetrics(
        loss=0.5,
        policy_loss=0.5,
        kl=0.25 * (number + 1),
        clipped=0.0,
        grad_norm=2.0,
        num_microbatches=3,
        seconds=1.5,
    )
    return OnlineMetrics(
        iteration=number,
        samples=16,
        tokens=1000,
        reward=reward,
        num_microbatches=6,
        placeholders=number,
        fill=0.75,
        padding=0.0,
        rank_balance=1.25,
        plan_seconds=0.125,
        forward_only_seconds=0.5,
        steps=(step, step),
        games=16,
        games_won=4,
        turns=turns,
        sampling_passes=9,
        sampling_placeholders=5,
        sampling_seconds=2.0,
        log_prob_gap=1e-6,
    )


RUN = [iteration(0, 0.1 + 0.2, 20), iteration(1, 0.7, 60)]


def test_online_metrics_are_read_back_to_the_last_bit(tmp_path):
    for each in RUN:
        append(tmp_path / "metrics.jsonl", each)
    assert read(tmp_path / "metrics.jsonl", OnlineMetrics) == RUN
    assert RUN[0].seconds == 2.0 + 0.125 + 0.5 + 2 * 1.5


def test_a_line_and_the_table_show_turns_beside_optimizer_steps():
    line = iteration_line(RUN[1])
    for text in (
        "iteration   1  reward 0.700  won 4/16",
        "60 turns in 16 samples  2 optimizer steps  KL 0.5000",
        "1 placeholders, 5 in play  5.62 s",
    ):
        assert text in line
    table = run_table(RUN)
    assert table.columns == COLUMNS
    assert table.rows[0] == (
        *(
            "0",
            "0.300",
            "25%",
            "20",
            "16",
            "2",
            "0.2500",
            "9",
            "5",
            "2.00",
            "6",
            "0",
            "0.50",
            "3.00",
        ),
    )
    assert table.total == (
        *("all", "0.500", "25%", "80", "32", "4", "0.3750", "18", "10", "4.00"),
        *("12", "1", "1.00", "6.00"),
    )


def test_the_summary_says_from_what_to_what_the_reward_went():
    run = [iteration(number, reward / 10, 20) for number, reward in enumerate(range(10))]
    assert reward_summary(run) == (
        "mean reward 0.200 in the first 5 iterations, 0.700 in the last 5; 200 turns played, "
        "20 optimizer steps"
    )
    assert "0.300 in the first 2 iterations, 0.300 in the last 2" in reward_summary([RUN[0]] * 2)


def test_the_reward_is_drawn_above_turns_and_optimizer_steps(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(reward_figure, "save", lambda figure, out: figures.append((figure, out)))
    reward_figure.draw_reward(RUN, "online", tmp_path / "reward.png")
    ((figure, out),) = figures
    lines = [[list(line.get_ydata()) for line in axes.lines] for axes in figure.axes]
    assert lines == [[[0.1 + 0.2, 0.7], [0.25, 0.25]], [[20, 60]], [[2, 2]]]
    assert [axes.get_ylabel() for axes in figure.axes] == ["", "turns", "optimizer steps"]
    assert figure.axes[0].get_title(loc="left") == "online: 16 games an iteration"
    save(figure, out)
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
