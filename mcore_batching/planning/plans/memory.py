"""Memory that a step's plan takes on a rank beside weights, gradients and the optimizer's state.

Tokens in flight are exact. Bytes are an estimate: the tensors that layers keep for their backward
pass with fused kernels (after Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022, without dropout), and the logits. Unfused layers keep more,
megatron-core's local ones 1.7 times as much in float32 and 1.9 in bfloat16 (counted on a CPU);
fragments, communication buffers and what a kernel needs meanwhile are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_batching.planning.costs.layers_of import Layers
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.plans.plan import StepPlan
from mcore_batching.planning.plans.statistics import StepStatistics

LOG_PROB_CHUNK_TOKENS = 512
"""Tokens that log-probs work on at a time, with up to three copies of their float32 logits: 0.9 GB
for a vocabulary of 152064. Doubled, they take twice that and fewer kernel launches."""
BYTES_PER_VALUE = 2
"""Bytes of an activation, in bfloat16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A transformer's sizes, as far as its activations and logits depend on them."""

    layers: int
    """Layers of the whole model, without those of multi-token prediction."""
    hidden: int
    """Size of the residual stream."""
    inner: int
    """Values of a token that each layer keeps and tensor parallelism cuts: queries, keys, values
    and attention's output; inputs and output of the activation function, with experts those of all
    that a token is sent to."""
    vocab: int
    """Entries of the output layer."""
    recompute: bool = False
    """True if each layer keeps its input alone, and computes the rest anew."""
    depths: int = 0
    """Depths of multi-token prediction: a layer and logits each on the last stage."""
    bytes_per_logit: int = 6
    """At the peak: 6 where half-precision logits are copied to float32, Megatron's default; 2 where
    they are not."""
    fused_output: bool = False
    """True if the output layer is multiplied inside log-probs, a chunk of tokens at a time."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """The shape in a config as `Layers` reads it; a `ConfigError` if a size is missing or no
        integer of 1 or more."""
        sizes = Layers(config)
        if sizes.size("experts", 0):  # a token keeps activations in each that it is sent to
            ffn = sizes.size("experts_per_token") * sizes.size("expert_ffn") + sizes.shared_ffn
        else:
            ffn = sizes.size("ffn")
        heads = sizes.size("heads")
        of_attention = 2 * (heads + sizes.size("groups", heads))
        return cls(
            layers=sizes.size("layers"),
            hidden=sizes.hidden,
            inner=of_attention * sizes.size("dim", sizes.hidden // heads)
            + (3 if sizes.gated else 2) * ffn,
            vocab=sizes.size("vocab"),
            recompute=config.get("recompute_granularity") == "full",
            depths=sizes.size("depths", 0),
        )

    def activation_bytes_per_token(self, dims: ParallelDims, *, layers: float) -> float:
        """Bytes that `layers` layers keep for one token on a rank."""
        # Outside the cut layers activations are whole, unless sequence parallelism cuts them too.
        whole = dims.tensor_parallel if dims.sequence_parallel else 1
        if self.recompute:
            return layers * BYTES_PER_VALUE * self.hidden / whole
        outside = 4 * self.hidden / whole  # inputs and outputs of both norms
        return layers * BYTES_PER_VALUE * (outside + self.inner / dims.tensor_parallel)


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedMemory:
    """Peak bytes per rank, beside weights, gradients and optimizer state."""

    first_stage_bytes: float
    """Activations of the first pipeline stage."""
    last_stage_bytes: float
    """Activations of the last stage, the logits of its largest micro-batch, and log-probs."""
    logit_bytes: float
    """The logits alone, those of multi-token prediction with them; of a fused output layer what it
    holds in place of them."""


def predicted_memory(
    statistics: StepStatistics, step: StepPlan, shape: ModelShape
) -> PredictedMemory:
    """Peak memory of the first and of the last pipeline stage, given a step's statistics or several
    steps' added together, and one of these steps."""
    dims = step.dims
    # Without a backward pass a layer's activations are gone when the next one runs.
    layers = 1.0 if step.forward_only else shape.layers / dims.pipeline_parallel
    per_token = shape.activation_bytes_per_token(dims, layers=layers) / dims.context_parallel
    # Logits and log-probs of a row are there at once, on the last stage, on top of its activations.
    vocab = shape.vocab / dims.tensor_parallel
    row = statistics.largest_row_tokens / dims.context_parallel
    depths = 0 if step.forward_only else shape.depths
    # Forward passes alone make no logits, either.
    if shape.fused_output or step.forward_only:
        # Hidden states and their gradient; the weight's, added up in float32 from products in the
        # model's type.
        trains = not step.forward_only
        logits = row * shape.hidden * BYTES_PER_VALUE * (1 + trains + depths)
        logits += trains * vocab * shape.hidden * (4 + BYTES_PER_VALUE)
    else:
        # Megatron's loss of a depth keeps the softmax until its backward pass, always in float32.
        logits = row * vocab * (shape.bytes_per_logit + depths * 4)
    # Up to three float32 copies of a chunk's logits.
    log_probs = 3 * 4 * min(row, LOG_PROB_CHUNK_TOKENS) * vocab
    # The last chunk's alone, as its backward pass follows at once.
    further = row * shape.activation_bytes_per_token(dims, layers=depths)
    held = statistics.last_stage_inflight_tokens * per_token + further
    return PredictedMemory(
        first_stage_bytes=statistics.peak_inflight_tokens * per_token,
        last_stage_bytes=held + logits + log_probs,
        logit_bytes=logits,
    )
