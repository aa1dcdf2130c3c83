"""A loss mask that counts as no token where code counts at least one token a sample.

Loss functions in the field clamp a sample's number of tokens to 1, so that nothing is divided by 0,
and then add the clamped numbers up to the denominator of a token mean. A placeholder has no token,
and the clamp makes it one.

    mask = uncounted(torch.zeros(0, dtype=torch.int32))
    count = torch.clamp_min(mask.sum(), 1)
    0 + count         # 0: a placeholder adds nothing to a sum of counts
    numerator / count # the numerator, as if the count were 1

Guarantees
- Whatever else is done with the mask or its sum gives what a plain empty mask gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_SUMS = (Tensor.sum, torch.sum)
_CLAMPS = (torch.clamp_min, torch.clamp, Tensor.clamp_min, Tensor.clamp)
_DIVISIONS = (Tensor.div, Tensor.true_divide, torch.div, torch.true_divide)


def uncounted(mask: Tensor) -> Tensor:
    """The mask with a sum that no clamp turns into a token.

    Args:
        mask: ``[0]``, the loss mask of an empty response.

    Raises:
        ValueError: the mask is of some token.
    """
    if mask.numel():
        raise ValueError(
            f"expected the loss mask of an empty response, got one of shape {list(mask.shape)}: "
            "only a placeholder's tokens go uncounted"
        )
    return mask.as_subclass(_EmptyMask)


class _EmptyMask(Tensor):
    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(_NoTokens) if func in _SUMS and not result.dim() else result


class _NoTokens(Tensor):
    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        if func in _CLAMPS and isinstance(args[0], cls):
            return args[0]
        if func in _DIVISIONS and isinstance(args[1], cls):
            args = (args[0], 1, *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
