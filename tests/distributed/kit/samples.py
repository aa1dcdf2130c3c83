"""The samples of the tests, and how they lie on data-parallel ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

VOCABULARY = 64
CAP_TOKENS = 48
ALLOWED = VOCABULARY // 2
"""Entries that are not banned where the others are: under two tensor-parallel ranks all of one."""

# (total length, response length): responses of 0 tokens, of one, of the whole sample; a sample of
# a single token; one longer than the cap even with context parallelism over 4 ranks.
SHAPES = [
    (17, 9),
    (5, 0),
    (33, 33),
    (1, 0),
    (1, 1),
    (8, 1),
    (200, 150),
    (12, 7),
    (3, 2),
    (27, 20),
    (9, 4),
    (16, 15),
    (40, 12),
]

CHAINS = [[12, 9, 1, 8, 4], [0, 5, 3], [6, 2]]
"""Samples as the turns of trajectories, the last turn first: each begins the one before it."""


def rollout_of(
    lengths: Sequence[tuple[int, int]],
    vocabulary: int = VOCABULARY,
    generator: torch.Generator | None = None,
) -> dict[str, list[Any]]:
    """Random samples of these total and response lengths, with what the losses here read."""
    uniform = functools.partial(torch.rand, generator=generator, device="cpu")
    integers = functools.partial(torch.randint, generator=generator, device="cpu")
    return {
        "tokens": [integers(vocabulary, (total,)) for total, _ in lengths],
        "total_lengths": [total for total, _ in lengths],
        "response_lengths": [response for _, response in lengths],
        "rewards": [float(i % 3) for i in range(len(lengths))],
        "advantages": [uniform(response) - 0.3 for _, response in lengths],
        "rollout_log_probs": [-4.0 - uniform(response) for _, response in lengths],
        "ref_log_probs": [-4.0 - uniform(response) for _, response in lengths],
    }


def make_samples() -> dict[str, list[Any]]:
    """The same samples on every rank, as rollout data; those of `CHAINS` begin others."""
    generator = torch.Generator(device="cpu").manual_seed(20)
    made = rollout_of(SHAPES, generator=generator)
    for last, *others in CHAINS:
        for turn in others:
            made["tokens"][turn] = made["tokens"][last][: SHAPES[turn][0]].clone()
    made["loss_masks"] = [
        (torch.rand(response, generator=generator, device="cpu") > 0.2).int()
        for _, response in SHAPES
    ]
    return made


def share(samples: dict[str, list[Any]], spread: str, rank: int, ranks: int) -> list[int]:
    """Indices of the samples that a data-parallel rank holds: rank 0 all but one for each other,
    "fewer": but three; "empty": the last of several ranks has none."""
    count, each = len(samples["total_lengths"]), 3 if spread == "fewer" else 1
    populated = ranks - 1 if spread == "empty" and ranks > 1 else ranks
    first = count - each * (populated - 1)
    ends = [0, first, *range(first + each, count + 1, each)]
    return list(range(*ends[rank : rank + 2])) if rank < populated else []


def take(samples: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
    return {key: [values[i] for i in indices] for key, values in samples.items()}


def multimodal_positions(length: int) -> torch.Tensor:
    """``[3, length]``: those of time, height and width, as of an image in the text."""
    tokens = torch.arange(length)
    return torch.stack((tokens, tokens // 2, tokens % 5))
