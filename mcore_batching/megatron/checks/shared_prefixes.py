"""Models that do not compute the same for a sample's tokens whatever comes after them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import get_model_config, unwrap_model

from mcore_batching.flags import FLAGS
from mcore_batching.megatron.attention import CAUSAL
from mcore_batching.megatron.errors import one_of_each_problem, refuse

_FLAG = FLAGS["share_prefixes"]
_POSITIONS = ("rope", "mrope", "yarn", "learned_absolute", "none")
"""Of a token's place alone. YaRN and the scalings of RoPE go by the configuration's lengths."""


def check_shared_prefixes(chunks: list[Any]) -> None:
    """Refuse models of which samples cannot share segments."""
    refuse(_FLAG, sharing_problems(chunks))


def sharing_problems(chunks: list[Any]) -> Iterator[str]:
    """Why samples of a model cannot share segments, each with the setting that mends it."""
    config = get_model_config(chunks[0])
    is_trained = any(chunk.training for chunk in chunks)  # evaluation drops nothing
    for name in ("hidden_dropout", "attention_dropout"):
        if is_trained and getattr(config, name):
            flag = f"--{name.replace('_', '-')}"
            yield f"samples that share tokens would share dropout: set {flag} 0, or unset {_FLAG}"
    for chunk in chunks:
        positions = getattr(unwrap_model(chunk), "position_embedding_type", "of an unknown kind")
        if positions not in _POSITIONS:
            yield (
                f"position embeddings {positions} are not known to go by a token's place alone: "
                f"set --position-embedding-type rope, or unset {_FLAG}"
            )
        rotary = getattr(unwrap_model(chunk), "rotary_pos_emb", None)
        if rotary is not None and not type(rotary).__module__.startswith("megatron.core."):
            kind = type(rotary).__name__
            yield f"rotary embeddings {kind} may go by a sample's length: unset {_FLAG}"
        yield from one_of_each_problem(
            (
                name,
                f"lets tokens see later ones (attn_mask_type {module.attn_mask_type.name}): build "
                f"the model with AttnMaskType.causal, or unset {_FLAG}",
            )
            for name, module in chunk.named_modules()
            if isinstance(getattr(module, "attn_mask_type", None), AttnMaskType)
            and module.attn_mask_type not in CAUSAL
        )
