"""Models on plain rows: Megatron's own attention, nothing packed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from bootstrap import build_model
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from kit import cpu_kernels
from kit.model import ADAM, CLIP_GRAD, MAX_SEQUENCE_LENGTH
from kit.samples import VOCABULARY
from mcore_batching.megatron import compat


def plain_model_of(
    config: TransformerConfig,
    *,
    layer: Callable[[ModuleSpec], Any] = lambda with_attention: with_attention,
    hybrid_layer_pattern: str | None = None,
    **options: Any,
) -> Any:
    """The whole model of a config, on plain rows.

    Args:
        config: of the model.
        layer: gives the layers, of one with attention; not of a hybrid model.
        hybrid_layer_pattern: of a hybrid model, whether cut into stages or not; None: a GPT model.
        options: others of the model.
    """
    if hybrid_layer_pattern is not None:
        (model,) = build_model(
            config,
            vocab_size=VOCABULARY,
            max_sequence_length=MAX_SEQUENCE_LENGTH,
            spec=hybrid_with_local_attention,
            wrap=False,
            hybrid_layer_pattern=hybrid_layer_pattern.replace("|", ""),
            **options,
        )
        return model
    local_layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    if config.multi_latent_attention:
        local_layer.submodules.self_attention.submodules.core_attention = PlainAttention
    return GPTModel(
        config=config,
        transformer_layer_spec=layer(local_layer),
        vocab_size=VOCABULARY,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        pre_process=True,
        post_process=True,
        mtp_block_spec=mtp_block_spec(config, local_layer),
        **options,
    ).to(torch.device(torch.cuda.current_device()))


def mtp_block_spec(config: TransformerConfig, layer: ModuleSpec) -> Any:
    """Megatron's own, None where the model predicts one token alone."""
    if not config.mtp_num_layers:
        return None
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    return get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)


class PlainAttention(torch.nn.Module):
    """Core attention of multi-latent layers, which Megatron's own local one does not take."""

    def __init__(self, config: Any, *unused: Any, **options: Any) -> None:
        super().__init__()
        del config, unused
        self._scale = options.get("softmax_scale")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **_: Any) -> Tensor:
        """``[length, 1, heads, dims]`` each to ``[length, 1, heads * dims]``."""
        scale = self._scale or query.shape[-1] ** -0.5
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * scale
        weights = scores.masked_fill(mask, -torch.inf).softmax(-1)
        return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)


def hybrid_with_local_attention(config: TransformerConfig) -> ModuleSpec:
    """Hybrid layers with Megatron's own local attention, which takes plain rows alone."""
    del config
    spec = cpu_kernels.hybrid_spec()
    layers = {}
    for name, core in (("attention_layer", DotProductAttention), ("mla_layer", PlainAttention)):
        if hasattr(spec.submodules, name):
            layers[name] = copy.deepcopy(getattr(spec.submodules, name))
            layers[name].submodules.self_attention.submodules.core_attention = core
    return replace(spec, submodules=replace(spec.submodules, **layers))


@contextlib.contextmanager
def hidden_states_kept() -> Iterator[list[tuple[Tensor, ...]]]:
    """Of each forward pass the hidden states of every depth, in place of Megatron's own losses."""
    kept: list[tuple[Tensor, ...]] = []

    def keep(hidden_states: Tensor, *, config: TransformerConfig, **unused: Any) -> Tensor:
        del unused
        kept.append(hidden_states.chunk(1 + config.mtp_num_layers))
        return kept[-1][0]

    with contextlib.ExitStack() as stack:
        for module in compat.modules_with_multi_token_losses():
            stack.enter_context(mock.patch.object(module, "process_mtp_loss", keep))
        yield kept


def plain_adam(model: Any) -> torch.optim.Optimizer:
    """PyTorch's own optimizer with the settings of `kit.model.adam`."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=ADAM["lr"],
        eps=ADAM["adam_eps"],
        betas=(ADAM["adam_beta1"], ADAM["adam_beta2"]),
        weight_decay=0.0,
    )


def clip(model: Any) -> Tensor:
    """Clip gradients as Megatron does, and return the norm that it reports."""
    parameters = [*model.parameters()]
    # It clips detached multi-token prediction by a norm of its own, which it does not report.
    apart = [p for p in parameters if hasattr(p, "grad_norm_group")]
    others = [p for p in parameters if not hasattr(p, "grad_norm_group")]
    torch.nn.utils.clip_grad_norm_(apart, CLIP_GRAD)
    return torch.nn.utils.clip_grad_norm_(others, CLIP_GRAD)
