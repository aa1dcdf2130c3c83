"""The layers of a model, read from its config (Megatron's `TransformerConfig` or Hugging Face's
``config.json``), and so the first guess of its costs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from string import ascii_lowercase
from typing import Any

from mcore_batching.planning.costs.cost import OUTPUT, CostModel, LayerCost, sum_of
from mcore_batching.planning.errors import ConfigError
from mcore_batching.planning.files import parse_json_dict
from mcore_batching.planning.integers import as_integer, at_least

_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd"),
    "layers": ("num_layers", "num_hidden_layers", "n_layer"),
    "vocab": ("padded_vocab_size", "vocab_size"),
    "ffn": ("ffn_hidden_size", "intermediate_size", "n_inner"),
    "heads": ("num_attention_heads", "n_head"),
    "groups": ("num_query_groups", "num_key_value_heads"),
    "dim": ("kv_channels", "head_dim"),
    # latent and sparse attention
    "query_rank": ("q_lora_rank",),
    "rank": ("kv_lora_rank",),
    # Hugging Face's own first: its `qk_head_dim` counts the rotary part too, Megatron's does not.
    "key_dim": ("qk_nope_head_dim", "qk_head_dim"),
    "rope_dim": ("qk_pos_emb_head_dim", "qk_rope_head_dim"),
    "value_dim": ("v_head_dim",),
    "index_heads": ("dsa_indexer_n_heads", "index_n_heads"),
    "index_dim": ("dsa_indexer_head_dim", "index_head_dim"),
    "top_k": ("dsa_indexer_topk", "index_topk"),
    # linear attention
    "linear_key_heads": ("linear_num_key_heads",),
    "linear_key_dim": ("linear_key_head_dim",),
    "linear_value_heads": ("linear_num_value_heads",),
    "linear_value_dim": ("linear_value_head_dim",),
    "mamba_heads": ("mamba_num_heads",),
    "mamba_dim": ("mamba_head_dim",),
    "mamba_groups": ("mamba_num_groups", "n_groups"),
    "mamba_state": ("mamba_state_dim", "ssm_state_size"),
    # experts
    "experts": ("num_moe_experts", "num_experts", "n_routed_experts", "num_local_experts"),
    "expert_ffn": (
        "moe_ffn_hidden_size",
        "moe_intermediate_size",
        "ffn_hidden_size",
        "intermediate_size",
    ),
    "experts_per_token": ("moe_router_topk", "num_experts_per_tok"),
    "shared_ffn": ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"),
    "latent": ("moe_latent_size",),
    # multi-token prediction
    "depths": ("mtp_num_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers"),
}
"""Names of sizes in Megatron's config and in others'. Of several that are there the first counts:
sizes of the job's own stand above those of the model that it began from, but for `key_dim`."""
RIDGE_TOKENS = 256
"""Tokens that a GPU multiplies by a half-precision weight while it reads one: 153 on an A100, 206
on an H200, 281 on a B200, 295 on an H100, dense bfloat16 rate over bandwidth of their data sheets.
A micro-batch of fewer tokens takes no less time (Williams et al., "Roofline", 2009)."""
STATE_CHUNK = 64
"""Tokens that kernels of linear attention take at a time, among which they are all compared: FLA's
delta rule 64, Mamba 128 to 256. Doubled, such a layer costs 2 % more at Qwen3-Next's sizes."""
_HYBRID = ("hybrid_layer_pattern", "hybrid_override_pattern")
_TYPES = {"sliding_attention": "w", "linear_attention": "G"}
"""Attention by Hugging Face's `layer_types`; others attend to all tokens."""


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


class Layers:
    """Reads the layers of a model from names and values. A size of None counts as missing; one of
    0 too, unless a model may be without: a job's 0 experts stand above its model's 8.

    Raises:
        ConfigError: a size is missing or out of range; names it.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.hidden = self.size("hidden")
        gated = config.get("gated_linear_unit", config.get("swiglu"))
        if gated is None:  # Nemotron's squared ReLU has no gate
            names = ("hidden_act", "mlp_hidden_act", "hidden_activation", "activation_function")
            act = next((config[name] for name in names if config.get(name)), "silu")
            gated = act in ("silu", "swish", "gelu_pytorch_tanh")
        self.gated = bool(gated)

    def size(self, name: str, default: int | None = None) -> int:
        """A size by its name in `_NAMES`; without a default it must be there, with one of 0 it may
        be 0."""
        least = 0 if default == 0 else 1
        for each in _NAMES[name]:
            given = self._config.get(each)
            if given is not None and (least == 0 or as_integer(given) != 0):
                return at_least(each, given, least, ConfigError)
        if default is None:
            names = " or ".join(_NAMES[name])
            raise ConfigError(f"the model's config has no {names} of 1 or more; add it")
        return default

    def read(self) -> tuple[str, dict[str, LayerCost]]:
        """A letter for each layer, and what each letter costs; the last is the output layer's."""
        if pattern := next((self._config[n] for n in _HYBRID if self._config.get(n)), None):
            layers, *depths = str(pattern).split("/")
            if not depths:
                each = str(self._config.get("mtp_hybrid_override_pattern") or "*E")
                depths = [each] * self.size("depths", 0)
            letters = layers.replace("|", "")
            for unknown in sorted(set(letters + "".join(depths)) - set("MG*D+-E")):
                raise ConfigError(
                    f"a hybrid model's pattern has no layers {unknown!r}; take M G * D + - E"
                )
            parts = {each: each for each in letters}
        else:
            count = self.size("layers")
            kinds = list(map("".join, zip(self._attentions(count), self._ffns(count), strict=True)))
            # One letter for each pair of attention and feed-forward part that occurs.
            parts = dict(zip(ascii_lowercase, dict.fromkeys(kinds), strict=False))
            letter_of = {kind: letter for letter, kind in parts.items()}
            layers = "".join(letter_of[kind] for kind in kinds)
            # A depth of multi-token prediction is one more layer of the last one's kind.
            depths = kinds[-1:] * self.size("depths", 0)
        costs = {letter: sum_of([*map(self._part, kind)]) for letter, kind in parts.items()}
        output = weights(self.hidden * self.size("vocab", 0))
        # A depth has layers, a projection and the output layer anew.
        depth = sum_of([*map(self._part, "".join(depths[:1]))])
        depth += weights(2 * self.hidden * self.hidden) + output
        return layers + OUTPUT, costs | {OUTPUT: sum_of([output, *[depth] * len(depths)])}

    def _part(self, letter: str) -> LayerCost:
        """The cost of a part of a layer, by its letter in Megatron's hybrid patterns."""
        if letter == "M":
            return self._mamba()
        if letter == "G":
            return self._delta_net()
        if letter == "-":
            return self._mlp(self.size("ffn"))
        if letter == "E":
            return self._experts()
        if self._config.get("multi_latent_attention", self.size("rank", 0)):
            return self._latent_attention()
        return self._attention(windowed=letter == "w")

    def _attentions(self, count: int) -> list[str]:
        """The letter of each layer's attention; "w" with a window."""
        config = self._config
        types = config.get("layer_types")
        if types:
            return [_TYPES.get(each, "*") for each in types][:count]
        every = config.get("linear_attention_freq") or config.get("full_attention_interval")
        if every:
            return ["G" if each else "*" for each in _pattern(every, count, last=True)]
        if self.window is None or not config.get("use_sliding_window", True):
            return ["*"] * count
        skips = config.get("window_attn_skip_freq")
        if skips is None:
            return ["w"] * count
        return ["w" if each else "*" for each in _pattern(skips, count, last=True)]

    @property
    def window(self) -> int | None:
        """Most tokens that a token of windowed or of sparse attention attends to."""
        if top_k := self.size("top_k", 0):
            return top_k
        size = self._config.get("window_size")  # Megatron's: tokens before and after, -1 for all
        if size is not None:
            return None if size[0] < 0 else int(size[0]) + 1  # and the token itself
        return self._config.get("sliding_window") or None

    @property
    def shared_ffn(self) -> int:
        """Inner size of the experts that every token is sent to, together; 0 without."""
        number = int(self._config.get("n_shared_experts") or 0)
        return self.size("shared_ffn", number and number * self.size("expert_ffn"))

    def _ffns(self, count: int) -> list[str]:
        """The letter of each layer's feed-forward part."""
        config = self._config
        if not self.size("experts", 0):
            return ["-"] * count
        # DeepSeek's first layers are dense, whatever the pattern.
        dense = int(config.get("first_k_dense_replace") or 0)
        every = config.get("moe_layer_freq", 1)
        # Qwen's: with a step of 2, layers 1, 3, 5, ... have experts.
        if "decoder_sparse_step" in config:
            step = config["decoder_sparse_step"] or 1
            every = [
                (i + 1) % step == 0 and i not in (config.get("mlp_only_layers") or [])
                for i in range(count)
            ]
        return ["E" if has and i >= dense else "-" for i, has in enumerate(_pattern(every, count))]

    def _attention(self, *, windowed: bool) -> LayerCost:
        heads = self.size("heads")
        dim = self.size("dim", self.hidden // max(1, heads))
        # Queries and the output, and with Qwen3-Next's gate one as wide; keys and values.
        gated = self._config.get("attention_output_gate") or self._config.get("attn_output_gate")
        wide = (3 if gated else 2) * heads + 2 * self.size("groups", heads)
        projections = weights(self.hidden * dim * wide)
        return projections + pairs(2 * heads * dim, windowed=windowed)

    def _latent_attention(self) -> LayerCost:
        """MLA: down to a rank and up to the heads; the rotary part of keys is one for all heads."""
        hidden, heads, rank = self.hidden, self.size("heads"), self.size("rank")
        key, rope, value = (self.size(name) for name in ("key_dim", "rope_dim", "value_dim"))
        queries, query_rank = heads * (key + rope), self.size("query_rank", 0)
        # A rank of 0: queries are not compressed.
        number = (hidden + queries) * query_rank if query_rank else hidden * queries
        number += hidden * (rank + rope) + rank * heads * (key + value) + heads * value * hidden
        made = weights(number) + pairs(queries + heads * value)
        if not self.size("top_k", 0):
            return made
        # DSA: to the tokens that an indexer chooses, which scores all of them.
        index_heads, index_dim = self.size("index_heads"), self.size("index_dim")
        indexer = (query_rank or hidden) * index_heads * index_dim
        indexer += hidden * (index_dim + index_heads)
        return made._replace(far_pair=0.0) + weights(indexer) + pairs(index_heads * index_dim)

    def _delta_net(self) -> LayerCost:
        """GatedDeltaNet: queries, keys, values, a gate and two numbers for each head; its state is
        read twice and written once a token."""
        key_dim, value_heads = self.size("linear_key_dim"), self.size("linear_value_heads")
        keys = self.size("linear_key_heads") * key_dim
        values = value_heads * self.size("linear_value_dim")
        state = 3 * values * key_dim + STATE_CHUNK * (value_heads * key_dim + values)
        projections = self.hidden * (2 * keys + 3 * values + 2 * value_heads)
        return weights(projections) + LayerCost(token=state)

    def _mamba(self) -> LayerCost:
        """Mamba-2; its state is read and written once a token."""
        # Megatron's defaults: an inner stream twice as wide as the residual one.
        dim = self.size("mamba_dim", 64)
        heads = self.size("mamba_heads", 2 * self.hidden // dim)
        inner, groups = heads * dim, self.size("mamba_groups") * self.size("mamba_state")
        state = 2 * inner * self.size("mamba_state") + STATE_CHUNK * (groups + inner)
        return weights(self.hidden * (3 * inner + 2 * groups + heads)) + LayerCost(token=state)

    def _mlp(self, ffn: int, hidden: int | None = None) -> LayerCost:
        """A dense feed-forward layer; with a gate (SwiGLU) it has three matrices."""
        return weights((3 if self.gated else 2) * (hidden or self.hidden) * ffn)

    def _experts(self) -> LayerCost:
        number = self.size("experts")
        # Nemotron's experts work on a smaller stream, to and from which every token is projected.
        latent = self.size("latent", 0)
        expert = self._mlp(self.size("expert_ffn"), latent)
        # A token meets few experts, but a micro-batch's tokens together meet all that a rank holds.
        routed = LayerCost(
            token=self.size("experts_per_token") * expert.token,
            read=number / (self._config.get("expert_model_parallel_size") or 1) * expert.read,
        )
        router = weights(self.hidden * number) + weights(2 * self.hidden * latent)
        return routed + router + self._mlp(self.shared_ffn)


def _pattern(every: Any, count: int, *, last: bool = False) -> list[Any]:
    """Megatron's patterns of layers: a list; or of `every` layers the first, and so on; with `last`
    all but the last of them."""
    if isinstance(every, int):
        return [(i + 1) % every != 0 if last else i % every == 0 for i in range(count)]
    return list(every)


def layers_of_chunks(config: Mapping[str, Any], num_layers: int) -> list[int]:
    """Layers of each model chunk, all stages' first chunks first, by Megatron's names; nothing
    where they are equal."""
    stages = config.get("pipeline_model_parallel_size") or 1
    chunks = config.get("virtual_pipeline_model_parallel_size") or 1
    # In Megatron's config an object; the text of an argument is Megatron's to read.
    layout = getattr(config.get("pipeline_model_parallel_layout"), "layout", None)
    if layout is not None:
        return [
            sum(layer.name == "decoder" for layer in layout[stage][chunk])
            for chunk in range(chunks)
            for stage in range(stages)
        ]
    first, last = (
        config.get(f"num_layers_in_{end}_pipeline_stage")
        or config.get(f"decoder_{end}_pipeline_num_layers")
        for end in ("first", "last")
    )
    ends = [
        bool(config.get(f"account_for_{each}_in_pipeline_split")) for each in ("embedding", "loss")
    ]
    if stages == 1 or not (first or last or any(ends)):
        return []
    given = [each for each in (first, last) if each]
    each = (num_layers + sum(ends) - sum(given)) // max(1, stages - len(given))
    of_stages = [each] * stages
    of_stages[0], of_stages[-1] = first or each, last or each
    counts = [count // chunks for _ in range(chunks) for count in of_stages]
    # The embedding and the loss take the place of a layer each.
    counts[0], counts[-1] = counts[0] - ends[0], counts[-1] - ends[1]
    return counts


def first_guess(config: Mapping[str, Any]) -> CostModel:
    """The cost model of a model, before any pass of it was timed, from a config as `Layers` reads
    it; with `layers_of_chunks`' names its stages, too."""
    reader = Layers(config)
    layers, costs = reader.read()
    counts = [] if "|" in layers else layers_of_chunks(config, len(layers) - len(OUTPUT))
    if counts:
        letters = iter(layers)
        cut = ["".join(itertools.islice(letters, count)) for count in counts]
        layers = "|".join(cut) + "".join(letters)
    return cost_model(
        layers,
        costs,
        window=reader.window,
        recompute=config.get("recompute_granularity") == "full",
    )


def config_of_json(text: str) -> dict[str, Any]:
    """A model's ``config.json``; a `ConfigError` if it is no JSON object."""
    return language_model(parse_json_dict(text, "a model's config.json", ConfigError))


def language_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's config, of a multimodal one with the sizes of its language model."""
    inner = config.get("text_config")
    return dict(config) | (dict(inner) if isinstance(inner, Mapping) else {})
