"""Random choices by name, and the samples and steps of jobs that are drawn by them."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

LONGEST = 160
"""Tokens of a sample."""
LOPSIDED = (40, 3, 0, 1)
"""Samples of each data-parallel rank where they lie unevenly."""


class Draw:
    """Named random choices of a seed, but for those that are forced."""

    def __init__(self, seed: int, forced: Mapping[str, Any]) -> None:
        self._seed = seed
        self._forced = {name.replace("_", " "): value for name, value in forced.items()}

    def stream(self, name: str) -> random.Random:
        return random.Random(f"{self._seed} {name}")

    def one(self, name: str, choices: Sequence[Any]) -> Any:
        return self._forced.get(name, self.stream(name).choice(choices))

    def chance(self, name: str, probability: float) -> bool:
        return bool(self._forced.get(name, self.stream(name).random() < probability))


def drawn_rollouts(draw: Draw, ranks: int) -> list[dict[str, Any]]:
    """Samples ``[total, response, data-parallel rank]`` and the steps that they are trained in."""
    count = draw.one("rollouts", [1, 1, 2, 3])
    return [_rollout(draw, f"rollout {n}", ranks, most_steps=6 // count) for n in range(count)]


def _rollout(draw: Draw, name: str, ranks: int, most_steps: int) -> dict[str, Any]:
    stream = draw.stream(f"{name}, samples")
    lengths = _lengths(stream)
    owners = _owners(stream, len(lengths), ranks)
    if ranks > 1 and draw.chance("lopsided", 0.15):
        owners = [rank for rank, count in enumerate(LOPSIDED[:ranks]) for _ in range(count)]
        lengths = [stream.randint(1, 24) for _ in owners]
    how = stream.choice(["any", "any", "any", "0", "1", "2", "all", "few tokens"])
    samples = [
        [n, _response(stream, how, n), rank] for n, rank in zip(lengths, owners, strict=True)
    ]
    if draw.chance(f"{name}, samples of no tokens", 0.1):
        for sample in samples[::3]:
            sample[:2] = [0, 0]
    samples.sort(key=lambda sample: sample[2])
    rollout: dict[str, Any] = {"samples": samples}
    steps = draw.one(f"{name}, steps", ["one", "one", "global batch size", "groups", "dealt out"])
    if steps == "global batch size" and samples:
        least = math.ceil(len(samples) / most_steps)
        rollout["global_batch_size"] = stream.randint(least, max(least, len(samples)))
    elif steps == "groups":
        rollout["steps"] = _steps_of_groups(stream, len(samples), most_steps)
    elif steps == "dealt out":  # some of them empty, on all ranks
        cut: list[list[int]] = [[] for _ in range(stream.randint(1, most_steps))]
        for sample in stream.sample(range(len(samples)), len(samples)):
            stream.choice(cut).append(sample)
        rollout["steps"] = cut
    if steps in ("one", "groups") and draw.chance(f"{name}, padding samples", 0.2):
        rollout["padded_to"] = draw.one(f"{name}, padded to", [2, 4, 8])
    return rollout


def _lengths(stream: random.Random) -> list[int]:
    kind = stream.choice(
        ["tiny", "equal", "long-tailed", "long-tailed", "giant", "few", "over the cap", "none"]
    )
    count = stream.randint(3, 20)
    if kind == "none" and stream.random() < 0.6:  # else too often
        kind = "few"
    if kind == "tiny":
        return [stream.randint(1, 4) for _ in range(count)]
    if kind == "equal":
        return [stream.randint(1, 40)] * count
    if kind == "giant":
        return [LONGEST, *(stream.randint(1, 12) for _ in range(count))]
    if kind == "few":
        return [stream.randint(1, 50) for _ in range(stream.randint(1, 3))]
    if kind == "over the cap":
        return [stream.randint(40, LONGEST) for _ in range(min(count, 7))]
    if kind == "none":
        return []
    return [max(1, min(LONGEST, round(stream.lognormvariate(2.7, 0.9)))) for _ in range(count)]


def _response(stream: random.Random, how: str, total: int) -> int:
    if how == "few tokens":
        how = stream.choice(["0", "1", "1", "2"])
    if how == "any":
        edge = stream.choice([0, 1, 2, total, total - 1, None, None, None, None, None])
        return min(total, stream.randint(0, total) if edge is None else edge)
    return total if how == "all" else min(int(how), total)


def _owners(stream: random.Random, count: int, ranks: int) -> list[int]:
    """The data-parallel rank of each sample."""
    spread = stream.choice(["even", "random", "one rank", "uneven", "last none"])
    if spread == "even":
        return [number * ranks // max(count, 1) for number in range(count)]
    if spread == "one rank":
        return [stream.randrange(ranks)] * count
    if spread == "uneven":
        return [min(number, ranks - 1) for number in range(count)]
    populated = max(ranks - 1, 1) if spread == "last none" else ranks
    return [stream.randrange(populated) for _ in range(count)]


def _steps_of_groups(stream: random.Random, count: int, most_steps: int) -> list[list[int]]:
    """Steps of whole groups of one to four samples each, as many groups in each."""
    groups: list[list[int]] = []
    left = list(range(count))
    stream.shuffle(left)  # groups lie on any ranks
    while left:
        size = stream.randint(1, 4)
        groups.append(left[:size])
        left = left[size:]
    each = max(1, math.ceil(len(groups) / most_steps))
    steps = [groups[i : i + each] for i in range(0, len(groups), each)]
    return [[i for group in step for i in group] for step in steps] or [[]]
