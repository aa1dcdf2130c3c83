"""What each process of test_verl_micro_batches.py runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mcore_batching.integrations import local
from mcore_batching.integrations.verl import micro_batches

CASES: dict[str, tuple[list[list[int]], dict[str, Any]]] = {
    "one rank needs more": ([[60, 60, 60, 60], [10, 10, 10, 10]], {}),
    "groups of four": ([[60, 55, 58, 52, 51], [10, 10, 10, 10, 9]], {"num_batches_divided_by": 4}),
    "alone": ([[60, 60, 60], [10, 10, 10]], {"same_micro_num_in_dp": False}),
    "over the cap": ([[60, 101], [10, 10]], {}),
    "no sample": ([[60], []], {}),
    "batch cannot be read": ([[60, 5], [10, 10]], {}),
    "planning fails": ([[60, 5], [10, 10]], {}),
}
CAP = 100


def batch_of(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Rows of tokens, the sample's number each, beside its mask."""
    mask = torch.zeros(len(lengths), max(lengths, default=1), dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    return {"input_ids": mask * torch.arange(len(lengths))[:, None], "attention_mask": mask}


def rearrange_all(rank: int, size: int) -> dict[str, Any]:
    del size
    micro_batches._select = lambda batch, samples: {k: v[samples] for k, v in batch.items()}
    packing = local.pack_local
    report: dict[str, Any] = {}
    for case, (lengths, options) in CASES.items():
        if case == "planning fails" and rank:
            local.pack_local = lambda problem: 1 // 0
        batch = batch_of(lengths[rank])
        if case == "batch cannot be read" and rank:
            del batch["attention_mask"]
        try:
            _, report[case] = micro_batches.rearrange_micro_batches(
                None, batch, CAP, dist.group.WORLD, **options
            )
        except Exception as error:
            report[case] = f"{type(error).__name__}: {error}"
        local.pack_local = packing
    return report
