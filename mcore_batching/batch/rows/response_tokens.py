"""Response tokens of a packed row: the position that predicts each, and its loss weight.

    position            0 1 2 3 | 4 5          offsets 0 4 6
    tokens              p a b . | c d          a b c d are the response tokens
    predicted_positions           0  1 -1  4   a at p, b at a, d at c
    loss_masks                    1  1  0  1   c has no predecessor: it weighs nothing

Response token j of a sample with p prompt tokens is predicted at the sample's position p - 1 + j,
in its host's segment where it has none of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.rows.row_layout import Row


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ResponseTokens:
    """The R response tokens of a row, sample after sample.

    Attributes:
        loss_masks: float32 ``[R]``, loss weights; the same on all context-parallel ranks.
        owned: bool ``[R]``, True for tokens predicted at a position of this rank's slice.
        owned_indices: int64 ``[owned]``, where `owned` is True.
        owned_positions: int64 ``[owned]``, positions of the slice that predict them.
    """

    loss_masks: Tensor
    owned: Tensor
    owned_indices: Tensor
    owned_positions: Tensor


def predicted_positions(
    starts: Sequence[int], total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> Tensor:
    """Position in the full row that predicts each response token, int64 ``[R]`` on the host; -1
    where none does. `starts` are of each sample's segment, or of its host's.

        predicted_positions([0, 4], [3, 2], [2, 2])    [0 1 -1 4]
    """
    pieces = []
    for start, total, response in zip(starts, total_lengths, response_lengths, strict=True):
        first = start + total - response - 1
        pieces.append(torch.arange(first, first + response, device="cpu"))
        if response == total:  # no prompt: the first token has no predecessor
            pieces[-1][:1] = -1
    return torch.cat(pieces)


def loss_masks(fields: Mapping[str, list[Any]], is_placeholder: bool) -> Tensor:
    """float32 ``[R]`` on the device of the first tokens: all ones if ``loss_masks`` is absent, 0 in
    placeholders and padding samples."""
    given, padding = fields.get("loss_masks"), fields.get("is_padding")
    device = fields["tokens"][0].device
    masks = []
    for i, response in enumerate(fields["response_lengths"]):
        if is_placeholder or (padding is not None and padding[i]):
            masks.append(torch.zeros(response, device=device))
        else:
            masks.append(torch.ones(response, device=device) if given is None else given[i])
    return torch.cat([mask.to(device, torch.float32) for mask in masks])


def response_tokens(weights: Tensor, predicted_at: Tensor, row: Row) -> ResponseTokens:
    """The response tokens as the row's context-parallel rank sees them; `weights` are `loss_masks`,
    0 where nothing predicts the token."""
    held = row.positions()
    # Place of each position in this rank's slice; -1 of others', and of the one behind the row, at
    # which the -1 of tokens that nothing predicts are looked up.
    places = torch.full((row.num_tokens + 1,), -1, device="cpu")
    places[held] = torch.arange(len(held), device="cpu")
    local = places[predicted_at]
    owned = local >= 0
    device = weights.device
    return ResponseTokens(
        loss_masks=weights,
        owned=owned.to(device),
        owned_indices=owned.nonzero().squeeze(1).to(device),
        owned_positions=local[owned].to(device),
    )
