"""Costs of samples and micro-batches; the unit is one token's forward work outside attention.

The defaults are the shape of a 7B dense model: attention costs as much as all else at 24576 tokens,
and starting a micro-batch as much as 256 tokens. Costs are the same numbers on every platform: only
IEEE `+` and `*` in a fixed order are used, because ranks that differ in the last bit could choose
different plans.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import reduce
from operator import add

from mcore_batching.planning.errors import ConfigError
from mcore_batching.planning.files import parse_json_dict
from mcore_batching.planning.integers import at_least, number_up_to


def ordered_sum(values: Iterable[float]) -> float:
    """The sum of `values`, added from first to last."""
    # The built-in `sum` compensates rounding from Python 3.12 on: ranks of two versions would
    # differ in the last bit, and so might their plans.
    return reduce(add, values, 0.0)


_ALSO_WRITTEN = {"seconds_per_unit"}
"""Keys that a job writes beside the coefficients."""
REMOVED = ("weight_share", "split_backward_overhead")
"""Fields of earlier releases, of which no plan depends any more; ignored where costs are read."""
_FIRST = ("linear", "quadratic", "per_micro_batch", "backward_ratio", "window")
"""Fields of the first release; others are left out of the JSON at their defaults."""
NOT_COSTS = ("window", "layers", "layer_costs")
"""Fields that are no coefficient."""
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
    """Tokens that each token attends to at most, itself included (a sliding window, or the top k
    of sparse attention); None: all before it."""
    context_parallel_overhead: float = 0.1
    """Growth of a micro-batch's total work with each doubling of its context-parallel size, by
    exposed communication and smaller kernels. An assumption until a job measures it."""
    context_parallel_fixed: float = 64.0
    """Cost of each doubling whatever the micro-batch holds: latency of communication. A quarter of
    `per_micro_batch`, an assumption until a job measures it."""
    beyond_window: float = 0.0
    """Cost of a pair further apart than the window over that of one within it: layers without a
    window, or the indexer of sparse attention."""
    layers: str = ""
    """A letter for each layer of the model, `|` between model chunks (`layer_costs`); empty: all
    stages cost the same."""
    layer_costs: tuple[tuple[str, float, float, float, float], ...] = ()
    """Costs of each letter, as `layer_costs.LayerCost`; only their proportions count."""

    def __post_init__(self) -> None:
        """Check that each coefficient is a number of 0 to `_MAX_COEFFICIENT`."""
        for name in (option.name for option in fields(self) if option.name not in NOT_COSTS):
            number = number_up_to(name, getattr(self, name), _MAX_COEFFICIENT, ConfigError)
            object.__setattr__(self, name, number)
        if self.beyond_window > 1:
            raise ConfigError(f"beyond_window must be 1 or less, got {self.beyond_window}")
        if self.window is not None:
            object.__setattr__(self, "window", at_least("window", self.window, 1, ConfigError))
        self._check_layers()

    def _check_layers(self) -> None:
        try:
            found = {letter: tuple(map(float, costs)) for letter, *costs in self.layer_costs}
            if not (
                isinstance(self.layers, str)
                and set(self.layers) <= {"|", *found}
                and all(len(costs) == 4 for costs in found.values())
                and all(0 <= each <= _MAX_COEFFICIENT for costs in found.values() for each in costs)
            ):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(
                "layer_costs must have four numbers of 0 or more for each letter of layers, got "
                f"{self.layer_costs!r:.80}"
            ) from None
        costs_of_layers = tuple((letter, *costs) for letter, costs in found.items())
        object.__setattr__(self, "layer_costs", costs_of_layers)

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """The cost model that `to_json` wrote, or a job into its record; a `ConfigError` if it is
        none."""
        raw = parse_json_dict(text, "a cost model in JSON", ConfigError)
        # Unknown keys are refused: a coefficient that is misspelt would be a default.
        known = {option.name for option in fields(cls)}
        raw = {name: value for name, value in raw.items() if name not in REMOVED}
        needed = {*_FIRST} - {"window"}
        if not needed <= set(raw) <= known | _ALSO_WRITTEN:
            raise ConfigError(
                f"expected a JSON object with {', '.join(sorted(needed))}, got {text!r:.80}; take "
                "the cost_model.json that a job records"
            )
        return cls(**{name: value for name, value in raw.items() if name in known})

    def to_json(self) -> str:
        """The cost model as a JSON object."""
        defaults = {option.name: option.default for option in fields(self)}
        kept = {k: v for k, v in asdict(self).items() if k in _FIRST or v != defaults[k]}
        return json.dumps(kept, indent=1)

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
        # Masked ones too; `quadratic` is the cost of a pair on average.
        pairs: float = length * length
        if self.window is not None and length > self.window:
            # Pairs more than a window apart, of n(n+1)/2 in all, are never computed.
            far = (length - self.window) * (length - self.window)
            pairs -= (1.0 - self.beyond_window) * far
        return self.linear * length + self.quadratic * pairs

    def micro_batch(self, lengths: Iterable[int]) -> float:
        """Forward cost of a micro-batch that holds samples of these lengths [samples], in
        tokens."""
        return self.per_micro_batch + ordered_sum(self.sample(length) for length in lengths)


def in_units_of(model: CostModel, unit: float) -> CostModel:
    """The same costs in units `unit` times as large; those of layers are proportions."""
    return dataclasses.replace(
        model,
        linear=model.linear / unit,
        quadratic=model.quadratic / unit,
        per_micro_batch=model.per_micro_batch / unit,
        context_parallel_fixed=model.context_parallel_fixed / unit,
    )
