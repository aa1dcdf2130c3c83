"""Costs of samples and micro-batches; the unit is one token's forward work outside attention.

The defaults are the shape of a 7B dense model: attention costs as much as all else at 24576 tokens,
and starting a micro-batch as much as 256 tokens. Costs are the same numbers on every platform: only
IEEE `+ - * /` in a fixed order are used, because ranks that differ in the last bit could choose
different plans.

    CostModel(..., layers="aabbbb|bbbbV", layer_costs=(("a", ...), ("b", ...), ("V", ...)))

A letter for each layer of the model, in order, with `|` between the model chunks of a pipeline
where these are not cut evenly: here `a` is a dense layer, `b` one of experts, `V` the output layer.
What a type of layer costs is in `layers_of`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from operator import add
from typing import NamedTuple

from mcore_batching.planning.errors import ConfigError
from mcore_batching.planning.files import parse_json_dict
from mcore_batching.planning.integers import MOST_COST, check_options
from mcore_batching.planning.parallel_dims import ParallelDims


def ordered_sum(values: Iterable[float]) -> float:
    """The sum of `values`, added from first to last."""
    # The built-in `sum` compensates rounding from Python 3.12 on: ranks of two versions would
    # differ in the last bit, and so might their plans.
    return functools.reduce(add, values, 0.0)


NEEDED = {"linear", "quadratic", "per_micro_batch", "backward_ratio"}
"""Fields that a file of costs must have."""


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
    """A letter for each layer of the model, `|` between model chunks; empty: all stages cost the
    same."""
    layer_costs: tuple[tuple[str, float, float, float, float], ...] = ()
    """Costs of each letter, as `LayerCost`; only their proportions count."""

    def __post_init__(self) -> None:
        """Check ranges, and the costs of layers."""
        check_options(self, ConfigError)
        if self.beyond_window > 1:
            raise ConfigError(f"beyond_window must be 1 or less, got {self.beyond_window}")
        self._check_layers()

    def _check_layers(self) -> None:
        try:
            found = {letter: tuple(map(float, costs)) for letter, *costs in self.layer_costs}
            if not (
                isinstance(self.layers, str)
                and set(self.layers) <= {"|", *found}
                and all(len(costs) == 4 for costs in found.values())
                and all(0 <= each <= MOST_COST for costs in found.values() for each in costs)
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
        if not NEEDED <= set(raw) <= known | {"seconds_per_unit"}:  # which jobs write, too
            raise ConfigError(
                f"expected a JSON object with {', '.join(sorted(NEEDED))}, got {text!r:.80}; take "
                "the cost_model.json that a job records"
            )
        return cls(**{name: value for name, value in raw.items() if name in known})

    def to_json(self) -> str:
        """The cost model as a JSON object."""
        return json.dumps(asdict(self), indent=1)

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


OUTPUT = "V"
"""Letter of the output layer, multi-token prediction beside it. It is the last of the last chunk,
and no layer where layers are counted."""


class LayerCost(NamedTuple):
    """Cost of a forward pass of a layer, in multiplications; of two layers, `+` is their sum."""

    token: float = 0.0
    """For each token: of the weights that it meets, and of a state of one size."""
    pair: float = 0.0
    """For each token and each before it, masked ones counted too."""
    far_pair: float = 0.0
    """For those of them that are further apart than the model's window; the rest of `pair` is of
    attention within the window, or to as many tokens of any distance."""
    read: float = 0.0
    """Weights that a rank reads for a micro-batch, whatever tokens they get."""

    def __add__(self, other: LayerCost) -> LayerCost:  # type: ignore[override]
        return LayerCost(*(a + b for a, b in zip(self, other, strict=True)))


def cut_layers(layers: str, chunks: int) -> str:
    """The layers cut into `chunks` parts: as they are, or as even in number as that goes, later
    ones fewer."""
    if layers.count("|") + 1 == chunks:
        return layers
    rest = layers.replace("|", "")
    body = rest.rstrip(OUTPUT)
    # Rounded up, so that earlier chunks take the rest; the output layer stays with the last one.
    ends = [-(-len(body) * number // chunks) for number in range(chunks + 1)]
    cut = [body[first:after] for first, after in itertools.pairwise(ends)]
    return "|".join(cut) + rest[len(body) :]


@functools.lru_cache(maxsize=64)
def costs_of_chunks(
    model: CostModel, dims: ParallelDims
) -> tuple[tuple[CostModel, ...], tuple[tuple[int, ...], ...]]:
    """The costs of a stage of each kind of model chunk alone; the kind of each chunk
    [stages][chunks], nothing where there is one kind. `model` is of the mean stage."""
    stages, chunks = dims.pipeline_parallel, dims.pipeline_parallel * dims.virtual_pipeline
    if not model.layers or chunks == 1:
        return (model,), ()
    of_chunks, mean = _chunks(model, dims)
    # A clock takes a cost of each micro-batch for each kind, and most chunks are alike: in what
    # they hold, not in what it costs, which may be 0 on one rank and not for rows on several.
    kinds = list(dict.fromkeys(of_chunks))
    if len(kinds) == 1:
        return (model,), ()
    which = [kinds.index(each) for each in of_chunks]
    # Chunk 0 of all stages holds the first layers, chunk 1 of all stages the next.
    stage_kinds = tuple(tuple(which[stage::stages]) for stage in range(stages))
    return tuple(_in_proportion(model, kind, mean) for kind in kinds), stage_kinds


def costs_of_stage(model: CostModel, dims: ParallelDims, stage: int) -> CostModel:
    """The costs of one stage: of its model chunks together."""
    if not costs_of_chunks(model, dims)[1]:
        return model
    of_chunks, mean = _chunks(model, dims)
    own = _mean(of_chunks[stage :: dims.pipeline_parallel])
    return _in_proportion(model, own, mean)


def _chunks(model: CostModel, dims: ParallelDims) -> tuple[list[LayerCost], LayerCost]:
    """Costs of each chunk's layers, all stages' first chunks first, and of the mean chunk's."""
    cut = cut_layers(model.layers, dims.pipeline_parallel * dims.virtual_pipeline)
    costs = {letter: LayerCost(*cost) for letter, *cost in model.layer_costs}
    of_chunks = [sum_of([costs[each] for each in chunk]) for chunk in cut.split("|")]
    return of_chunks, _mean(of_chunks)


def _mean(costs: Sequence[LayerCost]) -> LayerCost:
    return LayerCost(*(each / len(costs) for each in sum_of(costs)))


def sum_of(costs: Sequence[LayerCost]) -> LayerCost:
    """The sum of the costs, added from first to last."""
    return functools.reduce(LayerCost.__add__, costs, LayerCost())


def _in_proportion(model: CostModel, chunk: LayerCost, mean: LayerCost) -> CostModel:
    """The mean stage's costs times what this chunk has over the mean one of each."""
    token, pair, far_pair, read = (
        own / usual if usual else 1.0 for own, usual in zip(chunk, mean, strict=True)
    )
    return dataclasses.replace(
        model,
        linear=model.linear * token,
        quadratic=model.quadratic * pair,
        beyond_window=min(1.0, model.beyond_window * far_pair / pair) if pair else 0.0,
        per_micro_batch=model.per_micro_batch * read,
        layers="",
        layer_costs=(),
    )
