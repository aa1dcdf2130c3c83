"""A training script as someone has it who vendors a patched Megatron-LM 0.19.

Stands in for ``pretrain_gpt.py``, which no wheel ships: padded samples of varying length, a
``get_batch`` with the patch's lines in it, and Megatron's own ``pretrain``. The model is built from
the local layer spec; a GPU job would use Transformer Engine's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import (
    core_transformer_config_from_args,
    parse_and_validate_args,
)

FIELDS = ("attention_mask", "cu_seqlens", "cu_seqlens_padded", "hybrid_cp_group", "labels")
FIELDS += ("local_cp_size", "loss_mask", "max_seqlen", "position_ids", "tokens")


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sample i has a length that depends on i, and is padded to ``seq_length``."""

    def __init__(self, count: int, seq_length: int) -> None:
        self._count, self._seq_length = count, seq_length

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator(device="cpu").manual_seed(index)
        length = 2 + index * 17 % (self._seq_length - 2)
        tokens = torch.zeros(self._seq_length + 1, dtype=torch.int64)
        tokens[: length + 1] = torch.randint(
            1, 100, (length + 1,), generator=generator, device="cpu"
        )
        places = torch.arange(self._seq_length)
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": (places < length).float(),
            "position_ids": places,
        }


def get_batch(data_iterator: Any) -> list[Any]:
    from mcore_batching.integrations.megatron_lm import next_batch

    packed = next_batch(data_iterator, len(FIELDS))
    if packed is not None:
        return packed
    batch = next(data_iterator) if data_iterator is not None else {}
    return [batch.get(name) for name in FIELDS]


def loss_function(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, ...]:
    loss = (output.view(-1) * loss_mask.view(-1)).sum()
    tokens = loss_mask.sum().to(torch.int)
    report = torch.stack([loss.detach(), tokens])
    return loss, tokens, {"lm loss": report}


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
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
    ) = get_batch(data_iterator)
    del cu_seqlens, hybrid_cp_group, local_cp_size
    packed_seq_params = None
    if cu_seqlens_padded is not None:
        packed_seq_params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens_padded[0],
            cu_seqlens_kv=cu_seqlens_padded[0],
            max_seqlen_q=int(max_seqlen),
            max_seqlen_kv=int(max_seqlen),
        )
    output = model(
        tokens, position_ids, attention_mask, labels=labels, packed_seq_params=packed_seq_params
    )
    return output, partial(loss_function, loss_mask)


def build_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    args = get_args()
    return GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type=args.position_embedding_type,
        share_embeddings_and_output_weights=False,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def build_datasets(train_val_test_num_samples: tuple[int, int, int]) -> list[Samples]:
    return [Samples(count, get_args().seq_length) for count in train_val_test_num_samples]


def main() -> None:
    build_datasets.is_distributed = True  # type: ignore[attr-defined]
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(
        config,
        build_datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider=build_model,
    )


if __name__ == "__main__":
    main()
