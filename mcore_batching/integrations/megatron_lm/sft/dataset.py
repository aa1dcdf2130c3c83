"""A dataset of supervised fine-tuning samples for Megatron's data loaders.

Index i is the same sample in every process and run with the same seed, files and tokenizer, however
many samples are drawn, so a resumed job continues with the right sample. Each epoch holds every
sample once, in its own order. No sample is cut off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.utils import Split
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.data._utils.collate import default_collate_fn_map

from mcore_batching.integrations.megatron_lm.sft.conversations import parse_record
from mcore_batching.integrations.megatron_lm.sft.jsonl import JsonLines, SftDataError
from mcore_batching.integrations.megatron_lm.sft.tokenization import (
    SampleTokenizer,
    SampleTokens,
)

Indices = np.ndarray[Any, np.dtype[np.int64]]
"""Of records: the first one of the first file is 0."""


class TokenizedLines:
    """The samples of some JSON-lines files as tokens, tokenized each time they are asked for.

    Args:
        lines: the records.
        tokenizer: writes them.
    """

    def __init__(self, lines: JsonLines, tokenizer: SampleTokenizer) -> None:
        self.lines = lines
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> SampleTokens:
        """Tokens of one record.

        Raises:
            SftDataError: naming the file and the line.
        """
        try:
            return self.tokenizer(parse_record(self.lines[index]))
        except SftDataError as error:
            raise self.lines.error(index, str(error)) from error


class UnpaddedSample(dict[str, Tensor]):
    """A sample of any length; a micro-batch of them holds lists, where plain dicts are stacked."""


def collate(
    samples: Sequence[Mapping[str, Tensor]], *, collate_fn_map: Any = None
) -> dict[str, list[Tensor]]:
    """A micro-batch of samples of any length: a list of tensors for each key.

    PyTorch's default collation calls it for samples of an unpadded `SftDataset`, so that a data
    loader needs no ``collate_fn``. With another one, give it this function.

    Args:
        samples: as an `SftDataset` gives them.
        collate_fn_map: PyTorch's, unused.
    """
    del collate_fn_map
    return {key: [sample[key] for sample in samples] for key in samples[0]}


default_collate_fn_map[UnpaddedSample] = collate


class SftDataset(Dataset[Mapping[str, Tensor]]):
    """Samples for next-token prediction, epoch after epoch.

    An item is a dict of ``tokens``, ``labels`` (the token that follows) and ``position_ids``, int64
    ``[length]``, and ``loss_mask``, float32 ``[length]``, 1 where the label is trained. A sample of
    n tokens has length n - 1. Memory: 8 bytes for every sample drawn. The prompt "ab" with the
    completion "c", as bytes with the end mark 256:

        tokens        97  98  99
        labels        98  99 256
        loss_mask      0   1   1
        position_ids   0   1   2

    Args:
        samples: all samples of the files.
        members: indices into ``samples`` that are in this dataset, at least one; none longer than
            ``pad_to``.
        split: training, validation or test.
        num_samples: how many are drawn, over all epochs; None: each member once.
        seed: of the epochs' orders, 0 or more; None: in the order of ``members``.
        pad_to: pad every item to this length, in tokens, with loss mask 0; None: no padding.
        attention_mask: give padded items a causal ``attention_mask``, bool ``[1, pad_to, pad_to]``,
            True where no attention is paid, as stock datasets do with
            ``--create-attention-mask-in-dataloader``.

    Attributes:
        split: read by Megatron's data loaders.
    """

    def __init__(
        self,
        samples: TokenizedLines,
        members: Indices,
        *,
        split: Split,
        num_samples: int | None = None,
        seed: int | None = None,
        pad_to: int | None = None,
        attention_mask: bool = False,
    ) -> None:
        self.split = split
        self._samples = samples
        self._order = _order(members, num_samples, seed)
        self._pad_to = pad_to
        self._attention_mask = attention_mask

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        """The sample drawn as number ``index``."""
        sample = self._samples[int(self._order[index])]
        ids = torch.tensor(sample.ids)
        trained = torch.tensor(sample.trained, dtype=torch.float32)
        length = len(ids) - 1
        padding = 0 if self._pad_to is None else self._pad_to - length
        item = {
            # Any id pads: it has loss mask 0, and causal attention hides it from real tokens.
            "tokens": torch.nn.functional.pad(ids[:-1], (0, padding), value=sample.ids[-1]),
            "labels": torch.nn.functional.pad(ids[1:], (0, padding), value=sample.ids[-1]),
            "loss_mask": torch.nn.functional.pad(trained[1:], (0, padding)),
            "position_ids": torch.arange(length + padding),
        }
        if self._pad_to is None:
            return UnpaddedSample(item)
        if self._attention_mask:
            item["attention_mask"] = ~torch.ones(1, self._pad_to, self._pad_to).tril().bool()
        return item


def _order(members: Indices, num_samples: int | None, seed: int | None) -> Indices:
    """The member drawn at each index."""
    num_samples = len(members) if num_samples is None else num_samples
    epochs = range(-(-num_samples // len(members)))
    if seed is None:
        drawn = [members for _ in epochs]
    else:
        # numpy promises that RandomState draws the same in every version.
        drawn = [np.random.RandomState([seed, epoch]).permutation(members) for epoch in epochs]
    return np.concatenate([members[:0], *drawn])[:num_samples]
