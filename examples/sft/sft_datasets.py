"""Padded datasets of `json_lines` for Megatron's data loaders, from files of ``--data-path``.

Item i is the same sample in every run with the same seed, files and tokenizer, however many are
drawn, so that a resumed job goes on with the right one. Lines longer than ``--seq-length`` are left
out, and counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from json_lines import DataError, Sample, read_samples
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers import MegatronTokenizer
from torch import Tensor
from torch.utils.data import Dataset


class SftDataset(Dataset[Mapping[str, Tensor]]):
    """Samples for next-token prediction, by ``order``: the number of the sample of each item.

    An item is a dict of ``tokens``, ``labels`` (the token that follows) and ``position_ids``, int64
    ``[length]``, and ``loss_mask``, float32, 1 where the label is trained. The prompt "ab" with the
    completion "c", as bytes with the end token 256:

        tokens     97 98  99 256        labels     98 99 256 256        loss_mask  0  1  1  0
    """

    def __init__(
        self, samples: Sequence[Sample], split: Split, order: np.ndarray, length: int
    ) -> None:
        self.split = split  # read by Megatron's data loaders
        self._samples, self._order, self._length = samples, order, length

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        sample = self._samples[self._order[index]]
        ids = torch.from_numpy(sample.ids).long()
        # Any id pads: it is not trained, and attention is causal.
        missing = (0, self._length + 1 - len(ids))
        ids = torch.nn.functional.pad(ids, missing, value=int(ids[-1]))
        trained = torch.nn.functional.pad(torch.from_numpy(sample.trained).float(), missing)
        return {
            "tokens": ids[:-1],
            "labels": ids[1:],
            "loss_mask": trained[1:],
            "position_ids": torch.arange(self._length),
        }


def build_datasets(args: Any, tokenizer: Any, num_samples: Sequence[int]) -> list[Any]:
    """Datasets for training, validation and tests; None for one of 0 samples, and for tests with
    a share of 0.

    Each file is cut at the shares of ``--split``, as Megatron cuts its own.

    Raises:
        DataError: a line cannot be trained on, or a share has no sample.
    """
    shares = convert_split_vector_to_split_matrix(parse_and_normalize_split(args.split))
    parts: list[list[Sample]] = [[] for _ in shares]
    for path in args.data_path or ():
        samples = read_samples(path, tokenizer)
        fitting = [each for each in samples if len(each.ids) <= args.seq_length + 1]
        if left := len(samples) - len(fitting):
            print(f"{path}: {left} of {len(samples)} lines are longer than --seq-length: left out")
        for part, share in zip(parts, shares, strict=True):
            start, end = share or (0, 0)
            part += fitting[round(start * len(fitting)) : round(end * len(fitting))]
    made: list[Any] = []
    for split, part, share, number in zip(Split, parts, shares, num_samples, strict=True):
        if share is None and split is Split.test:  # Megatron then leaves the test out
            number = 0
        if number and not part:
            raise DataError(
                f"no line is left for the {split.name} dataset: raise its share of --split, or set "
                "--eval-iters 0"
            )
        if not number:
            order = None
        elif split is Split.train:
            order = drawn(len(part), number, args.seed)
        else:
            # An evaluation goes on where the last one stopped, and takes as many items as the test:
            # each begins with the first sample again.
            order = np.arange(number) % num_samples[Split.test.value] % len(part)
        made.append(None if order is None else SftDataset(part, split, order, args.seq_length))
    return made


def drawn(count: int, number: int, seed: int) -> np.ndarray:
    """Sample of each of so many items: epoch after epoch, each in an order of its own."""
    # numpy promises that RandomState draws the same in every version.
    epochs = [
        np.random.RandomState([seed, epoch]).permutation(count)
        for epoch in range(-(-number // count))
    ]
    return np.concatenate(epochs)[:number]


def byte_level_tokenizer() -> Any:
    """megatron.core's byte-level tokenizer, for which ``--tokenizer-type`` has no name: ids 0 to
    255 are bytes of UTF-8 text, 256 is the end token, 257 padding."""
    return MegatronTokenizer.from_pretrained(
        metadata_path={"library": "byte-level"},
        # Special tokens get ids from 256 on, in reverse order: <end> 256, <pad> 257.
        vocab_size=256,
        special_tokens=["<pad>", "<end>"],
        _eos_id=256,
        _pad_id=257,
    )
