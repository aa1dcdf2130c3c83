"""What each process of test_skyrl_iterator.py runs."""

from __future__ import annotations

import datetime
import importlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from skyrl_package import SOURCE, WORKERS, own_skyrl, small_skyrl

from mcore_batching.integrations import local
from mcore_batching.integrations.skyrl import hook

CASES = {
    "one rank needs more": [[60, 60, 60, 60], [10, 10, 10, 10]],
    "fewer samples": [[60, 60, 60], [10]],
    "planning fails": [[60, 5], [10, 10]],
}
CAP = 100


def batch_of(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Rows of tokens, the sample's number each, beside its mask."""
    mask = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    return {"sequences": mask * torch.arange(len(lengths))[:, None], "attention_mask": mask}


def iterate_all(rank: int, size: int, store: str, results: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    report: dict[str, Any] = {}
    packing = local.pack_local
    with own_skyrl() if SOURCE else small_skyrl(Path(f"{results}.{rank}.skyrl")), hook():
        workers = importlib.import_module(f"{WORKERS}.worker_utils")
        for case, lengths in CASES.items():
            if case == "planning fails" and rank:
                local.pack_local = lambda problem: 1 // 0  # type: ignore[assignment]
            try:
                made = workers.get_microbatch_iterator(batch_of(lengths[rank]), 1, CAP)
                report[case] = made._microbatches, made._num_padding_microbatches, len(made)
            except Exception as error:
                report[case] = f"{type(error).__name__}: {error}"
            local.pack_local = packing
    torch.save(report, f"{results}.{rank}")
    dist.destroy_process_group()
