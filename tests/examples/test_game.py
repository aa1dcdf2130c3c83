"""The game that the policy plays: its rules, its samples, and how tokens are drawn."""

import pytest
import torch
from byte_tokens import BEGIN, text_of
from hypothesis import given
from hypothesis import strategies as st
from number_chain import LARGEST, MAX_ROUNDS, NumberChain, new_game, scripted_answers
from trajectories import Trajectory, samples_of, scripted_trajectory

from mcore_batching.batch import DEFAULT_SCHEMA
from mcore_batching.rl import compute_advantages

GAME = NumberChain(7, (1, -1, 1))


def begin(changes=(1, -1, 1)):
    game = NumberChain(7, changes)
    return Trajectory("u", 0, game, [BEGIN, *game.opening().encode()])


def play(trajectory, text, log_prob=-1.0):
    for token in text.encode():
        trajectory.play(token, log_prob)
    return trajectory


def test_a_name_is_one_game_whatever_the_process_and_games_vary():
    # Written down: hash seeds differ between processes.
    assert new_game("1234/0/5") == NumberChain(4, (1, -1, 1, -1, -1))
    games = [new_game(str(i)) for i in range(300)]
    assert {len(game.changes) for game in games} == set(range(1, MAX_ROUNDS + 1))
    assert {game.start for game in games} == set(range(LARGEST + 1))


@pytest.mark.parametrize("answer", ["9\n", "8", "8 \n", "08\n", "", "\n", "\ufffd8\n"])
def test_anything_but_the_right_line_loses(answer):
    assert GAME.reply(["8\n"]) == "-1="
    assert GAME.reply(["8\n", answer]) is None
    assert GAME.reward(["8\n", answer]) == pytest.approx(1 / 3)


@given(st.text(max_size=8), st.floats(0, 1))
def test_the_scripted_player_plays_to_the_end_and_not_beyond(name, slip):
    game = new_game(name)
    answers = scripted_answers(game, name, slip)
    assert game.reply(answers) is None
    assert all(game.reply(answers[:i]) is not None for i in range(1, len(answers)))
    assert all(0 <= int(answer) <= LARGEST for answer in answers)
    assert game.reward(scripted_answers(game, name, 0.0)) == 1.0
    assert len(scripted_answers(game, name, 1.0)) == 1
    with pytest.raises(ValueError, match="is over"):
        scripted_trajectory(name, 0, slip).play(ord("8"), 0.0)


def test_samples_are_as_the_module_shows_them():
    trajectory = play(begin((1, -1)), "8\n7\n", -0.5)
    whole = samples_of([trajectory], step_wise=False)
    assert text_of(whole["tokens"][0][1:].tolist()) == "7+1=8\n-1=7\n"
    assert whole["loss_masks"][0].tolist() == [1, 1, 0, 0, 0, 1, 1]
    assert whole["rollout_log_probs"][0].tolist() == [-0.5, -0.5, 0, 0, 0, -0.5, -0.5]
    turns = samples_of([trajectory], step_wise=True)
    assert (turns["total_lengths"], turns["response_lengths"]) == ([7, 12], [2, 2])
    assert (turns["round_number"], turns["rewards"]) == ([0, 1], [1.0, 1.0])
    none = samples_of([], step_wise=True)
    assert none == {key: [] for key in turns}
    for samples in (whole, turns, none):
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


@given(st.integers(0, 10**6), st.floats(0, 0.6))
def test_turns_and_whole_games_train_the_same_tokens(seed, slip):
    games = [scripted_trajectory(f"{seed}/{i}", number, slip) for i in (0, 1) for number in (0, 1)]
    for i, game in enumerate(games):
        game.log_probs = [-0.25 * (i + j) for j in range(len(game.log_probs))]
    whole = trained(games, step_wise=False)
    assert trained(games, step_wise=True) == whole
    assert len(whole) == sum(len(turn) for game in games for turn in game.turns)


def test_a_token_is_the_first_whose_share_of_the_probability_holds_its_number():
    pytest.importorskip("megatron.core")
    from sampling import draw, uniform

    logits = torch.tensor([0.5, 0.25, 0.25]).log().expand(5, 3)
    tokens, log_probs = draw(logits, [0.0, 0.49, 0.51, 0.76, 1 - 2.0**-53])
    assert tokens.tolist() == [0, 0, 1, 2, 2]
    assert log_probs.exp().tolist() == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.25])
    numbers = [uniform(f"{game}/{place}") for game in "ab" for place in range(200)]
    assert len(set(numbers)) == 400
    assert 0.45 < sum(numbers) / 400 < 0.55
