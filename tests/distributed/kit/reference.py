"""The reference: one process, one sample a forward pass, nothing packed.

Megatron's own model with its own local attention, on plain ``[1, length]`` batches; log-probs by
`torch.log_softmax`, the loss in one piece, `torch.optim.AdamW`. Run as ``python -m kit.reference
FOLDER KIND...``; writes to FOLDER/KIND.pt weights and log-probs, and for every objective its value,
gradients and the weights after one step; of a kind that ends in `TRAINED` several steps, too.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from kit import cpu_kernels
from kit.model import (
    ADAM,
    CLIP_GRAD,
    HYBRID,
    MAX_SEQUENCE_LENGTH,
    MTP_SCALING_FACTOR,
    ROUTING,
    freeze,
    layer_spec,
    model_options,
    named_parameters,
    transformer_config,
)
from kit.objective import DEFAULT_OBJECTIVE, OBJECTIVES, plain_objective
from kit.samples import VOCABULARY, make_samples, multimodal_positions, routed_experts
from mcore_batching.megatron import compat
from mcore_batching.megatron.standalone.bootstrap import (
    build_model,
    initialize_model_parallel,
    initialize_process_group,
    pipeline_config,
)
from mcore_batching.planning import ParallelDims

TRAINED = "-trained"
_NUM_STEPS = 6  # rounding grows with every one, tenfold from the seventh on


def plain_model(kind: str, **settings: Any) -> Any:
    """The whole model on this rank, whatever stage of a pipeline it is, on Megatron's own spec."""
    config = transformer_config(kind, **pipeline_config(ParallelDims()), **settings)
    model = plain_model_of(
        config,
        layer=functools.partial(layer_spec, kind, config=config),
        share_embeddings_and_output_weights=False,
        **model_options(kind),
    )
    if kind not in HYBRID:
        freeze(kind, model)
    return model.to(torch.device(torch.cuda.current_device()))  # adapters, too


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


def plain_log_probs(model: Any, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """Log-probability of every token of ``[samples, length]`` tokens, 0 of the first of each.

    Args:
        model: on plain rows.
        tokens: of samples of one length.
        positions: ``[axes, samples, length]`` of multimodal models.
    """
    num_samples, length = tokens.shape
    if positions is None:
        positions = torch.arange(length, device=tokens.device).expand(num_samples, length)
    future = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
    logits = model(tokens, positions, future).float()
    predicted = torch.log_softmax(logits, -1)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    return torch.cat((predicted.new_zeros(num_samples, 1), predicted), 1)


@contextlib.contextmanager
def hidden_states_kept() -> Iterator[list[tuple[Tensor, ...]]]:
    """Of each forward pass the hidden states of every depth, in place of Megatron's own losses."""
    kept: list[tuple[Tensor, ...]] = []

    def keep(hidden_states: Tensor, *, config: TransformerConfig, **unused: Any) -> Tensor:
        del unused
        kept.append(hidden_states.chunk(1 + config.mtp_num_layers))
        return kept[-1][0]

    with contextlib.ExitStack() as stack:
        for module in compat.layers.modules_with_multi_token_losses():
            stack.enter_context(mock.patch.object(module, "process_mtp_loss", keep))
        yield kept


def mtp_losses(
    model: Any, samples: Mapping[str, list[Any]], kept: list[tuple[Tensor, ...]]
) -> list[Tensor]:
    """At each depth the mean over the trained tokens of all samples that are predicted there."""
    made, weight = [], model.output_layer.weight
    if getattr(model.config, "mtp_detach_heads", False):
        weight = weight.detach()
    for depth in range(1, len(kept[0])):
        total, count = torch.zeros(()), 0.0
        for i, states in enumerate(kept):
            tokens, response = samples["tokens"][i], samples["response_lengths"][i]
            mask = torch.zeros(len(tokens))
            mask[len(tokens) - response :] = samples["loss_masks"][i].float()
            logits, _ = model.output_layer(states[depth], weight=weight)
            # Position j predicts the token that comes depth + 1 places later, if there is one.
            predicted = torch.log_softmax(logits[:, 0].float(), -1)[: -depth - 1]
            losses = -predicted.gather(1, tokens[depth + 1 :, None])[:, 0]
            total = total + (losses * mask[depth + 1 :]).sum()
            count += float(mask[depth + 1 :].sum())
        made.append(total / count)
    return made


def plain_adam(model: Any) -> torch.optim.Optimizer:
    """PyTorch's own optimizer with the settings of `kit.model.adam`."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=ADAM["lr"],
        eps=ADAM["adam_eps"],
        betas=(ADAM["adam_beta1"], ADAM["adam_beta2"]),
        weight_decay=0.0,
    )


def main(folder: str, *kinds: str) -> None:
    """Write the reference results of each model kind."""
    initialize_process_group()
    initialize_model_parallel(ParallelDims())
    for kind in kinds:
        torch.manual_seed(22)  # the same weights whichever kinds are asked for
        model_parallel_cuda_manual_seed(22)  # likewise, of state-space layers
        results = _results(kind.removesuffix(TRAINED), is_trained=kind.endswith(TRAINED))
        torch.save(results, Path(folder) / f"{kind}.pt")


def _results(kind: str, *, is_trained: bool) -> dict[str, Any]:
    model = plain_model(kind)
    device = next(model.parameters()).device
    samples = {
        key: [v.to(device) if torch.is_tensor(v) else v for v in values]
        for key, values in make_samples().items()
    }
    with hidden_states_kept() as kept:
        log_probs = _log_probs(model, samples, kind)
    later = mtp_losses(model, samples, kept) if kept else []
    weights = {name: p.detach().cpu().clone() for name, p in named_parameters([model])}
    parameters = {name: p for name, p in named_parameters([model]) if p.requires_grad}
    values = {name: plain_objective(log_probs, samples, name) for name in OBJECTIVES}
    named = {f"mtp_{depth} loss": loss for depth, loss in enumerate(later, 1)}
    further = MTP_SCALING_FACTOR / len(later) * torch.stack(later).sum() if later else 0.0
    if kind == "hybrid-dsa-loss":
        from megatron.core.transformer.experimental_attention_variant import dsa

        # A sum over the tokens of all samples, divided by those of the step that are trained on.
        lengths = zip(samples["total_lengths"], samples["loss_masks"], strict=True)
        tokens = sum(int(mask[max(len(mask) - n + 1, 0) :].sum()) for n, mask in lengths)
        dsa.DSAIndexerLossAutoScaler.set_loss_scale(torch.tensor(1 / tokens))
    # All gradients before the first update, which changes what they are computed from.
    gradients = {
        name: torch.autograd.grad(
            value["loss"] + further,
            list(parameters.values()),
            retain_graph=True,
            materialize_grads=True,  # zeros of what no loss trains, as sparse attention's indexer
        )
        for name, value in values.items()
    }
    objectives = {}
    for name, value in values.items():
        objectives[name] = {
            "metrics": {key: float(each.detach()) for key, each in (value | named).items()},
            **_one_step(model, dict(zip(parameters, gradients[name], strict=True)), weights),
        }
    return {
        "weights": weights,
        "log_probs": [each.detach().cpu() for each in log_probs],
        "objectives": objectives,
        "trajectory": _trajectory(model, samples, kind, weights) if is_trained else [],
        **objectives[DEFAULT_OBJECTIVE],
    }


def _log_probs(model: Any, samples: Mapping[str, list[Any]], kind: str) -> list[Tensor]:
    log_probs = []
    for i, (tokens, response) in enumerate(
        zip(samples["tokens"], samples["response_lengths"], strict=True)
    ):
        if kind == "replay":
            _tell_routers(routed_experts(**ROUTING)[i])
        positions = multimodal_positions(len(tokens))[:, None] if kind == "mrope" else None
        log_prob = plain_log_probs(model, tokens[None], positions)
        log_probs.append(log_prob[0, len(tokens) - response :])
    return log_probs


def _trajectory(
    model: Any, samples: dict[str, list[Any]], kind: str, weights: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """Of steps in a row on the same samples: loss, norm of gradients, and weights after each."""
    parameters = dict(named_parameters([model]))
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    optimizer, steps = plain_adam(model), []
    for _ in range(_NUM_STEPS):
        optimizer.zero_grad()
        loss = plain_objective(_log_probs(model, samples, kind), samples)["loss"]
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        optimizer.step()
        after = {name: p.detach().cpu().clone() for name, p in parameters.items()}
        steps.append({"loss": float(loss), "grad_norm": float(norm), "weights": after})
    return steps


def _tell_routers(experts: Tensor) -> None:
    """Let the routers take the experts of a sample; of its last token, for which nothing follows,
    the first ones."""
    last = torch.arange(experts.shape[2]).expand(1, *experts.shape[1:])
    told = torch.cat((experts.long(), last)).to(torch.cuda.current_device())
    RouterReplay.set_replay_data(list(told.unbind(1)))
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


def _one_step(
    model: Any, gradients: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Clipped gradients, their norm before, and what a step with them makes of these weights."""
    parameters = dict(named_parameters([model]))
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
            parameter.grad = gradients[name].clone() if name in gradients else None
    norm = clip(model)
    plain_adam(model).step()
    return {
        "gradients": {name: parameters[name].grad.cpu().clone() for name in gradients},
        "grad_norm": float(norm),
        "updated": {name: p.detach().cpu().clone() for name, p in parameters.items()},
    }


def clip(model: Any) -> Tensor:
    """Clip gradients as Megatron does, and return the norm that it reports."""
    parameters = [*model.parameters()]
    # It clips detached multi-token prediction by a norm of its own, which it does not report.
    apart = [p for p in parameters if hasattr(p, "grad_norm_group")]
    others = [p for p in parameters if not hasattr(p, "grad_norm_group")]
    torch.nn.utils.clip_grad_norm_(apart, CLIP_GRAD)
    return torch.nn.utils.clip_grad_norm_(others, CLIP_GRAD)


if __name__ == "__main__":
    main(*sys.argv[1:])
