"""The last layer's product fused with log-probs: logits of all tokens are never in memory.

Under ``--dynamic-batch-fuse-output-layer`` the last stage hands losses its hidden states and the
weight, as `FusedLogits`; `response_log_probs` and its siblings multiply them a chunk of tokens at a
time. The price is a second product of the response tokens in the backward pass, and a float32
gradient of the weight; the gain is all logits and their gradient.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from mcore_batching.megatron import compat
from mcore_batching.megatron.errors import DynamicBatchArgumentError


@dataclasses.dataclass(frozen=True)
class FusedLogits:
    """Factors of the logits; taken by `response_log_probs` and its siblings in their place.

    Attributes:
        hidden: ``[1, local tokens, hidden size]``, under sequence parallelism this tensor-parallel
            rank's part of the tokens.
        weight: ``[local vocabulary, hidden size]``.
        sequence_parallel: True if the tokens are split over tensor-parallel ranks.
    """

    hidden: Tensor
    weight: Tensor
    sequence_parallel: bool

    def whole_hidden(self) -> Tensor:
        """``[local tokens, hidden size]`` on every tensor-parallel rank."""
        rows = self.hidden[0]
        # Both sum up the gradient over the ranks in the backward pass, as Megatron's layer does.
        if self.sequence_parallel:
            gathered: Tensor = tensor_parallel.gather_from_sequence_parallel_region(rows)
            return gathered
        copied: Tensor = tensor_parallel.copy_to_tensor_model_parallel_region(rows)
        return copied


Logits = Tensor | FusedLogits


def check_can_be_fused(chunks: list[Any]) -> None:
    """Refuse models whose last layer is more than a product."""
    for chunk in chunks:
        layer = getattr(unwrap_model(chunk), "output_layer", None)
        # Only the last stage's last chunk has the layer.
        reason = "" if layer is None else compat.layers.why_no_plain_product(layer)
        if not reason and getattr(get_model_config(chunk), "use_mup", False):
            reason = "scales its logits (--use-mup)"
        if reason:
            raise DynamicBatchArgumentError(
                f"the output layer {reason}, so it cannot be fused with log-probs: unset "
                "--dynamic-batch-fuse-output-layer"
            )


@contextlib.contextmanager
def output_layer(chunk: Any, fused: bool) -> Iterator[Callable[[Tensor], Logits]]:
    """Let one forward pass of a chunk inside the block return what goes into its output layer.

    Yields a function from the chunk's output to what losses are given: `FusedLogits` on the last
    stage if ``fused``, else the output itself.
    """
    layer = getattr(unwrap_model(chunk), "output_layer", None)
    if layer is None or not fused:
        yield lambda output: output
        return
    weights: list[Tensor] = []

    def keep(hidden: Tensor, weight: Tensor | None = None, **unused: Any) -> tuple[Tensor, None]:
        weights.append(layer.weight if weight is None else weight)
        return hidden, None

    # On this one module and for this one pass: the model's own forward and its hooks run as ever.
    with compat.schedules.replaced(layer, "forward", keep):
        yield lambda output: FusedLogits(output, weights[0], layer.sequence_parallel)


def tensors_of(logits: Logits) -> tuple[Tensor, ...]:
    """The tensors whose gradients a loss makes."""
    return (logits,) if isinstance(logits, torch.Tensor) else (logits.hidden, logits.weight)
