"""A number chain that a policy plays with a program: each round adds or subtracts one.

    7+1=  8⏎  -1=  7⏎  +1=  9⏎        program, player, program, player, program, player

(the last answer is wrong: the game is over, and two of its rounds are won). The reward is the share
of the game's rounds that were won.

Later questions do not repeat the number: it stands in the player's own answer only. A game is a
function of its name alone, whatever the Python version.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

LARGEST = 9
MAX_ROUNDS = 6


@dataclasses.dataclass(frozen=True)
class NumberChain:
    """One game.

    Attributes:
        start: first number.
        changes: what each round asks to add, 1 or -1.
    """

    start: int
    changes: tuple[int, ...]

    def right_answer(self, index: int) -> str:
        """The answer that wins a round, line end included."""
        return f"{self.start + sum(self.changes[: index + 1])}\n"

    def opening(self) -> str:
        """The program's first line, without its end."""
        return f"{self.start}{self._question(0)}"

    def reply(self, answers: Sequence[str]) -> str | None:
        """The program's reply to the last of a player's answers; None: the game is over.

        Args:
            answers: one for each round played.
        """
        played = len(answers)
        if self.rounds_won(answers) < played or played == len(self.changes):
            return None
        return self._question(played)

    def rounds_won(self, answers: Sequence[str]) -> int:
        """Rounds before the first wrong answer."""
        for index, answer in enumerate(answers):
            if answer != self.right_answer(index):
                return index
        return len(answers)

    def reward(self, answers: Sequence[str]) -> float:
        """Share of the game's rounds that were won."""
        return self.rounds_won(answers) / len(self.changes)

    def _question(self, index: int) -> str:
        return f"{self.changes[index]:+d}="


def new_game(name: str) -> NumberChain:
    """The game of this name, of 1 to `MAX_ROUNDS` rounds."""
    generator = random.Random(name)
    start = number = _integer(generator, 0, LARGEST)
    changes = []
    for _ in range(_integer(generator, 1, MAX_ROUNDS)):
        possible = [change for change in (-1, 1) if 0 <= number + change <= LARGEST]
        changes.append(possible[_integer(generator, 0, len(possible) - 1)])
        number += changes[-1]
    return NumberChain(start, tuple(changes))


def scripted_answers(game: NumberChain, name: str, slip: float) -> list[str]:
    """Answers of a player who is wrong in a round with probability ``slip``, up to the end.

    Args:
        game: the game.
        name: another name, another course of the game.
        slip: wrong answers are any other number from 0 to `LARGEST`, each as likely.
    """
    generator = random.Random(name)
    answers: list[str] = []
    while not answers or game.reply(answers) is not None:
        right = game.right_answer(len(answers))
        wrong = [answer for i in range(LARGEST + 1) if (answer := f"{i}\n") != right]
        slips = generator.random() < slip
        answers.append(wrong[_integer(generator, 0, len(wrong) - 1)] if slips else right)
    return answers


def _integer(generator: random.Random, low: int, high: int) -> int:
    """From ``low`` to ``high``, both included; random() alone is the same in every Python."""
    return low + int(generator.random() * (high - low + 1))
