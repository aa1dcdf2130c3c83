"""What a packed row knows of its response tokens: where each is predicted, and its loss weight.

    samples of 3 and 2 tokens, responses 2 and 2, offsets 0 4 6, masks 1 1 | 1 1
    predicted_at   0  1 | -1  4
    loss_masks     1  1 |  0  1

Guarantees
- Response token j of a sample with p prompt tokens is predicted at position p - 1 + j of the
  sample. With p = 0 the first token has no predecessor: it is predicted nowhere and weighs nothing.
- A token of a placeholder or of a padding sample (field ``is_padding``) weighs nothing.
- The loss and the row's own mask have their weights from here, made once a micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.errors import SchemaError
from mcore_batching.batch.zigzag import locate


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ResponseTokens:
    """The R response tokens of a row, sample behind sample.

    Attributes:
        loss_masks: float32 ``[R]``, the loss weight of each; the same on all context-parallel
            ranks.
        owned: bool ``[R]``, whether a token is predicted at a position of this rank's slice.
        owned_indices: int64 ``[owned]``, which of the R those are.
        owned_positions: int64 ``[owned]``, at which positions of the slice.
    """

    loss_masks: Tensor
    owned: Tensor
    owned_indices: Tensor
    owned_positions: Tensor


def predicted_positions(
    offsets: Sequence[int], total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> Tensor:
    """int64 ``[R]`` on the host: where in the full row each response token is predicted, or -1.

    Args:
        offsets: where each sample starts; further entries are not read.
        total_lengths: tokens of each sample.
        response_lengths: tokens of each sample's response.
    """
    pieces = []
    for start, total, response in zip(offsets, total_lengths, response_lengths, strict=False):
        first = start + total - response - 1
        pieces.append(torch.arange(first, first + response, device="cpu"))
        if response == total:
            pieces[-1][:1] = -1
    return torch.cat(pieces)


def loss_masks(
    fields: Mapping[str, list[Any]],
    response_lengths: Sequence[int],
    predicted_at: Tensor,
    *,
    is_placeholder: bool,
    device: torch.device,
) -> Tensor:
    """float32 ``[R]``, the loss weight of each response token.

    Args:
        fields: one value a sample; ``loss_masks`` are all ones if absent.
        response_lengths: tokens of each sample's response.
        predicted_at: from `predicted_positions`.
        is_placeholder: the row is fabricated.
        device: where the weights go.

    Raises:
        SchemaError: a mask is not one number a response token.
    """
    given, padding = fields.get("loss_masks"), fields.get("is_padding")
    masks = []
    for i, response in enumerate(response_lengths):
        if is_placeholder or (padding is not None and bool(padding[i])):
            masks.append(torch.zeros(response, dtype=torch.float32, device=device))
        elif given is None:
            masks.append(torch.ones(response, dtype=torch.float32, device=device))
        else:
            mask = torch.as_tensor(given[i], device=device).to(torch.float32)
            if mask.shape != (response,):
                raise SchemaError(
                    "loss_masks",
                    sample_index=i,
                    expected=f"shape [{response}], one number a response token",
                    found=f"shape {list(mask.shape)}",
                )
            masks.append(mask)
    return torch.cat(masks).masked_fill_(predicted_at.to(device) < 0, 0.0)


def response_tokens(
    weights: Tensor,
    predicted_at: Tensor,
    offsets: Sequence[int],
    *,
    context_parallel_size: int,
    context_parallel_rank: int,
) -> ResponseTokens:
    """What a context-parallel rank needs to know of the response tokens of its row.

    Args:
        weights: from `loss_masks`.
        predicted_at: from `predicted_positions`.
        offsets: ``[segments + 1]`` of the full row.
        context_parallel_size: ranks that share the row.
        context_parallel_rank: this rank among them.
    """
    rank, local = locate(predicted_at.clamp(min=0), offsets, context_parallel_size)
    owned = (predicted_at >= 0) & (rank == context_parallel_rank)
    device = weights.device
    return ResponseTokens(
        loss_masks=weights,
        owned=owned.to(device),
        owned_indices=owned.nonzero().squeeze(1).to(device),
        owned_positions=local[owned].to(device),
    )
