"""Costs of samples and micro-batches; the unit is one token's forward work outside attention.

Measured models differ by machine; the defaults are the shape of a 7B dense model: attention costs
as much as all else at 24576 tokens, and starting a micro-batch as much as 256 tokens.

Costs are the same numbers on every platform and Python version: only IEEE `+` and `*` in a fixed
order are used, because two ranks that differ in the last bit could choose different plans.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import reduce
from operator import add

from mcore_batching.planning.errors import Argument, ConfigError
from mcore_batching.planning.integers import at_least
from mcore_batching.planning.json_text import parse_json


def ordered_sum(values: Iterable[float]) -> float:
    """The sum of `values`, added from first to last."""
    # The built-in `sum` compensates rounding from Python 3.12 on: ranks of two versions would
    # differ in the last bit, and so might their plans.
    return reduce(add, values, 0.0)


RIDGE_TOKENS = 256
"""Tokens that a GPU multiplies by a half-precision weight while it reads one: 153 on an A100, 206
on an H200, 281 on a B200, 295 on an H100, dense bfloat16 rate over bandwidth of their data sheets.
A micro-batch of fewer tokens takes no less time (Williams et al., "Roofline", 2009)."""
_ALSO_WRITTEN = {"seconds_per_unit"}
"""Keys that a job writes beside the coefficients."""
_NEWER = (
    "context_parallel_overhead",
    "context_parallel_fixed",
    "weight_share",
    "split_backward_overhead",
)
"""Coefficients added later; left out of the JSON at their defaults, as in older documents."""
_COEFFICIENTS = ("linear", "quadratic", "per_micro_batch", "backward_ratio", *_NEWER)
_MAX_COEFFICIENT = 1e100
"""Times the largest length squared and the most samples, a cost is still finite: 1e100 · 2^80 ·
10^6 < 1e308."""


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
    window: int | None = None
    """Tokens that each token attends to at most, itself included (a sliding window); None: all
    before it."""
    context_parallel_overhead: float = 0.1
    """Growth of a micro-batch's total work with each doubling of its context-parallel size, by
    exposed communication and smaller kernels. An assumption until a job measures it."""
    context_parallel_fixed: float = 64.0
    """Cost of each doubling whatever the micro-batch holds: latency of communication. A quarter of
    `per_micro_batch`, an assumption until a job measures it."""
    weight_share: float = 1.0
    """Cost of a micro-batch's weight gradients (W) over its forward cost outside attention, which
    has no weights: as many multiplications."""
    split_backward_overhead: float = 0.0
    """Growth of a backward pass whose W is left for later, by communication of tensor-parallel
    ranks that W would have hidden: 0.1 to 0.2 with tensor parallelism."""

    def __post_init__(self) -> None:
        """Check that each coefficient is a number of 0 to `_MAX_COEFFICIENT`."""
        for name in _COEFFICIENTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(Argument(name), f" must be a number, got {value!r}")
            try:
                number = float(value)
            except OverflowError:  # an integer of 400 digits
                number = math.inf
            if not (math.isfinite(number) and number >= 0):
                raise ConfigError(Argument(name), f" must be finite and 0 or more, got {number}")
            if number > _MAX_COEFFICIENT:
                raise ConfigError(
                    Argument(name),
                    f" must be {_MAX_COEFFICIENT:g} or less, got {number}; scale all costs down",
                )
            object.__setattr__(self, name, number)
        if self.window is not None:
            object.__setattr__(self, "window", at_least("window", self.window, 1, ConfigError))

    @classmethod
    def from_model(
        cls,
        *,
        hidden: int,
        ffn: int,
        layers: int,
        heads: int,
        groups: int | None = None,
        head_dim: int | None = None,
        vocab: int = 0,
        gated: bool = True,
        experts_per_token: int = 1,
        experts_held: int = 1,
        shared_ffn: int = 0,
        window: int | None = None,
        recompute: bool = False,
    ) -> CostModel:
        """The cost model of a transformer's shape, from its multiplications.

        Args:
            hidden: size of the residual stream.
            ffn: inner size of the feed-forward layer, of one expert with a mixture.
            layers: of the whole model.
            heads: query heads.
            groups: key-value heads; None: as many as query heads.
            head_dim: of each; None: hidden / heads.
            vocab: entries of the output layer.
            gated: whether the feed-forward layer has a gate (SwiGLU).
            experts_per_token: experts that a token is sent to.
            experts_held: experts of a layer whose weights a rank has.
            shared_ffn: inner size of experts that every token is sent to.
            window: most tokens that each token attends to; None: no bound.
            recompute: whether activations are computed anew before a backward pass.

        Raises:
            ConfigError: a size is out of range.
        """
        groups, dim = groups or heads, head_dim or hidden // max(heads, 1)
        sizes = {"hidden": hidden, "ffn": ffn, "layers": layers, "heads": heads, "groups": groups}
        sizes |= {"head_dim": dim, "experts_per_token": experts_per_token}
        least = dict.fromkeys([*sizes, "experts_held"], 1) | {"vocab": 0, "shared_ffn": 0}
        sizes |= {"experts_held": experts_held, "vocab": vocab, "shared_ffn": shared_ffn}
        for name, size in sizes.items():
            at_least(name, size, least[name], ConfigError)
        projections, of_ffn = hidden * dim * (2 * heads + 2 * groups), (3 if gated else 2) * hidden
        everywhere = layers * (projections + of_ffn * shared_ffn) + hidden * vocab
        of_experts = layers * of_ffn * ffn  # of one expert
        # A token costs 2 operations for each weight that it meets. A pair of tokens costs 2 for the
        # score and 2 for the sum, of each head's size, but half of the pairs are masked (Narayanan
        # et al. 2021, appendix, without the causal half). All relative to a token: 2s cancel.
        weights = everywhere + experts_per_token * of_experts
        pairs = 2 * layers * heads * dim
        return cls(
            linear=1.0,
            quadratic=0.5 * pairs / weights,
            # A micro-batch reads the weights of all experts on the rank, whatever tokens they get.
            per_micro_batch=RIDGE_TOKENS * (everywhere + experts_held * of_experts) / weights,
            backward_ratio=3.0 if recompute else 2.0,
            window=window,
        )

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """The cost model that `to_json` wrote, or a job into its record.

        Raises:
            ConfigError: no JSON object, or one without a coefficient (`window` may be left out).
        """
        try:
            raw = parse_json(text)
        except ValueError as error:
            raise ConfigError(f"expected a cost model in JSON: {error}") from None
        # Unknown keys are refused: a coefficient that is misspelt would be a default.
        known = {option.name for option in fields(cls)}
        needed = known - {"window", *_NEWER}
        if not isinstance(raw, dict) or not needed <= set(raw) <= known | _ALSO_WRITTEN:
            raise ConfigError(
                f"expected a JSON object with {', '.join(sorted(needed))}, got {text!r:.80}; take "
                "the cost_model.json that a job records"
            )
        return cls(**{name: value for name, value in raw.items() if name in known})

    def to_json(self) -> str:
        """The cost model as a JSON object."""
        coefficients = asdict(self)
        # At their defaults they are left out, so that older releases read the file.
        for name in _NEWER:
            if coefficients[name] == type(self).__dataclass_fields__[name].default:
                del coefficients[name]
        return json.dumps(coefficients, indent=1)

    def on_ranks(self, context_parallel: int) -> CostModel:
        """The costs, on each of its ranks, of a micro-batch of this context-parallel size."""
        # 12 ranks count as 16 would. A product, not a power: `**` may differ between platforms.
        doublings = (context_parallel - 1).bit_length()
        share = 1.0 / context_parallel
        for _ in range(doublings):
            share *= 1.0 + self.context_parallel_overhead
        return dataclasses.replace(
            self,
            linear=self.linear * share,
            quadratic=self.quadratic * share,
            per_micro_batch=self.per_micro_batch + doublings * self.context_parallel_fixed,
        )

    def sample(self, length: int) -> float:
        """Forward cost of one sample of `length` tokens."""
        pairs = length * length  # masked ones too; `quadratic` says what a pair costs on average
        if self.window is not None and length > self.window:
            # Of n(n+1)/2 pairs, those more than a window apart are never computed.
            pairs -= (length - self.window) * (length - self.window)
        return self.linear * length + self.quadratic * pairs

    def micro_batch(self, lengths: Iterable[int]) -> float:
        """Forward cost of a micro-batch that holds samples of these lengths [samples], in
        tokens."""
        return self.per_micro_batch + ordered_sum(self.sample(length) for length in lengths)

    def weights(self, lengths: Iterable[int]) -> float:
        """Cost of the weight gradients of such a micro-batch."""
        return self.weight_share * (self.per_micro_batch + self.linear * sum(lengths))


def in_units_of(model: CostModel, unit: float) -> CostModel:
    """The same costs in units `unit` times as large.

    Raises:
        ConfigError: a cost is too large in them.
    """
    return dataclasses.replace(
        model,
        linear=model.linear / unit,
        quadratic=model.quadratic / unit,
        per_micro_batch=model.per_micro_batch / unit,
        context_parallel_fixed=model.context_parallel_fixed / unit,
    )
