"""Training, validation and test samples, by ``--split``, without those that are too long.

Every file is cut at the same shares, in its own order, as Megatron cuts its files; the held-out
part follows from the files and ``--split`` alone. A sample that is too long is refused, or left out
and counted; never cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.utils import Split

from mcore_batching.integrations.megatron_lm.sft.dataset import Indices, TokenizedLines
from mcore_batching.integrations.megatron_lm.sft.errors import SftDataError
from mcore_batching.integrations.megatron_lm.sft.jsonl import JsonLines
from mcore_batching.megatron.job.arguments import PREFIX

DEFAULT_SPLIT = "969, 30, 1"
"""Megatron's own default."""


def split_records(lines: JsonLines, split: str | None) -> list[Indices | None]:
    """Records for training, validation and test; None for a share of 0.

    Args:
        lines: the records.
        split: as ``--split`` spells it; None: `DEFAULT_SPLIT`.

    Raises:
        SftDataError: ``split`` cannot be read.
    """
    split = split or DEFAULT_SPLIT
    try:
        with np.errstate(invalid="ignore"):
            vector = parse_and_normalize_split(split)
        valid = bool(np.isfinite(vector).all())
    except (AssertionError, ValueError):
        valid = False
    if not valid:
        raise SftDataError(
            f"--split must give one to three shares of 0 or more, as in '{DEFAULT_SPLIT}', got "
            f"{split!r}"
        )
    files = [lines.records_of_file(file) for file in range(len(lines.paths))]
    return [
        None if share is None else np.concatenate([_cut(records, *share) for records in files])
        for share in convert_split_vector_to_split_matrix(vector)
    ]


def _cut(records: range, start: float, end: float) -> Indices:
    first, last = (records.start + round(bound * len(records)) for bound in (start, end))
    return np.arange(first, last, dtype=np.int64)


def without_too_long(
    samples: TokenizedLines, shares: Sequence[Indices | None], max_length: int, on_too_long: str
) -> list[Indices | None]:
    """The members of each share that are not too long.

    Args:
        samples: of all files.
        shares: as `split_records` returns them; None stays None.
        max_length: of a sample in next-token prediction, one less than its tokens.
        on_too_long: ``"error"`` or ``"drop"``.

    Raises:
        SftDataError: a share has no member, or, unless they are to be dropped, some are too long.
    """
    fitting: list[Indices | None] = []
    too_long: list[tuple[int, int]] = []
    for split, share in zip(Split, shares, strict=True):
        if share is None:
            fitting.append(None)
            continue
        lengths = np.array([len(samples[int(index)].ids) - 1 for index in share], np.int64)
        too_long += zip(share[lengths > max_length], lengths[lengths > max_length], strict=True)
        short = share[lengths <= max_length]
        fitting.append(short)
        if not len(share):
            raise SftDataError(
                f"--split leaves no record of {', '.join(samples.lines.paths)} for the "
                f"{split.name} dataset, of which samples are to be drawn: raise its share, or "
                "set it to 0"
            )
        if on_too_long == "drop" and not len(short):
            raise SftDataError(
                f"all {len(share)} samples of the {split.name} dataset are longer than "
                f"--seq-length {max_length} (the shortest: {min(lengths)}): raise --seq-length"
            )
    if too_long:
        index, length = max(too_long, key=lambda each: each[1])
        found = (
            f"{len(too_long)} of {sum(len(share) for share in shares if share is not None)} "
            f"samples are longer than --seq-length {max_length}; the longest, here, has length "
            f"{length}"
        )
        if on_too_long == "error":
            raise samples.lines.error(
                int(index),
                f"{found}: raise --seq-length, or leave such samples out with "
                f"{PREFIX}on-too-long drop",
            )
        if is_first_process():
            print(f"{samples.lines.error(int(index), found)}: left out", flush=True)
    return fitting


def is_first_process() -> bool:
    """True on the one process that prints."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
