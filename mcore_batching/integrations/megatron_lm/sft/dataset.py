"""A dataset of fine-tuning samples for Megatron's data loaders.

Item i is the same sample in every process and run with the same seed, files and tokenizer, however
many samples are drawn, so a resumed job continues with the right sample. No sample is cut off.
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

from mcore_batching.integrations.megatron_lm.sft.records import (
    SftDataError,
    parse_record,
    records_of,
)
from mcore_batching.integrations.megatron_lm.sft.tokenization import SampleTokenizer, SampleTokens


def read_samples(path: str, tokenizer: SampleTokenizer) -> dict[int, SampleTokens]:
    """The samples of a JSON-lines file as tokens, by line number, which a `SftDataError` names."""
    samples = {}
    for line, record in records_of(path):
        try:
            samples[line] = tokenizer(parse_record(record))
        except SftDataError as error:
            # The cause alone: otherwise the same line is printed twice, once without its number.
            raise SftDataError(str(error), path, line) from error.__cause__
    return samples


class UnpaddedSample(dict[str, Tensor]):
    """A sample of any length; a micro-batch of them holds lists, where plain dicts are stacked."""


def collate(
    samples: Sequence[Mapping[str, Tensor]], *, collate_fn_map: Any = None
) -> dict[str, list[Tensor]]:
    """A micro-batch of samples of any length: a list of tensors for each key.

    PyTorch's default collation calls it for samples of an unpadded `SftDataset`, so that a data
    loader needs no ``collate_fn``. With another one, give it this function.
    """
    del collate_fn_map  # PyTorch's
    return {key: [sample[key] for sample in samples] for key in samples[0]}


default_collate_fn_map[UnpaddedSample] = collate


class SftDataset(Dataset[Mapping[str, Tensor]]):
    """Samples for next-token prediction, epoch after epoch, each of which holds every sample once.

    An item is a dict of ``tokens``, ``labels`` (the token that follows) and ``position_ids``, int64
    ``[length]``, and ``loss_mask``, float32 ``[length]``, 1 where the label is trained. The prompt
    "ab" with the completion "c", as bytes with the end mark 256:

        tokens        97  98  99
        labels        98  99 256
        loss_mask      0   1   1
        position_ids   0   1   2

    Args:
        samples: at least one; none longer than ``pad_to``.
        split: training, validation or test.
        num_samples: how many are drawn, over all epochs; None: each once.
        seed: of the epochs' orders, 0 or more; None: in the order of ``samples``.
        pad_to: pad every item to so many tokens, with loss mask 0; None: no padding.
        attention_mask: give padded items a causal ``attention_mask``, bool ``[1, pad_to, pad_to]``,
            True where no attention is paid, as ``--create-attention-mask-in-dataloader`` does.
    """

    def __init__(
        self,
        samples: Sequence[SampleTokens],
        *,
        split: Split,
        num_samples: int | None = None,
        seed: int | None = None,
        pad_to: int | None = None,
        attention_mask: bool = False,
    ) -> None:
        self.split = split  # read by Megatron's data loaders
        self._samples = samples
        self._order = _order(len(samples), num_samples, seed)
        self._pad_to = pad_to
        self._attention_mask = attention_mask

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        sample = self._samples[self._order[index]]
        ids = torch.from_numpy(sample.ids).long()
        trained = torch.from_numpy(sample.trained).float()
        padding = 0 if self._pad_to is None else self._pad_to - sample.length
        last = int(ids[-1])
        item = {
            # Any id pads: it has loss mask 0, and causal attention hides it from real tokens.
            "tokens": torch.nn.functional.pad(ids[:-1], (0, padding), value=last),
            "labels": torch.nn.functional.pad(ids[1:], (0, padding), value=last),
            # The token at position i predicts the one at i + 1, so that one's mask stands at i.
            "loss_mask": torch.nn.functional.pad(trained[1:], (0, padding)),
            "position_ids": torch.arange(sample.length + padding),
        }
        if self._pad_to is None:
            return UnpaddedSample(item)
        if self._attention_mask:
            item["attention_mask"] = ~torch.ones(1, self._pad_to, self._pad_to).tril().bool()
        return item


def _order(count: int, num_samples: int | None, seed: int | None) -> Any:
    """The sample that each index draws, int64 [num_samples]."""
    num_samples = count if num_samples is None else num_samples
    # Evaluation sees the same samples every time.
    if seed is None:
        return np.arange(num_samples) % count
    # numpy promises that RandomState draws the same in every version.
    epochs = range(-(-num_samples // count))
    drawn = [np.random.RandomState([seed, epoch]).permutation(count) for epoch in epochs]
    return np.concatenate([np.arange(0), *drawn])[:num_samples]
