"""One micro-batch through one model chunk, and what went wrong with its output."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

from mcore_batching.batch import PackedMicroBatch
from mcore_batching.megatron import compat
from mcore_batching.megatron.consensus import Consensus
from mcore_batching.megatron.errors import ForwardFailedError


def run_chunk(chunk: Any, row: PackedMicroBatch) -> Tensor:
    """The chunk's output for a packed row.

    Every chunk gets the packed-sequence parameters, middle stages included: without them their
    attention would cross samples.

    Args:
        chunk: a model chunk, wrapped or not.
        row: this context-parallel rank's slice of the micro-batch, on the device.

    Returns:
        logits ``[1, local tokens, local vocabulary]`` from the last stage's last chunk, hidden
        states from the others.
    """
    arguments: dict[str, Any] = {
        "input_ids": row.tokens,
        "position_ids": row.position_ids,
        "attention_mask": None,
        "labels": None,
        "packed_seq_params": compat.packed_seq_params(
            row.cu_seqlens_padded, row.max_seqlen, row.host_cu_seqlens_padded
        ),
    }
    if get_model_config(chunk).num_moe_experts:
        arguments["padding_mask"] = padding_mask(chunk, row)
    output: Tensor = chunk(**arguments, **_multimodal_inputs(row))
    return output


def raise_together(consensus: Consensus, failed: list[Exception]) -> None:
    """Raise on every rank if a function of the model's output raised on any.

    A collective over all ranks, after the pipeline has run dry.

    Args:
        rendezvous: where ranks compare notes.
        failed: this rank's exceptions, in the order of micro-batches.

    Raises:
        ForwardFailedError: if any rank has an exception.
    """

    def first_failure() -> None:
        if failed:
            raise failed[0]

    consensus.guard(ForwardFailedError, first_failure, lambda _: None)


def padding_mask(chunk: Any, row: PackedMicroBatch) -> Tensor:
    """Bool ``[1, tokens]``, True for padding; a placeholder is padding throughout.

    The first stage takes the mask of all tokens and scatters it itself under sequence parallelism,
    later stages expect their own tokens.
    """
    mask = torch.ones_like(row.padding_mask) if row.is_placeholder else row.padding_mask
    scatters = get_attr_wrapped_model(chunk, "pre_process")
    if scatters or not get_model_config(chunk).sequence_parallel:
        return mask
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    own: Tensor = mask.chunk(size, dim=1)[rank].contiguous()
    return own


def _multimodal_inputs(row: PackedMicroBatch) -> dict[str, Tensor]:
    """Model inputs of all samples, concatenated name by name."""
    gathered: dict[str, list[Tensor]] = {}
    for inputs in row.fields.get("multimodal_train_inputs") or []:
        for name, tensor in (inputs or {}).items():
            gathered.setdefault(name, []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in gathered.items()}
