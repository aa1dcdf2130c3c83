"""The reference of jobs drawn at random: one process, one sample a forward pass, the loss by hand.

Nothing of the package takes part but the values that it is given: Megatron's model on plain
``[1, length]`` rows, `torch.log_softmax`, sums over lists of samples, `torch.optim.AdamW`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from bootstrap import build_model, pipeline_config
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from kit import cpu_kernels
from kit.model import (
    ADAM,
    CLIP_GRAD,
    MAX_SEQUENCE_LENGTH,
    ROUTING,
    freeze,
    layer_spec,
    named_parameters,
    transformer_config,
)
from kit.objective import (
    KL_WEIGHT,
    MEANS_OF_THE_PAGE,
    kl_terms,
    policy_terms,
    terms_by_hand,
)
from kit.samples import ALLOWED, VOCABULARY, multimodal_positions
from mcore_batching.megatron import compat
from mcore_batching.planning import ParallelDims

WEIGHTS = {"policy": 1.0, "kl": KL_WEIGHT, "entropy": -0.2, "page": 0.2}
"""Of the terms in the loss."""
LEFT_OUT = (
    *("recompute", "pipeline_model_parallel_layout", "num_layers_in", "batch_p2p", "overlap_p2p"),
    *("moe_aux", "moe_z", "moe_router_load"),  # by definition below
)
"""How settings begin that the reference has not."""


class RandomReference:
    """The plain model of a drawn job, trained as the job says."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._objective = job["objective"]
        drawn = job["model"]
        settings = (pipeline_config(ParallelDims()) | drawn["settings"]).items()
        kept = {n: v for n, v in settings if not n.startswith(LEFT_OUT)}
        config = transformer_config(drawn["kind"], **kept)
        self._model = plain_model_of(drawn["kind"], config, **drawn["options"])
        if drawn["trained"] != "all":
            freeze(drawn["trained"], self._model)
            self._model.to(torch.device(torch.cuda.current_device()))  # adapters, too
        self._parameters = dict(named_parameters([self._model]))
        self._trained = {n: p for n, p in self._parameters.items() if p.requires_grad}
        generator = torch.Generator(device="cpu").manual_seed(job["seed"])
        with torch.no_grad():
            for parameter in self._parameters.values():
                if parameter.dim() == 1:  # norms of 1 and biases of 0 would hide what they do
                    noise = torch.rand(parameter.shape, generator=generator, device="cpu")
                    parameter += 0.2 * (noise.to(parameter.device) - 0.5)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=ADAM["lr"],
            eps=ADAM["adam_eps"],
            betas=(ADAM["adam_beta1"], ADAM["adam_beta2"]),
            weight_decay=0.0,
        )
        # Which keys sparse attention takes may hang on rounding, too.
        self._gaps = [0.0] if "dsa_indexer_topk" in drawn["settings"] else []
        self._is_banned = job["banned"] is not None
        self._is_replayed = drawn["kind"] == "replay"
        self._has_axes = drawn["options"]["position_embedding_type"] == "mrope"
        self._balancing = job["balancing"] or {}
        self._routed: list[Tensor] = []
        self._ahead: dict[int, Any] = {}
        for name, module in self._model.named_modules():
            if isinstance(module, TopKRouter) and not (self._is_replayed and "mtp" not in name):
                module.register_forward_hook(self._see_gap)

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().cpu().clone() for name, p in self._parameters.items()}

    @property
    def smallest_gap(self) -> float:
        """Between the last expert that any router took and the first that it did not."""
        return min(self._gaps, default=float("inf"))

    def _see_gap(self, router: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
        del output
        logits = (inputs[0].float() @ router.weight.float().T).flatten(0, -2)
        self._routed.append(logits)
        best = logits.detach().topk(router.topk + 1).values
        self._gaps.append(float((best[:, -2] - best[:, -1]).min()))

    def statistics(
        self, samples: Mapping[str, list[Any]], i: int
    ) -> tuple[Tensor, Tensor, list[Tensor], list[tuple[Tensor, ...]]]:
        """Log-probs and entropies of a sample's response, 0 where nothing predicts a token; what
        its routers saw, and hidden states of further tokens."""
        tokens = samples["tokens"][i].to(torch.cuda.current_device())
        length, response = len(tokens), samples["response_lengths"][i]
        if not length:  # the model runs on one token or more
            nothing = torch.zeros(0, device=tokens.device)
            return nothing, nothing, [], []
        if self._is_replayed:
            self._tell_routers(samples["rollout_routed_experts"][i])
        positions = torch.arange(length, device=tokens.device)[None]
        if self._has_axes:
            positions = multimodal_positions(length)[:, None].to(tokens.device)
        self._routed.clear()
        future = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
        with hidden_states_kept() as kept:
            logits = self._model(tokens[None], positions, future)[0].float()
        logits = logits / self._objective["temperature"]
        if self._is_banned:
            logits = logits[:, :ALLOWED]
        each = torch.log_softmax(logits, -1)
        log_probs = torch.cat([each.new_zeros(1), each[:-1].gather(1, tokens[1:, None])[:, 0]])
        entropies = torch.cat([each.new_zeros(1), -(each.exp() * each).sum(-1)[:-1]])
        responses = log_probs[length - response :], entropies[length - response :]
        return *responses, [*self._routed], kept

    def _later(
        self, samples: Mapping[str, list[Any]], i: int, kept: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """At each depth the losses of a sample's tokens, and their weights."""
        weight = self._model.output_layer.weight
        if self._model.share_embeddings_and_output_weights:
            weight = self._model.shared_embedding_or_output_weight()
        if getattr(self._model.config, "mtp_detach_heads", False):
            weight = weight.detach()
        tokens = samples["tokens"][i].to(weight.device)
        mask = torch.zeros(len(tokens))
        mask[len(tokens) - samples["response_lengths"][i] :] = trained_mask(samples, i)
        pairs = []
        for depth, states in enumerate(kept[1:], 1):
            each = torch.log_softmax((states[:, 0] @ weight.t()).float(), -1)[: -depth - 1]
            losses = -each.gather(1, tokens[depth + 1 :, None])[:, 0]
            pairs.append((losses, mask[depth + 1 :].to(weight.device)))
        return pairs

    def _tell_routers(self, experts: Tensor) -> None:
        """Layer by layer; a sample's last token, for which nothing follows, takes the first."""
        last = torch.arange(experts.shape[2]).expand(1, *experts.shape[1:])
        told = torch.cat((experts.long(), last)).to(torch.cuda.current_device())
        for layer in self._model.decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if router is not None:
                router.router_replay.set_target_indices(told[:, layer.layer_number - 1])
                router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def outputs(
        self, samples: Mapping[str, list[Any]], *, is_trained_next: bool
    ) -> list[tuple[Tensor, Tensor]]:
        """Log-probs and entropies of every response; a step of the same samples goes on from it."""
        with torch.set_grad_enabled(is_trained_next):
            found = [self.statistics(samples, i) for i in range(len(samples["tokens"]))]
        self._ahead = dict(enumerate(found)) if is_trained_next else {}
        return [(each[0].detach().cpu(), each[1].detach().cpu()) for each in found]

    def step(
        self, samples: Mapping[str, list[Any]], rows: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        """One optimizer step on the samples at these places, of which `rows` lie together.

        Returns:
            ``metrics``, name to the value and the mean of its terms' sizes; ``counts`` (samples,
            trained samples, tokens); ``weights`` afterwards; where there are samples, else nothing
            is updated, ``gradients`` and ``grad_norm``.
        """
        terms: dict[str, list[Tensor]] = {"policy": [], "kl": [], "entropy": [], "page": []}
        page, masks, farthest = self._objective["page"], list[Tensor](), 1.0
        chosen = sorted(i for row in rows for i in row)
        routed: dict[int, list[Tensor]] = {}
        later: list[list[tuple[Tensor, Tensor]]] = []
        for i in chosen:
            made = self._ahead.pop(i, None) or self.statistics(samples, i)
            log_probs, entropies, routed[i], passes = made
            if passes:
                later.append([pair for kept in passes for pair in self._later(samples, i, kept)])
            farthest = max([farthest, *log_probs.detach().abs().tolist()])
            masks.append(trained_mask(samples, i).to(log_probs.device))
            behaviour, advantages, anchor, engine = (
                samples[name][i].to(log_probs.device)
                for name in ("behaviour", "advantages", "ref_log_probs", "rollout_log_probs")
            )
            is_policy = self._objective["terms"] == "policy"
            policy = policy_terms(log_probs, behaviour, advantages) if is_policy else -log_probs
            terms["policy"].append(policy)
            terms["kl"].append(kl_terms(log_probs, anchor))
            terms["entropy"].append(entropies)
            if page is not None:
                given = log_probs, behaviour, engine, advantages, masks[-1]
                terms["page"].append(terms_by_hand(page, *given))
        named = {name: self._objective[name] for name in ("policy", "kl", "entropy")}
        named |= {"page": MEANS_OF_THE_PAGE[page]} if page is not None else {}
        means = {
            # Where a log-prob goes through an exponential, its error becomes a relative one.
            name: _mean(_groups(mean, samples, chosen, masks), terms[name], masks, farthest)
            for name, mean in named.items()
            if mean is not None
        }
        means["loss"] = (
            sum(WEIGHTS[name] * value for name, (value, _) in means.items()),
            sum(abs(WEIGHTS[name]) * size for name, (_, size) in means.items()),
        )
        loss, config = means["loss"][0], self._model.config
        for depth in range(config.mtp_num_layers or 0):
            losses, weights = [each[depth][0] for each in later], [each[depth][1] for each in later]
            made = _mean([range(len(losses))], losses, weights, 1.0)
            means[f"mtp_{depth + 1} loss"] = made
            loss = loss + made[0] * config.mtp_loss_scaling_factor / config.mtp_num_layers
        num_tokens = sum(int((mask != 0).sum()) for mask in masks)
        if "indexer_loss" in self._balancing:  # a sum over the tokens of each sample, by Megatron
            from megatron.core.transformer.experimental_attention_variant import dsa

            dsa.DSAIndexerLossAutoScaler.set_loss_scale(torch.tensor(1 / max(num_tokens, 1)))
        elif self._balancing:
            loss = loss + self._unbalanced(routed, rows) / max(num_tokens, 1)
        result: dict[str, Any] = {
            "metrics": {name: [float(value), float(size)] for name, (value, size) in means.items()},
            "counts": [len(chosen), sum(bool(mask.any()) for mask in masks), num_tokens],
        }
        if chosen:  # else nothing is updated
            result |= self._update(loss)
        return result | {"weights": self.weights}

    def _unbalanced(
        self, routed: Mapping[int, Sequence[Tensor]], rows: Sequence[Sequence[int]]
    ) -> Tensor:
        """The losses that balance experts by their definitions (Switch Transformer, ST-MoE), of
        each row weighted by its tokens. A row is one sequence to the loss of sequences."""
        total, weights = torch.zeros(()), self._balancing
        of_balance = weights.get("aux_loss", 0.0) + weights.get("seq_aux_loss", 0.0)
        for row in filter(None, rows):
            for layers in zip(*(routed[i] for i in row if routed[i]), strict=True):
                logits = torch.cat(layers)
                top_k, experts = ROUTING["top_k"], logits.shape[1]
                chosen = torch.zeros_like(logits).scatter(1, logits.topk(top_k).indices, 1.0)
                balance = experts * (chosen.mean(0) / top_k * logits.softmax(-1).mean(0)).sum()
                peaks = logits.logsumexp(-1).square().mean()
                term = of_balance * balance + weights.get("z_loss", 0.0) * peaks
                total = total + term * len(logits)
        return total

    def _update(self, loss: Tensor) -> dict[str, Any]:
        self._optimizer.zero_grad()
        # Every parameter has a gradient, that of an expert that nobody asked, too.
        (loss + sum(p.sum() for p in self._trained.values()) * 0.0).backward()
        norm = clip(self._model)
        gradients = {name: p.grad.cpu().clone() for name, p in self._trained.items()}
        self._optimizer.step()
        self._ahead.clear()  # by other weights
        return {"gradients": gradients, "grad_norm": float(norm)}


def trained_mask(samples: Mapping[str, list[Any]], i: int) -> Tensor:
    """Weight of each response token of a sample; a first token of all has no prediction."""
    response = samples["response_lengths"][i]
    given = samples.get("loss_masks")
    mask = torch.ones(response) if given is None else given[i].float().clone()
    if response == samples["total_lengths"][i]:
        mask[:1] = 0
    return mask


def _groups(
    name: str, samples: Mapping[str, list[Any]], chosen: Sequence[int], masks: Sequence[Tensor]
) -> list[Sequence[int]]:
    """The places in ``chosen`` of samples that count as one in a mean of this name."""
    if name == "trained sample":
        return [[place] for place, mask in enumerate(masks) if mask.any()]
    keys: list[Any] = [*chosen]
    if name == "token":
        keys = [0 for _ in chosen]
    elif name != "sample":
        keys = [samples["uids"][i] for i in chosen]
    if name == "trajectory":
        keys = [(uid, samples["trajectory_ids"][i]) for uid, i in zip(keys, chosen, strict=True)]
    return [[i for i, other in enumerate(keys) if other == key] for key in dict.fromkeys(keys)]


def _mean(
    groups: Sequence[Sequence[int]], terms: Sequence[Tensor], masks: Sequence[Tensor], each: float
) -> tuple[Any, float]:
    """Mean over groups of the means over their tokens, and that of the terms' sizes, ``each`` as
    large again; 0 of nothing."""
    found = []
    for group in groups:
        weight = sum(float(masks[i].double().sum()) for i in group) or 1.0
        value = sum((terms[i] * masks[i]).sum() for i in group)
        size = sum(float(((1 + terms[i].detach().abs()) * masks[i]).sum()) for i in group)
        found.append((value / weight, each * size / weight))
    return tuple(sum(column) / len(found) for column in zip(*found, strict=True)) or (0, 0)


def plain_model_of(
    kind: str, config: TransformerConfig, *, hybrid_layer_pattern: str | None = None, **options: Any
) -> Any:
    """The whole model of a config, on plain rows: a hybrid one of a pattern, or a GPT model."""
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
    later_tokens = None
    if config.mtp_num_layers:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

        later_tokens = get_gpt_mtp_block_spec(config, local_layer, use_transformer_engine=False)
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(kind, local_layer, config),
        vocab_size=VOCABULARY,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        pre_process=True,
        post_process=True,
        mtp_block_spec=later_tokens,
        **options,
    ).to(torch.device(torch.cuda.current_device()))


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


def clip(model: Any) -> Tensor:
    """Clip gradients as Megatron does, and return the norm that it reports."""
    parameters = [*model.parameters()]
    # It clips detached multi-token prediction by a norm of its own, which it does not report.
    apart = [p for p in parameters if hasattr(p, "grad_norm_group")]
    others = [p for p in parameters if not hasattr(p, "grad_norm_group")]
    torch.nn.utils.clip_grad_norm_(apart, CLIP_GRAD)
    return torch.nn.utils.clip_grad_norm_(others, CLIP_GRAD)
