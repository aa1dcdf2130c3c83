"""Costs of a model's layers, and of the stages that they add up to.

    CostModel(..., layers="aabbbb|bbbbV", layer_costs={"a": ..., "b": ..., "V": ...})

A letter for each layer, in order, with `|` between the model chunks of a pipeline where these are
not cut evenly: here `a` is a dense layer, `b` one of experts, `V` the output layer. A new type of
layer is a function here and a line in `layers_of.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from mcore_batching.planning.costs.cost import CostModel, ordered_sum
from mcore_batching.planning.errors import ConfigError
from mcore_batching.planning.parallel_dims import ParallelDims

OUTPUT = "V"
"""Letter of the output layer, multi-token prediction beside it. It is the last of the last chunk,
and no layer where layers are counted."""
RIDGE_TOKENS = 256
"""Tokens that a GPU multiplies by a half-precision weight while it reads one: 153 on an A100, 206
on an H200, 281 on a B200, 295 on an H100, dense bfloat16 rate over bandwidth of their data sheets.
A micro-batch of fewer tokens takes no less time (Williams et al., "Roofline", 2009)."""
STATE_CHUNK = 64
"""Tokens that kernels of linear attention take at a time, among which they are all compared: FLA's
delta rule 64, Mamba 128 to 256. Doubled, such a layer costs 2 % more at Qwen3-Next's sizes."""


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


def attention(
    hidden: int, heads: int, groups: int, dim: int, *, gated: bool, windowed: bool
) -> LayerCost:
    """Attention of `heads` query heads and `groups` key-value heads of size `dim`; `gated`: with an
    output gate as wide as the queries (Qwen3-Next)."""
    # Queries and the output, and a gate as wide as they are; keys and values.
    projections = hidden * dim * ((3 if gated else 2) * heads + 2 * groups)
    return weights(projections) + pairs(2 * heads * dim, windowed=windowed)


def latent_attention(
    hidden: int, heads: int, key_dim: int, rope_dim: int, value_dim: int, rank: int, query_rank: int
) -> LayerCost:
    """MLA with queries and keys of size `key_dim` + `rope_dim`; `query_rank` 0: queries are not
    compressed."""
    # Down to the rank and up to the heads; the rotary part of keys is one for all heads.
    queries = heads * (key_dim + rope_dim)
    number = hidden * query_rank + query_rank * queries if query_rank else hidden * queries
    number += hidden * (rank + rope_dim) + rank * heads * (key_dim + value_dim)
    return weights(number + heads * value_dim * hidden) + pairs(queries + heads * value_dim)


def sparse_attention(
    latent: LayerCost, hidden: int, query_rank: int, index_heads: int, index_dim: int
) -> LayerCost:
    """DSA: MLA to the tokens that an indexer chooses, which scores all of them."""
    indexer = weights(query_rank * index_heads * index_dim + hidden * (index_dim + index_heads))
    return latent._replace(far_pair=0.0) + indexer + pairs(index_heads * index_dim)


def delta_net(
    hidden: int, key_heads: int, key_dim: int, value_heads: int, value_dim: int
) -> LayerCost:
    """GatedDeltaNet: queries, keys, values, a gate and two numbers for each head; its state is
    read twice and written once a token."""
    values = value_heads * value_dim
    projections = hidden * (2 * key_heads * key_dim + 3 * values + 2 * value_heads)
    state = 3 * values * key_dim + STATE_CHUNK * (value_heads * key_dim + values)
    return weights(projections) + LayerCost(token=state)


def mamba(hidden: int, heads: int, dim: int, groups: int, state_dim: int) -> LayerCost:
    """Mamba-2; its state is read and written once a token."""
    inner = heads * dim
    projections = hidden * (3 * inner + 2 * groups * state_dim + heads)
    state = 2 * inner * state_dim + STATE_CHUNK * (groups * state_dim + inner)
    return weights(projections) + LayerCost(token=state)


def mlp(hidden: int, ffn: int, *, gated: bool) -> LayerCost:
    """A dense feed-forward layer; with a gate (SwiGLU) it has three matrices."""
    return weights((3 if gated else 2) * hidden * ffn)


def experts(
    expert: LayerCost, per_token: int, held: float, num_experts: int, hidden: int
) -> LayerCost:
    """A router, and experts of which each token is sent to some and a rank holds some."""
    # A token meets few experts, but a micro-batch's tokens together meet all that the rank holds.
    routed = LayerCost(token=per_token * expert.token, read=held * expert.read)
    return routed + weights(hidden * num_experts)


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
    cut = cut_layers(model.layers, chunks)
    costs = {letter: LayerCost(*cost) for letter, *cost in model.layer_costs}
    of_chunks = [sum_of([costs[each] for each in chunk]) for chunk in cut.split("|")]
    mean = LayerCost(*(each / chunks for each in sum_of(of_chunks)))
    models = [_of_chunk(model, cost, mean) for cost in of_chunks]
    # A clock takes a cost of each micro-batch for each kind, and most chunks are alike: in what
    # they hold, not in what it costs, which may be 0 on one rank and not for rows on several.
    kinds = list(dict.fromkeys(of_chunks))
    if len(kinds) == 1:
        return (model,), ()
    which = [kinds.index(each) for each in of_chunks]
    of_kinds = tuple(models[of_chunks.index(kind)] for kind in kinds)
    # Chunk 0 of all stages holds the first layers, chunk 1 of all stages the next.
    return of_kinds, tuple(tuple(which[stage::stages]) for stage in range(stages))


def costs_of_stage(model: CostModel, dims: ParallelDims, stage: int) -> CostModel:
    """The costs of one stage: of its model chunks together."""
    kinds, which = costs_of_chunks(model, dims)
    if not which:
        return model
    of_chunks = [kinds[kind] for kind in which[stage]]

    def mean(cost: Callable[[CostModel], float]) -> float:
        return ordered_sum(map(cost, of_chunks)) / len(of_chunks)

    pair = mean(lambda each: each.quadratic)
    far = mean(lambda each: each.quadratic * each.beyond_window)
    return replace(
        of_chunks[0],
        linear=mean(lambda each: each.linear),
        quadratic=pair,
        beyond_window=far / pair if pair else 0.0,
        per_micro_batch=mean(lambda each: each.per_micro_batch),
    )


def sum_of(costs: Sequence[LayerCost]) -> LayerCost:
    """The sum of the costs, added from first to last."""
    return functools.reduce(LayerCost.__add__, costs, LayerCost())


def _of_chunk(model: CostModel, chunk: LayerCost, mean: LayerCost) -> CostModel:
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
