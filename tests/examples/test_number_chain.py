import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from number_chain import LARGEST, MAX_ROUNDS, NumberChain, new_game, scripted_answers

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GAME = NumberChain(7, (1, -1, 1))
names = st.text(max_size=8)


@given(names)
def test_right_answers_stay_in_range_and_differ_by_one(name):
    game = new_game(name)
    numbers = [game.start, *(int(game.right_answer(i)) for i in range(len(game.changes)))]
    assert 1 <= len(game.changes) <= MAX_ROUNDS
    assert all(0 <= number <= LARGEST for number in numbers)
    assert all(abs(a - b) == 1 for a, b in itertools.pairwise(numbers))


def test_games_of_all_lengths_and_starts_are_played():
    games = [new_game(str(i)) for i in range(300)]
    assert {len(game.changes) for game in games} == set(range(1, MAX_ROUNDS + 1))
    assert {game.start for game in games} == set(range(LARGEST + 1))


def test_a_name_is_one_game_in_every_process():
    # Hash seeds differ between processes.
    there = subprocess.run(
        [sys.executable, "-c", "import number_chain; print(number_chain.new_game('1234/0/5'))"],
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert there == str(new_game("1234/0/5"))
    assert there == "NumberChain(start=4, changes=(1, -1, 1, -1, -1))"


def test_a_whole_game_is_as_it_reads():
    assert GAME.opening() == "7+1="
    assert GAME.reply(["8\n"]) == "-1="
    assert GAME.reply(["8\n", "7\n"]) == "+1="
    assert GAME.reply(["8\n", "7\n", "8\n"]) is None
    assert GAME.reward(["8\n", "7\n", "8\n"]) == 1.0


@pytest.mark.parametrize("answer", ["9\n", "8", "8 \n", "08\n", "", "\n", "\ufffd8\n"])
def test_anything_but_the_right_line_loses(answer):
    assert GAME.reply([answer]) is None
    assert GAME.reward([answer]) == 0.0
    assert GAME.reply(["8\n", answer]) is None
    assert GAME.reward(["8\n", answer]) == pytest.approx(1 / 3)


@given(names, st.floats(0, 1))
def test_the_scripted_player_plays_to_the_end_and_not_beyond(name, slip):
    game = new_game(name)
    answers = scripted_answers(game, name, slip)
    assert game.reply(answers) is None
    assert all(game.reply(answers[:i]) is not None for i in range(1, len(answers)))
    assert all(0 <= int(answer) <= LARGEST for answer in answers)


def test_the_scripted_player_slips_as_often_as_told():
    rounds = [
        answer == new_game(str(i)).right_answer(index)
        for i in range(1000)
        for index, answer in enumerate(scripted_answers(new_game(str(i)), f"{i}/0", 0.3))
    ]
    # 5 standard deviations of the mean of so many rounds.
    assert sum(rounds) / len(rounds) == pytest.approx(0.7, abs=5 * (0.21 / len(rounds)) ** 0.5)
    assert scripted_answers(GAME, "any", 0.0) == ["8\n", "7\n", "8\n"]
    assert len(scripted_answers(GAME, "any", 1.0)) == 1
