import pytest
import torch
from byte_tokens import BEGIN, END, text_of
from hypothesis import given, settings
from hypothesis import strategies as st
from number_chain import NumberChain
from trajectories import (
    LINE_END,
    MAX_TOKENS,
    MAX_TURN_TOKENS,
    Trajectory,
    samples_of,
    scripted_trajectory,
)

from mcore_batching.batch import DEFAULT_SCHEMA
from mcore_batching.rl import compute_advantages


def begin(start=7, changes=(1, -1, 1)):
    game = NumberChain(start, changes)
    return Trajectory("u", 0, game, [BEGIN, *game.opening().encode()])


def play(trajectory, text, log_prob=-1.0):
    for token in text.encode():
        trajectory.play(token, log_prob)
    return trajectory


def test_a_game_is_played_token_by_token():
    trajectory = play(begin(), "8\n7\n")
    assert text_of(trajectory.tokens[1:]) == "7+1=8\n-1=7\n+1="
    assert not trajectory.is_over
    assert trajectory.reward == pytest.approx(2 / 3)
    play(trajectory, "9\n")
    assert trajectory.is_over
    assert text_of(trajectory.tokens[1:]) == "7+1=8\n-1=7\n+1=9\n"
    assert trajectory.reward == pytest.approx(2 / 3)
    assert [text_of([trajectory.tokens[i] for i in turn]) for turn in trajectory.turns] == [
        "8\n",
        "7\n",
        "9\n",
    ]
    with pytest.raises(ValueError, match="game u is over"):
        trajectory.play(LINE_END, 0.0)


def test_a_turn_without_a_line_end_is_cut_and_lost():
    trajectory = play(begin(), "8" * MAX_TURN_TOKENS)
    assert trajectory.is_over
    assert trajectory.reward == 0.0
    assert len(trajectory.turns[0]) == MAX_TURN_TOKENS


@given(st.lists(st.integers(0, 319), min_size=MAX_TURN_TOKENS, max_size=MAX_TURN_TOKENS))
def test_whatever_is_drawn_is_an_answer(tokens):
    trajectory = begin()
    for token in tokens:
        if not trajectory.is_over:
            trajectory.play(token, -1.0)
    assert trajectory.turns
    assert text_of([END, 0xFF, ord("8")]) == "\ufffd\ufffd8"


def test_names_of_drawn_tokens_are_all_different():
    names = []
    for number in range(2):
        for uid in ("1/0/1", "1/0/11"):
            trajectory = Trajectory.begin(uid, number)
            while not trajectory.is_over:
                names.append(trajectory.drawn)
                token = trajectory.game.right_answer(len(trajectory.turns))
                trajectory.play(ord(token[len(names) % 2 - 1]), 0.0)
    assert len(set(names)) == len(names)


@given(st.integers(0, 10**6))
def test_no_trajectory_is_longer_than_said(seed):
    trajectory = scripted_trajectory(str(seed), 0, 0.0)
    assert trajectory.reward == 1.0
    assert len(trajectory.tokens) <= MAX_TOKENS


def test_samples_are_as_the_module_shows_them():
    trajectory = play(begin(7, (1, -1)), "8\n7\n", -0.5)
    whole = samples_of([trajectory], step_wise=False)
    assert text_of(whole["tokens"][0][1:].tolist()) == "7+1=8\n-1=7\n"
    assert (whole["total_lengths"], whole["response_lengths"]) == ([12], [7])
    assert whole["loss_masks"][0].tolist() == [1, 1, 0, 0, 0, 1, 1]
    assert whole["rollout_log_probs"][0].tolist() == [-0.5, -0.5, 0, 0, 0, -0.5, -0.5]
    turns = samples_of([trajectory], step_wise=True)
    assert [text_of(tokens[1:].tolist()) for tokens in turns["tokens"]] == [
        "7+1=8\n",
        "7+1=8\n-1=7\n",
    ]
    assert (turns["total_lengths"], turns["response_lengths"]) == ([7, 12], [2, 2])
    assert [mask.tolist() for mask in turns["loss_masks"]] == [[1, 1], [1, 1]]
    assert turns["round_number"] == [0, 1]
    assert turns["rewards"] == [1.0, 1.0]
    for samples in (whole, turns):
        DEFAULT_SCHEMA.validate(samples)


def trained(games, step_wise):
    """Every trained token with its game, history, advantage and log-probability as drawn."""
    samples = samples_of(games, step_wise=step_wise)
    advantages = compute_advantages(samples, "grpo", step_wise=step_wise)
    found = []
    for i, tokens in enumerate(samples["tokens"]):
        prompt = len(tokens) - samples["response_lengths"][i]
        for at in samples["loss_masks"][i].nonzero()[:, 0].tolist():
            history = tuple(tokens[: prompt + at + 1].tolist())
            game = samples["uids"][i], samples["trajectory_ids"][i]
            log_prob = samples["rollout_log_probs"][i][at].item()
            found.append((game, history, advantages[i][at].item(), log_prob))
    return sorted(found)


@settings(deadline=None)  # the first call is slow where the machine is busy
@given(st.integers(0, 10**6), st.floats(0, 0.6))
def test_turns_and_whole_games_train_the_same_tokens(seed, slip):
    games = [
        scripted_trajectory(f"{seed}/{index}", number, slip)
        for index in range(3)
        for number in range(4)
    ]
    for i, game in enumerate(games):
        game.log_probs = [-0.25 * (i + j) for j in range(len(game.log_probs))]
    whole = trained(games, step_wise=False)
    assert trained(games, step_wise=True) == whole
    assert len(whole) == sum(len(turn) for game in games for turn in game.turns)


def test_a_rank_without_games_has_the_same_fields():
    empty = samples_of([], step_wise=True)
    assert empty.keys() == samples_of([play(begin(), "9\n")], step_wise=True).keys()
    assert all(values == [] for values in empty.values())
    assert torch.is_tensor(samples_of([play(begin(), "9\n")], step_wise=False)["tokens"][0])
