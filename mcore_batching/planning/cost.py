"""What a micro-batch costs to run.

The unit is the forward work of one token outside attention. Measured models differ by machine; the
defaults are a 7B-class dense model's shape: attention reaches the rest's cost at 24576 tokens, and
starting a micro-batch costs as much as 256 tokens.

Guarantees: the same numbers on every platform and Python version, because only IEEE `+` and `*` in
a fixed order are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mcore_batching.planning.errors import ConfigError
from mcore_batching.planning.sums import ordered_sum


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Forward cost of samples and micro-batches, in token units.

    Raises:
        ConfigError: a coefficient is negative, not finite, or no number.
    """

    linear: float = 1.0
    """Cost of a token."""
    quadratic: float = 1.0 / 24576.0
    """Cost of a pair of tokens of one sample: attention."""
    per_micro_batch: float = 256.0
    """Cost of a micro-batch, whatever it holds."""
    backward_ratio: float = 2.0
    """Cost of a backward pass over that of its forward pass."""

    def __post_init__(self) -> None:
        """Check that each coefficient is a finite number of 0 or more."""
        for name in ("linear", "quadratic", "per_micro_batch", "backward_ratio"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f"{name} must be a number, got {value!r}")
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(
                    f"{name} must be finite and 0 or more, got {value}; set {name} accordingly"
                )
            object.__setattr__(self, name, float(value))

    def sample(self, length: int) -> float:
        """Forward cost of one sample of `length` tokens."""
        return self.linear * length + self.quadratic * (length * length)

    def micro_batch(self, lengths: Iterable[int]) -> float:
        """Forward cost of a micro-batch that holds samples of these lengths [samples], in
        tokens."""
        return self.per_micro_batch + ordered_sum(self.sample(length) for length in lengths)
