"""What each process of test_skyrl_iterator.py runs."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import Any

import torch
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


def iterate_all(rank: int, size: int) -> dict[str, Any]:
    del size
    report: dict[str, Any] = {}
    packing = local.pack_local
    with (
        tempfile.TemporaryDirectory() as folder,
        own_skyrl() if SOURCE else small_skyrl(Path(folder)),
        hook(),
    ):
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
    return report
