"""Makes the bundled rollouts of a multi-turn arithmetic game, input of ``grpo.py``.

    python examples/data/arithmetic_game.py

The game keeps a running number and asks, round after round, to add to it, subtract from it or
multiply it. The first wrong answer ends it; the reward is the share of rounds won. The recorded
player is a noisy solver with three ways of writing, so lengths vary widely between games, which
have from 1 to 40 rounds, and within the group of games that share a prompt.

A response holds everything after the prompt, the game's own turns included;
``environment_spans`` says which of its characters ``[start, end)`` the game wrote, so that they
are not trained on.

The same seed writes the same bytes, whatever the Python version.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_ROUNDS = 40
MEDIAN_ROUNDS = 3.5
SIGMA_ROUNDS = 1.0
MAX_MULTIPLIED = 60
"""Multiplication is asked for only up to this number, which keeps numbers small."""

Operation = tuple[str, str, int]
"""How a round asks, the operator, and the operand."""


def games(num_prompts: int, trajectories_per_prompt: int, seed: int) -> Iterator[dict[str, Any]]:
    """Recorded games, those of one prompt one after the other.

    Args:
        num_prompts: different games.
        trajectories_per_prompt: times each is played.
        seed: of games and player.

    Yields:
        ``uid``, ``prompt``, ``response``, ``environment_spans`` and ``reward``.
    """
    generator = random.Random(seed)
    for index in range(num_prompts):
        start, operations = _new_game(generator)
        rounds = "1 round" if len(operations) == 1 else f"{len(operations)} rounds"
        prompt = f"Number chain, {rounds}. Start: {start}\n{_question(0, operations[0])}"
        for _ in range(trajectories_per_prompt):
            response, spans, won = _play(generator, start, operations)
            yield {
                "uid": f"chain-{index:03d}",
                "prompt": prompt,
                "response": response,
                "environment_spans": spans,
                "reward": round(won / len(operations), 4),
            }


def _new_game(generator: random.Random) -> tuple[int, list[Operation]]:
    # Log-normal, by the inverse of the logistic function rather than random.lognormvariate: only
    # random() is promised to give the same numbers in every Python version.
    u = generator.random()
    z = math.log(u / (1 - u)) / 1.702 if 0 < u < 1 else 0.0
    num_rounds = max(1, min(MAX_ROUNDS, round(MEDIAN_ROUNDS * math.exp(SIGMA_ROUNDS * z))))
    start = value = _integer(generator, 2, 30)
    operations: list[Operation] = []
    for _ in range(num_rounds):
        kinds = ["+", "-"] if abs(value) > MAX_MULTIPLIED else ["+", "-", "*"]
        operator = kinds[_integer(generator, 0, len(kinds) - 1)]
        if operator == "*":
            operation = ("times", "*", _integer(generator, 2, 6))
        elif operator == "+":
            operation = ("plus", "+", _integer(generator, 2, 60))
        else:
            operation = ("minus", "-", _integer(generator, 2, 60))
        operations.append(operation)
        value = _apply(value, operation)
    return start, operations


def _play(
    generator: random.Random, start: int, operations: list[Operation]
) -> tuple[str, list[list[int]], int]:
    """One game: the response, the spans that the game wrote, and the rounds won."""
    slip = 0.01 + 0.14 * generator.random()
    style = ("terse", "working", "explaining")[_integer(generator, 0, 2)]
    response, spans, value = "", [], start
    for index, operation in enumerate(operations):
        right = _apply(value, operation)
        answer = right
        if generator.random() < slip:
            answer += (1, -1, 10, -10)[_integer(generator, 0, 3)]
        response += _turn(style, value, operation, answer)
        is_last = index + 1 == len(operations)
        if answer != right:
            said = f"\nWrong, it is {right}. Game over."
        elif is_last:
            said = "\nRight. You win."
        else:
            said = f"\nRight. {_question(index + 1, operations[index + 1])}"
        spans.append([len(response), len(response) + len(said)])
        response += said
        if answer != right:
            return response, spans, index
        value = right
    return response, spans, len(operations)


def _question(index: int, operation: Operation) -> str:
    name, _, operand = operation
    return f"Round {index + 1}: {name} {operand}?\n"


def _turn(style: str, value: int, operation: Operation, answer: int) -> str:
    """The player's words. A wrong answer is worked out wrongly, too."""
    _, operator, operand = operation
    if style == "terse":
        return str(answer)
    if style == "working":
        return f"{value} {operator} {operand} = {answer}"
    tens, ones = operand // 10 * 10, operand % 10
    if operator == "*" or not tens or not ones:
        return f"We had {value}. {value} {operator} {operand} = {answer}. So it is {answer}"
    between = answer - ones if operator == "+" else answer + ones
    return (
        f"We had {value}. {value} {operator} {tens} = {between}, "
        f"{between} {operator} {ones} = {answer}. So it is {answer}"
    )


def _apply(value: int, operation: Operation) -> int:
    _, operator, operand = operation
    return {"+": value + operand, "-": value - operand, "*": value * operand}[operator]


def _integer(generator: random.Random, low: int, high: int) -> int:
    """From ``low`` to ``high``, both included."""
    return low + int(generator.random() * (high - low + 1))


def main() -> None:
    """Play the games and write them down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).with_name("arithmetic_rollouts.jsonl")
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--trajectories", type=int, default=4, help="games per prompt")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    lines = [
        json.dumps(game) for game in games(options.prompts, options.trajectories, options.seed)
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    print(f"{len(lines)} games in {options.out}")


if __name__ == "__main__":
    main()
