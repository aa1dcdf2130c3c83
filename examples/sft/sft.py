"""Supervised fine-tuning: a script of one's own around ``megatron.training``.

    torchrun --nproc-per-node 4 examples/sft/sft.py --data-path FILE [Megatron's arguments]
    torchrun --nproc-per-node 4 -m mcore_batching.run examples/sft/sft.py \\
        --data-path FILE --use-dynamic-batch-size --max-tokens-per-gpu 4096 [the same]

Written for megatron-core 0.19, and without a line about ``mcore_batching``. Files are JSON lines,
see `json_lines`; ``--tokenizer-type NullTokenizer --vocab-size 258`` reads them as bytes. The model
is a `GPTModel`, with ``--hybrid-layer-pattern`` a `HybridModel`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import is_first_or_last_pipeline_stage
from sft_datasets import build_datasets, byte_level_tokenizer
from torch import Tensor

BATCH_KEYS = (
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "hybrid_cp_group",
    "labels",
    "local_cp_size",
    "loss_mask",
    "max_seqlen",
    "position_ids",
    "tokens",
)


def get_batch(
    data_iterator: Iterator[dict[str, Tensor]] | None, vp_stage: int | None = None
) -> list[Any]:
    """The next micro-batch, in the order of `BATCH_KEYS`: ``[micro_batch_size, seq_length]``."""
    batch: dict[str, Any] = dict.fromkeys(BATCH_KEYS)
    if is_first_or_last_pipeline_stage(vp_stage):
        # Tensor-parallel rank 0 has read it.
        read = None if data_iterator is None else next(data_iterator)
        batch |= tensor_parallel.broadcast_data(
            ["tokens", "labels", "position_ids"], read, torch.int64
        )
        batch |= tensor_parallel.broadcast_data(["loss_mask"], read, torch.float32)
        batch = get_batch_on_this_cp_rank(
            batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group()
        )
    return [batch[key] for key in BATCH_KEYS]


def loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum over trained tokens, their number, and both as a report."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens])}


def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
    """One micro-batch through this rank's part of the model."""
    (
        attention_mask,
        cu_seqlens,
        cu_seqlens_padded,
        hybrid_cp_group,
        labels,
        local_cp_size,
        loss_mask,
        max_seqlen,
        position_ids,
        tokens,
    ) = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    packed_seq_params = None
    if cu_seqlens is not None:
        update_seqlen_stats_from_cu_seqlens(cu_seqlens.squeeze(0))
        offsets, longest = cu_seqlens_padded.squeeze(0), int(max_seqlen)
        packed_seq_params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            local_cp_size=local_cp_size,
            cp_group=hybrid_cp_group,
        )
    losses = model(
        tokens, position_ids, attention_mask, labels=labels, packed_seq_params=packed_seq_params
    )
    return losses, partial(loss_func, loss_mask)


def datasets_provider(num_samples: tuple[int, int, int], vp_stage: int | None = None) -> Any:
    """Training, validation and test data, where stages read it."""
    args = get_args()
    if not is_first_or_last_pipeline_stage(vp_stage):
        return None, None, None
    reads_bytes = args.tokenizer_type == "NullTokenizer"
    tokenizer = byte_level_tokenizer() if reads_bytes else get_tokenizer()
    return build_datasets(args, tokenizer, num_samples)


if __name__ == "__main__":
    args = parse_and_validate_args()
    if args.hybrid_layer_pattern:
        args.spec = args.spec or ["mcore_batching.megatron", "packed_hybrid_stack_spec"]
        config = hybrid_config_from_args(args)
    else:
        config = gpt_config_from_args(args)
    pretrain(
        pretrain_cfg_container_from_args(args, config),
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
    )
    # Its threads would run on while the interpreter goes down, which may abort the process.
    dist.destroy_process_group()
