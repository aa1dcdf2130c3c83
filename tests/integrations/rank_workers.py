"""What each process of `test_verl` and of `test_skyrl_iterator` runs."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from frameworks import CHECKOUTS, WORKERS, own, small

from mcore_batching.integrations import local
from mcore_batching.integrations.skyrl import hook
from mcore_batching.integrations.verl import micro_batches

CAP = 100
Cases = dict[str, tuple[list[list[int]], dict[str, Any]]]
"""By name: the lengths of each rank's samples, and verl's options."""
SKYRL: Cases = {
    "one rank needs more": ([[60, 60, 60, 60], [10, 10, 10, 10]], {}),
    "fewer samples": ([[60, 60, 60], [10]], {}),
    "planning fails": ([[60, 5], [10, 10]], {}),
}
VERL: Cases = {
    "one rank needs more": SKYRL["one rank needs more"],
    "groups of four": ([[60, 55, 58, 52, 51], [10, 10, 10, 10, 9]], {"num_batches_divided_by": 4}),
    "alone": ([[60, 60, 60], [10, 10, 10]], {"same_micro_num_in_dp": False}),
    "over the cap": ([[60, 101], [10, 10]], {}),
    "no sample": ([[60], []], {}),
    "batch cannot be read": ([[60, 5], [10, 10]], {}),
    "planning fails": SKYRL["planning fails"],
}


def batch_of(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Rows of tokens, the sample's number each, beside its mask."""
    mask = torch.zeros(len(lengths), max(lengths, default=1), dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    mask_of = {"attention_mask": mask}
    numbers = mask * torch.arange(len(lengths))[:, None]
    return mask_of | {"input_ids": numbers, "sequences": numbers}  # verl's name, SkyRL's


def rearrange_all(rank: int, size: int) -> dict[str, Any]:
    del size
    micro_batches._select = lambda batch, samples: {k: v[samples] for k, v in batch.items()}

    def run(batch: Any, options: Mapping[str, Any]) -> Any:
        group = dist.group.WORLD
        return micro_batches.rearrange_micro_batches(None, batch, CAP, group, **options)[1]

    return _reports(VERL, rank, run)


def iterate_all(rank: int, size: int) -> dict[str, Any]:
    del size
    has_own = os.environ.get(CHECKOUTS["skyrl"].variable)
    with (
        tempfile.TemporaryDirectory() as folder,
        own("skyrl") if has_own else small(Path(folder), "skyrl"),
        hook(),
    ):
        workers = importlib.import_module(f"{WORKERS}.worker_utils")

        def run(batch: Any, options: Mapping[str, Any]) -> Any:
            made = workers.get_microbatch_iterator(batch, 1, CAP, **options)
            return made._microbatches, made._num_padding_microbatches, len(made)

        return _reports(SKYRL, rank, run)


def _reports(cases: Cases, rank: int, run: Callable[[Any, Mapping[str, Any]], Any]) -> Any:
    """What each case came to on this rank, an error as its text; the last rank is at fault."""
    packing, report = local.pack_local, {}
    for case, (lengths, options) in cases.items():
        batch = batch_of(lengths[rank])
        if case == "planning fails" and rank:
            local.pack_local = lambda problem: 1 // 0
        if case == "batch cannot be read" and rank:
            del batch["attention_mask"]
        try:
            report[case] = run(batch, options)
        except Exception as error:
            report[case] = f"{type(error).__name__}: {error}"
        local.pack_local = packing
    return report
