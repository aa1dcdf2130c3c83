import json
import re
import statistics
from pathlib import Path

import arithmetic_game
import pytest

BUNDLED = Path(arithmetic_game.__file__).parent / "data" / "arithmetic_rollouts.jsonl"


@pytest.fixture(scope="module")
def games():
    return list(arithmetic_game.games(128, 4, seed=7))


def test_bundled_file_is_what_the_script_writes(games):
    assert [json.loads(line) for line in BUNDLED.read_text().splitlines()] == games
    assert BUNDLED.stat().st_size < 300_000


def test_another_seed_plays_other_games(games):
    assert list(arithmetic_game.games(128, 4, seed=8)) != games


def test_games_of_a_prompt_are_a_group(games):
    prompts = {}
    for game in games:
        prompts.setdefault(game["uid"], []).append(game["prompt"])
    assert len(prompts) == 128
    assert all(len(group) == 4 and len(set(group)) == 1 for group in prompts.values())


def test_lengths_have_a_long_tail_and_rewards_differ_in_most_groups(games):
    lengths = sorted(len(game["prompt"]) + len(game["response"]) for game in games)
    assert lengths[0] < 80
    assert lengths[-1] > 8 * statistics.median(lengths)
    rewards = {}
    for game in games:
        rewards.setdefault(game["uid"], set()).add(game["reward"])
    assert sum(len(group) > 1 for group in rewards.values()) > 64


def test_rewards_are_the_rounds_that_arithmetic_says_were_won(games):
    """The referee of the test reads the transcript and knows nothing of the generator."""
    for game in games:
        start = int(re.search(r"Start: (-?\d+)", game["prompt"])[1])
        rounds = int(re.search(r"(\d+) rounds?", game["prompt"])[1])
        questions = re.findall(r"(plus|minus|times) (\d+)\?", game["prompt"] + game["response"])
        answers = [int(re.search(r"(-?\d+)$", turn)[1]) for turn in players_turns(game)]
        won, value = 0, start
        for (operation, operand), answer in zip(questions, answers, strict=True):
            right = {
                "plus": value + int(operand),
                "minus": value - int(operand),
                "times": value * int(operand),
            }[operation]
            if answer != right:
                assert f"Wrong, it is {right}." in game["response"]
                break
            won, value = won + 1, right
        assert game["reward"] == round(won / rounds, 4)
        assert (game["reward"] == 1) == game["response"].endswith("You win.")
        assert len(answers) == min(won + 1, rounds)


def test_spans_hold_the_games_turns_and_nothing_of_the_players(games):
    for game in games:
        for start, end in game["environment_spans"]:
            assert re.match(r"\n(Right\.|Wrong,)", game["response"][start:end])
        assert not any("Right" in turn or "Round" in turn for turn in players_turns(game))


def players_turns(game):
    turns, at = [], 0
    for start, end in game["environment_spans"]:
        turns.append(game["response"][at:start])
        at = end
    assert at == len(game["response"])
    return turns
