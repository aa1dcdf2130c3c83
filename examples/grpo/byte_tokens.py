"""Text as bytes: token ids 0-255 are bytes, three more mark beginning, end and padding.

    prompt "1+1=", response "2"    tokens ^ 1 + 1 = 2 $    response_length 2

(``^`` begin mark, ``$`` end mark).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from rollouts import Rollout
from torch import Tensor

BEGIN, END, PADDING = 256, 257, 258
VOCABULARY = 320
"""Entries of the embedding: 259 in use, padded to a multiple of 64 so that tensor-parallel ranks
share them evenly."""


@dataclasses.dataclass(frozen=True)
class TokenizedRollout:
    """One sample as tokens.

    Attributes:
        tokens: int64 ``[total_length]``: begin mark, prompt, response, end mark.
        response_length: tokens after the prompt, the end mark included.
        loss_mask: float32 ``[response_length]``; 0 where the environment wrote.
    """

    tokens: Tensor
    response_length: int
    loss_mask: Tensor


def encode(rollout: Rollout) -> TokenizedRollout:
    """Tokens of a rollout.

    The end mark is trained unless the environment had the last word.
    """
    prompt = rollout.prompt.encode()
    response = rollout.response.encode()
    mask = torch.ones(len(response) + 1)
    for start, end in rollout.environment_spans:
        first = len(rollout.response[:start].encode())
        last = len(rollout.response[:end].encode())
        mask[first:last] = 0.0
        if last == len(response):
            mask[last] = 0.0
    return TokenizedRollout(
        tokens=torch.tensor([BEGIN, *prompt, *response, END]),
        response_length=len(response) + 1,
        loss_mask=mask,
    )


def text_of(tokens: Sequence[int]) -> str:
    """Text of any tokens; what is no byte, or not UTF-8, becomes U+FFFD."""
    # 0xFF is a byte that UTF-8 never has.
    return bytes(min(token, 0xFF) for token in tokens).decode(errors="replace")
