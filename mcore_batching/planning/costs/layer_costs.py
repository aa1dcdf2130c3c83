"""Costs of a model's layers, and of the stages that they add up to.

    CostModel(..., layers="aabbbb|bbbbV", layer_costs={"a": ..., "b": ..., "V": ...})

A letter for each layer, in order, with `|` between the model chunks of a pipeline where these are
not cut evenly: here `a` is a dense layer, `b` one of experts, `V` the output layer. What a type of
layer costs is in `layers_of`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from mcore_batching.planning.costs.cost import CostModel
from mcore_batching.planning.errors import ConfigError
from mcore_batching.planning.parallel_dims import ParallelDims

OUTPUT = "V"
"""Letter of the output layer, multi-token prediction beside it. It is the last of the last chunk,
and no layer where layers are counted."""
RIDGE_TOKENS = 256
"""Tokens that a GPU multiplies by a half-precision weight while it reads one: 153 on an A100, 206
on an H200, 281 on a B200, 295 on an H100, dense bfloat16 rate over bandwidth of their data sheets.
A micro-batch of fewer tokens takes no less time (Williams et al., "Roofline", 2009)."""


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


def weights(number: float) -> LayerCost:
    """The cost of a number of weights, each multiplied with every token once."""
    return LayerCost(token=number, read=number)


def pairs(sizes: float, *, windowed: bool = False) -> LayerCost:
    """A token's heads have queries and values of these sizes together; half of all pairs are
    masked (Narayanan et al. 2021, appendix, without the causal half)."""
    return LayerCost(pair=0.5 * sizes, far_pair=0.0 if windowed else 0.5 * sizes)


def cost_model(
    layers: str,
    costs: Mapping[str, LayerCost],
    *,
    window: int | None = None,
    recompute: bool = False,
) -> CostModel:
    """The cost model of a model's layers, a letter each, and of each letter's costs; a
    `ConfigError` if they have no weights. `window` bounds the tokens that windowed or sparse
    attention attends to."""
    total = sum_of([costs[each] for each in layers if each != "|"])
    if not total.token > 0:
        raise ConfigError("a model's layers must have weights; give a transformer's sizes")
    used = {each: costs[each] for each in dict.fromkeys(layers) if each != "|"}
    return CostModel(
        # A token costs 2 operations for each weight that it meets, a pair 2 for each size of its
        # heads: relative to a token the 2s cancel.
        linear=1.0,
        quadratic=total.pair / total.token,
        beyond_window=total.far_pair / total.pair if window and total.pair else 0.0,
        per_micro_batch=RIDGE_TOKENS * total.read / total.token,
        backward_ratio=3.0 if recompute else 2.0,
        window=window if total.far_pair < total.pair else None,
        layers=layers,
        layer_costs=tuple((each, *cost) for each, cost in used.items()),
    )


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
    return replace(
        model,
        linear=model.linear * token,
        quadratic=model.quadratic * pair,
        beyond_window=min(1.0, model.beyond_window * far_pair / pair) if pair else 0.0,
        per_micro_batch=model.per_micro_batch * read,
        layers="",
        layer_costs=(),
    )
