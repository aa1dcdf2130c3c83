"""``get_data_iterator``, ``forward_only`` and ``get_batch`` with slime's signatures and row layout.

`mcore_batching.hook` puts them into a framework's modules. They follow slime's
`backends/megatron_utils/data.py` and `model.py` before its pull request 1860; rows are laid out by
`mcore_batching.integrations.slime.rows`. Other layouts are refused before the pipeline starts.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from mcore_batching.batch import (
    DEFAULT_SCHEMA,
    Schema,
    SchemaError,
)
from mcore_batching.integrations.slime.iterator import LiveDataIterator, live_data_iterator
from mcore_batching.integrations.slime.rows import (
    NEEDED_FIELDS,
    check_layout,
    packed_row,
    row_multiple_of,
)
from mcore_batching.integrations.slime.zero_count_mask import zero_count_mask
from mcore_batching.megatron import compat
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.job.arguments import LEARNT
from mcore_batching.megatron.job.options import Options
from mcore_batching.megatron.rollout.data_iterator import (
    DataIterator,
    PlannedRollout,
    plan_micro_batches,
    schedule_of,
)
from mcore_batching.megatron.rollout.rollout_batch import REQUIRED_FIELDS
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.megatron.step.forward_only import forward_only as run_forward_only
from mcore_batching.megatron.step.model_inputs import changed_inputs, joined_multimodal_inputs
from mcore_batching.megatron.topology import model_chunks

# Only fields that planning and forward passes read. Others may be of the whole batch rather than of
# this rank's samples, or log-probs that are already cut for context parallelism.
_PLANNED = (
    *REQUIRED_FIELDS,
    "loss_masks",
    "multimodal_train_inputs",
    "position_ids",
    "dynamic_global_batch_size",
)


def get_data_iterator(
    args: Any,
    model: Any,
    rollout_data: dict[str, Any] | None,
    *,
    schema: Schema = DEFAULT_SCHEMA,
) -> tuple[list[LiveDataIterator], list[int]]:
    """`mcore_batching.megatron.get_data_iterator`, with rows padded as slime pads them.

    A collective over all ranks.

    Args:
        args: the framework's and Megatron's arguments; ``data_pad_size_multiplier`` must equal the
            ``pad_multiplier`` of `get_batch`.
        model: this rank's model chunks.
        rollout_data: field name to one value per sample of this data-parallel rank; fields added
            later are seen. None if another rank of the replica (pipeline, tensor, context) has it.
        schema: the kind of every field that `get_batch` will be asked for.

    Returns:
        one iterator per virtual pipeline stage, and the number of micro-batches of each step.

    Raises:
        DynamicBatchArgumentError: an argument asks for another layout.
        CollectiveError: on every rank, if reading or planning failed on any.
        SchemaError: a sample has no token, on every rank; else it is the cause of the above.
    """
    check_layout(getattr(args, "qkv_format", "thd"), getattr(args, "allgather_cp", False))
    _check_arguments(args)
    planning_args = copy.copy(args)
    planning_args.dynamic_batch_share_prefixes = None  # nor is it advised
    planning_args.dynamic_batch_pad_total_to = row_multiple_of(args)
    iterators, counts = plan_micro_batches(planning_args, model, lambda: _planned(rollout_data))
    planned = schedule_of(iterators)
    # Rows are padded to a multiple of the tensor-parallel size, which is enough for sequence
    # parallelism. Samples must not be: slime finds tokens by unpadded lengths.
    schedule = dataclasses.replace(
        planned, dims=dataclasses.replace(planned.dims, sequence_parallel=False)
    )
    live = schedule.rollout_data if rollout_data is None else rollout_data
    rollout = PlannedRollout(schedule)
    return [LiveDataIterator(rollout, live, schema) for _ in iterators], counts


def forward_only(
    f: Callable[..., Any],
    args: Any,
    model: Any,
    data_iterator: Sequence[DataIterator],
    num_microbatches: Sequence[int],
    store_prefix: str = "",
) -> dict[str, list[Tensor]]:
    """`mcore_batching.megatron.forward_only`, with the model called as slime calls it.

    A collective over all ranks. Resets the iterators before and after the pass.

    Args:
        f: the function of the logits.
        args: the framework's and Megatron's arguments.
        model: this rank's model chunks.
        data_iterator: from `get_data_iterator`.
        num_microbatches: from `get_data_iterator`.
        store_prefix: put before every key of the result.

    Returns:
        on the last stage one tensor per sample, in the order of ``rollout_data``; ``{}`` elsewhere.

    Raises:
        DynamicBatchArgumentError: the iterators are the framework's own, or
            ``custom_megatron_before_log_prob_hook_path`` is set.
    """
    if getattr(args, "custom_megatron_before_log_prob_hook_path", None):
        raise DynamicBatchArgumentError(
            "this forward_only does not call custom_megatron_before_log_prob_hook_path: unset it, "
            "and call the function before"
        )
    first, *_ = [live_data_iterator(each).reset() for each in data_iterator]
    with _own_positions(model_chunks(model), first.schedule):
        return run_forward_only(f, args, model, data_iterator, num_microbatches, store_prefix)


def get_batch(
    data_iterator: DataIterator,
    keys: Sequence[str],
    pad_multiplier: int = 128,
    qkv_format: str = "thd",
    allgather_cp: bool = False,
) -> dict[str, Any]:
    """The next micro-batch as a packed row in slime's layout.

    Args:
        data_iterator: from `get_data_iterator`.
        keys: fields to return.
        pad_multiplier: each rank's row is padded to a multiple of this times the tensor-parallel
            size.
        qkv_format: "thd".
        allgather_cp: False.

    Returns:
        for each key one value per sample, None if the rollout data lacks it, except

        - ``tokens``: int64 ``[1, local tokens]``, on the device;
        - ``multimodal_train_inputs``: by name, the tensors of all samples concatenated;

        and besides

        - ``unconcat_tokens``: tokens of each sample;
        - ``packed_seq_params``;
        - ``full_loss_masks``: ``[1, local tokens]``, each mask at the position that predicts its
          token;
        - ``dynamic_global_batch_size``, if the rollout data has it.

        A placeholder has one token, an empty response and a `zero_count_mask` in ``loss_masks``.

    Raises:
        DynamicBatchArgumentError: the arguments ask for another layout, or the iterator is the
            framework's own.
    """
    check_layout(qkv_format, allgather_cp)
    iterator = live_data_iterator(data_iterator)
    indices, values = iterator.draw(list(dict.fromkeys([*keys, *NEEDED_FIELDS])))
    batch: dict[str, Any] = {key: values[key] for key in keys}
    row = packed_row(iterator.schedule, indices, values, pad_multiplier)
    masks = values["loss_masks"]
    batch |= {
        "unconcat_tokens": values["tokens"],
        "tokens": row.tokens,
        "packed_seq_params": compat.packed_seq_params(
            row.cu_seqlens_padded, row.max_seqlen, row.host_cu_seqlens_padded
        ),
        "full_loss_masks": row.loss_mask if masks is None else row.loss_mask.to(masks[0].dtype),
    }
    if not indices and batch.get("loss_masks") is not None:
        batch["loss_masks"] = [zero_count_mask(mask) for mask in batch["loss_masks"]]
    if batch.get("multimodal_train_inputs") is not None:
        batch["multimodal_train_inputs"] = joined_multimodal_inputs(
            batch["multimodal_train_inputs"]
        )
    if "dynamic_global_batch_size" in iterator.rollout_data:
        batch["dynamic_global_batch_size"] = iterator.rollout_data["dynamic_global_batch_size"]
    return batch


def _planned(rollout_data: dict[str, Any] | None) -> dict[str, Any] | None:
    """The fields of the rollout data that planning reads.

    Raises:
        SchemaError: a sample has no token.
    """
    if rollout_data is None:
        return None
    planned = {key: rollout_data[key] for key in _PLANNED if rollout_data.get(key) is not None}
    for index, length in enumerate(planned.get("total_lengths", ())):
        if length < 1:
            # Its segment would hold one token of padding, and slime's functions, which find tokens
            # by lengths, would read every later sample one token off.
            raise SchemaError(
                "total_lengths", sample_index=index, expected="at least one token", found="0"
            )
    return planned


def _check_arguments(args: Any) -> None:
    if Options.of(args).exchanges_samples:
        raise DynamicBatchArgumentError(
            "the framework cannot move samples to other ranks: unset --dynamic-batch-exchange and "
            "--dynamic-batch-context-parallel"
        )
    if getattr(args, "dynamic_batch_pad_each_to", None):
        raise DynamicBatchArgumentError(
            "the framework finds tokens by unpadded lengths: unset --dynamic-batch-pad-each-to, "
            "and pad rows by --dynamic-batch-pad-total-to"
        )
    if getattr(args, "dynamic_batch_share_prefixes", False):
        raise DynamicBatchArgumentError(
            "the framework finds tokens by lengths, so samples cannot share them: unset "
            "--dynamic-batch-share-prefixes"
        )
    if getattr(args, "dynamic_batch_cost_model", None) == LEARNT:
        raise DynamicBatchArgumentError(
            "costs cannot be learnt, since the framework runs training itself: set "
            "--dynamic-batch-cost-model to fixed, or to a file of CostModel.to_json"
        )


def _own_positions(chunks: list[Any], schedule: MicroBatchSchedule) -> AbstractContextManager[None]:
    """Pass no position ids to multimodal models, which compute their own from the images.

    slime passes none to any model; for a text model 0, 1, 2, … per sample is the same.
    """
    finds_them = (
        "multimodal_train_inputs" in schedule.template and "position_ids" not in schedule.template
    )
    return changed_inputs(
        chunks if finds_them else [], lambda inputs: inputs | {"position_ids": None}
    )
