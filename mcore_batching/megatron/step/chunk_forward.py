"""The forward pass of one packed row through one model chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
from torch import Tensor

from mcore_batching.batch import PackedMicroBatch
from mcore_batching.megatron import compat
from mcore_batching.megatron.job.options import Options
from mcore_batching.megatron.job.row_groups import row_group
from mcore_batching.megatron.logits.fused_output import Logits, output_layer
from mcore_batching.megatron.rows.routing_replay import replayed
from mcore_batching.megatron.step.model_inputs import joined_multimodal_inputs, padding_mask
from mcore_batching.megatron.step.multi_token import LaterLosses, predict_later_tokens


def run_for_losses(
    options: Options, chunk: Any, row: PackedMicroBatch, later: LaterLosses | None = None
) -> tuple[Tensor, Callable[[Tensor], Logits]]:
    """The chunk's output, logits ``[1, local tokens, local vocabulary]`` or hidden states, and what
    makes of it, on the last stage, what losses are given.

    ``row`` is this context-parallel rank's slice, on the device; without ``later`` the layers of
    multi-token prediction are left out.
    """
    arguments: dict[str, Any] = {
        "input_ids": row.tokens,
        "position_ids": row.position_ids,
        # Offsets say what attends to what; a dense mask has the square of the row's tokens.
        "attention_mask": None,
        # With labels Megatron's model would return its own loss instead of logits.
        "labels": None,
        # To every chunk, middle stages included: without them attention would cross samples.
        "packed_seq_params": compat.packed_rows.packed_seq_params(
            row.cu_seqlens_padded,
            row.max_seqlen,
            row.host_cu_seqlens_padded,
            row_group(row.context_parallel_size),
        ),
    }
    # Routers balance experts by the tokens they count: padding must not be among them.
    if get_model_config(chunk).num_moe_experts:
        arguments["padding_mask"] = padding_mask(chunk, row)
    predict_later_tokens(arguments["packed_seq_params"], chunk, row, later)
    # Else the wrapper copies logits to float32. The model inside would refuse the argument.
    if options.keeps_logits_in_model_dtype and has_half_precision_wrapper(chunk):
        arguments["fp32_output"] = False
    multimodal = joined_multimodal_inputs(row.fields.get("multimodal_train_inputs") or [])
    with output_layer(chunk, options.fuse_output_layer) as logits_of, replayed(chunk, row):
        return chunk(**arguments, **multimodal), logits_of


def has_half_precision_wrapper(chunk: Any) -> bool:
    """True if a chunk is, or wraps, Megatron's `Float16Module`."""
    # Megatron wraps several times over: data parallelism around half precision.
    module = chunk
    while module is not None and not isinstance(module, Float16Module):
        module = getattr(module, "module", None)
    return module is not None
