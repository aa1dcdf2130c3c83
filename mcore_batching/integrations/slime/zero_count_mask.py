"""An empty loss mask that adds 0 to a count of tokens, even where each sample counts at least 1.

Frameworks' loss functions clamp a sample's token count to 1, against a division by 0, and then sum
these counts for a token mean. The clamp would count a placeholder as one token:

    mask = zero_count_mask(torch.zeros(0, dtype=torch.int32))
    count = torch.clamp_min(mask.sum(), 1)
    0 + count         # 0: a placeholder adds nothing to a sum of counts
    numerator / count # the numerator, as if the count were 1

All other operations on the mask and its sum behave as on a plain empty mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch import SchemaError

_SUMS = (Tensor.sum, torch.sum)
_CLAMPS = (torch.clamp_min, torch.clamp, Tensor.clamp_min, Tensor.clamp)
_DIVISIONS = (Tensor.div, Tensor.true_divide, torch.div, torch.true_divide)


def zero_count_mask(mask: Tensor) -> Tensor:
    """The ``[0]`` mask of an empty response, with a sum that stays 0 when clamped to 1."""
    if mask.numel():
        raise SchemaError(
            "loss_masks",
            expected="the empty mask of a placeholder",
            found=f"one of shape {list(mask.shape)}",
        )
    return mask.as_subclass(_ZeroCount)


class _ZeroCount(Tensor):
    """An empty mask, or its sum: a 0 that a clamp leaves unchanged, and that divides like 1."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # A mask has one dimension, its sum none.
        with torch._C.DisableTorchFunctionSubclass():
            if func in _CLAMPS and isinstance(args[0], cls) and not args[0].dim():
                return args[0]
            if func in _DIVISIONS and isinstance(args[1], cls) and not args[1].dim():
                args = (args[0], 1)
            result = func(*args, **(kwargs or {}))
        # Of the sum a further sum is plain: it is what other samples' counts were added to.
        is_sum = func in _SUMS and isinstance(args[0], cls) and args[0].dim() and not result.dim()
        return result.as_subclass(cls) if is_sum else result
