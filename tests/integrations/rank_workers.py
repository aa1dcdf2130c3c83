"""What each process of `test_verl` runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from mcore_batching.integrations import local
from mcore_batching.integrations.verl import micro_batches

CAP = 100
CASES: dict[str, tuple[list[list[int]], dict[str, Any]]] = {
    "one rank needs more": ([[60, 60, 60, 60], [10, 10, 10, 10]], {}),
    "groups of four": ([[60, 55, 58, 52, 51], [10, 10, 10, 10, 9]], {"num_batches_divided_by": 4}),
    "alone": ([[60, 60, 60], [10, 10, 10]], {"same_micro_num_in_dp": False}),
    "over the cap": ([[60, 101], [10, 10]], {}),
    "no sample": ([[60], []], {}),
    "batch cannot be read": ([[60, 5], [10, 10]], {}),
    "planning fails": ([[60, 5], [10, 10]], {}),
}
"""By name: the lengths of each rank's samples, and verl's options."""


def batch_of(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Rows of tokens, the sample's number each, beside its mask."""
    mask = torch.zeros(len(lengths), max(lengths, default=1), dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    numbers = mask * torch.arange(len(lengths))[:, None]
    # verl's name, SkyRL's
    return {"attention_mask": mask, "input_ids": numbers, "sequences": numbers}


def selected(batch: Mapping[str, torch.Tensor], samples: list[int]) -> dict[str, torch.Tensor]:
    """In place of verl's own, which takes a TensorDict."""
    return {name: values[samples] for name, values in batch.items()}


def rearrange_all(rank: int, size: int) -> dict[str, Any]:
    """What each case came to on this rank, an error as its text; the last rank is at fault."""
    micro_batches._select, packing, report = selected, local.pack_local, {}
    for case, (lengths, options) in CASES.items():
        batch, is_last = batch_of(lengths[rank]), rank == size - 1
        if case == "planning fails" and is_last:
            local.pack_local = lambda problem: 1 // 0
        if case == "batch cannot be read" and is_last:
            del batch["attention_mask"]
        try:
            made = micro_batches.rearrange_micro_batches(
                None, batch, CAP, dist.group.WORLD, **options
            )
            report[case] = made[1]
        except Exception as error:
            report[case] = f"{type(error).__name__}: {error}"
        local.pack_local = packing
    return report
