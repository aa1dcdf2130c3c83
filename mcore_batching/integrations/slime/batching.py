"""The three functions by which RL frameworks batch, for code that keeps its own forward step.

`mcore_batching.hook` puts them into a framework's modules. Signatures, keys and the layout of a row
are slime's (`slime/backends/megatron_utils/data.py` and `model.py` before its pull request 1860):
each sample padded to twice the context-parallel size and cut into 2·cp chunks, the row padded on
each rank to ``tensor parallel × pad_multiplier`` tokens. So the framework's loss and log-prob
functions find every token where they look for it.

Guarantees
- A placeholder has one token, an empty response and one value for every key; its loss masks count
  no token (`mcore_batching.integrations.slime.uncounted_mask`).
- What another layout would need is refused before the pipeline starts.
- A row is the same in ``forward_only`` and from ``get_batch``, and its padding counts towards the
  cap.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from mcore_batching.batch import DEFAULT_SCHEMA, Schema, SchemaError, pack
from mcore_batching.integrations.slime.iterator import FrameworkIterator, framework_iterator
from mcore_batching.integrations.slime.uncounted_mask import uncounted
from mcore_batching.megatron import compat
from mcore_batching.megatron.data_iterator import (
    DataIterator,
    PlannedRollout,
    plan_micro_batches,
    schedule_of,
)
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.forward_only import forward_only as run_forward_only
from mcore_batching.megatron.rollout_batch import REQUIRED_FIELDS
from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.megatron.topology import model_chunks
from mcore_batching.planning import row_multiple_tokens, sample_multiple_tokens

# All that planning and forward passes read. Frameworks keep other things beside them: values of the
# whole batch rather than of this rank's samples, log-probs already cut for context parallelism.
_PLANNED = (
    *REQUIRED_FIELDS,
    "loss_masks",
    "multimodal_train_inputs",
    "position_ids",
    "dynamic_global_batch_size",
)
_NEEDED_FOR_A_ROW = (*REQUIRED_FIELDS, "loss_masks")


def get_data_iterator(
    args: Any,
    model: Any,
    rollout_data: dict[str, Any] | None,
    *,
    schema: Schema = DEFAULT_SCHEMA,
) -> tuple[list[FrameworkIterator], list[int]]:
    """`mcore_batching.megatron.get_data_iterator` for a framework that pads rows its own way.

    A collective over all ranks.

    Args:
        args: the framework's and Megatron's arguments; ``data_pad_size_multiplier`` is what
            ``get_batch`` will be given.
        model: this rank's model chunks.
        rollout_data: field name to one value a sample of this data-parallel rank. Later additions
            are seen. None where another rank of the replica (pipeline, tensor, context) has it.
        schema: the kind of every field that ``get_batch`` will be asked for.

    Returns:
        one iterator a virtual pipeline stage, and the number of micro-batches of each step.

    Raises:
        DynamicBatchArgumentError: an argument asks for another layout.
        CollectiveError: on every rank, if reading or planning failed on any.
        SchemaError: as the cause of those, or where all ranks agree: a sample has no token.
    """
    _refuse_other_layouts(getattr(args, "qkv_format", "thd"), getattr(args, "allgather_cp", False))
    _refuse_arguments(args)
    planning_args = copy.copy(args)
    planning_args.dynamic_batch_pad_total_to = _row_multiple(args)
    iterators, counts = plan_micro_batches(planning_args, model, lambda: _planned(rollout_data))
    planned = schedule_of(iterators)
    # The row's multiple covers what sequence parallelism needs, so samples are not padded for it.
    schedule = dataclasses.replace(
        planned, dims=dataclasses.replace(planned.dims, sequence_parallel=False)
    )
    live = schedule.rollout_data if rollout_data is None else rollout_data
    rollout = PlannedRollout(schedule)
    return [FrameworkIterator(rollout, live, schema) for _ in iterators], counts


def forward_only(
    f: Callable[..., Any],
    args: Any,
    model: Any,
    data_iterator: Sequence[DataIterator],
    num_microbatches: Sequence[int],
    store_prefix: str = "",
) -> dict[str, list[Tensor]]:
    """`mcore_batching.megatron.forward_only` with the model called as frameworks call it.

    A collective over all ranks. Iterators are reset, before and for the pass that follows.

    Args:
        f: what to make of the logits.
        args: the framework's and Megatron's arguments.
        model: this rank's model chunks.
        data_iterator: from `get_data_iterator`.
        num_microbatches: from `get_data_iterator`.
        store_prefix: put before every key of the result.

    Returns:
        on the last stage one tensor a sample, in the order of ``rollout_data``; ``{}`` elsewhere.

    Raises:
        DynamicBatchArgumentError: the iterators are the framework's own, or a function is to be
            called before the pass.
    """
    if getattr(args, "custom_megatron_before_log_prob_hook_path", None):
        raise DynamicBatchArgumentError(
            "custom_megatron_before_log_prob_hook_path names a function that the framework's own "
            "forward_only calls, and this one does not: unset it, and call the function before"
        )
    first, *_ = [framework_iterator(each).reset() for each in data_iterator]
    with _positions_left_to(model_chunks(model), first.schedule):
        return run_forward_only(f, args, model, data_iterator, num_microbatches, store_prefix)


def get_batch(
    data_iterator: DataIterator,
    keys: Sequence[str],
    pad_multiplier: int = 128,
    qkv_format: str = "thd",
    allgather_cp: bool = False,
) -> dict[str, Any]:
    """The next micro-batch as a packed row, in the layout that the framework's functions expect.

    Args:
        data_iterator: from `get_data_iterator`.
        keys: fields to return.
        pad_multiplier: each rank's row is padded to a multiple of this times the tensor-parallel
            size.
        qkv_format: "thd".
        allgather_cp: False.

    Returns:
        for each key one value a sample, None if the rollout data lacks it, but ``tokens`` int64
        ``[1, local tokens]`` on the device, ``multimodal_train_inputs`` name to the tensors of all
        samples in one; further ``unconcat_tokens`` (tokens of each sample), ``packed_seq_params``,
        ``full_loss_masks`` ``[1, local tokens]`` (masks where their tokens are predicted) and, if
        the rollout data has it, ``dynamic_global_batch_size``. A placeholder's ``loss_masks`` hold
        a mask that counts no token.

    Raises:
        DynamicBatchArgumentError: another layout is asked for, or another's iterator given.
    """
    _refuse_other_layouts(qkv_format, allgather_cp)
    iterator = framework_iterator(data_iterator)
    schedule = iterator.schedule
    indices, values = iterator.draw(list(dict.fromkeys([*keys, *_NEEDED_FOR_A_ROW])))
    batch: dict[str, Any] = {key: values[key] for key in keys}
    size = parallel_state.get_context_parallel_world_size()
    local_multiple = pad_multiplier * parallel_state.get_tensor_model_parallel_world_size()
    device = torch.device(torch.cuda.current_device())
    row = pack(
        {key: values[key] for key in _NEEDED_FOR_A_ROW if values[key] is not None},
        schema=DEFAULT_SCHEMA,
        sample_indices=indices,
        sample_alignment_tokens=sample_multiple_tokens(schedule.dims, schedule.config),
        row_alignment_tokens=math.lcm(
            size * local_multiple, row_multiple_tokens(schedule.dims, schedule.config)
        ),
        context_parallel_size=size,
        context_parallel_rank=schedule.context_parallel_rank,
        pad_token_id=schedule.pad_token_id,
        is_placeholder=not indices,
    ).to(device, non_blocking=True)
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
        batch["loss_masks"] = [uncounted(mask) for mask in batch["loss_masks"]]
    if batch.get("multimodal_train_inputs") is not None:
        batch["multimodal_train_inputs"] = _joined(batch["multimodal_train_inputs"])
    if "dynamic_global_batch_size" in iterator.rollout_data:
        batch["dynamic_global_batch_size"] = iterator.rollout_data["dynamic_global_batch_size"]
    return batch


def _planned(rollout_data: dict[str, Any] | None) -> dict[str, Any] | None:
    """What planning reads of the rollout data.

    Raises:
        SchemaError: a sample has no token. A row gives it one token of padding, and functions that
            find tokens by lengths would look one place off behind it.
    """
    if rollout_data is None:
        return None
    planned = {key: rollout_data[key] for key in _PLANNED if rollout_data.get(key) is not None}
    for index, length in enumerate(planned.get("total_lengths", ())):
        if length < 1:
            raise SchemaError(
                "total_lengths", sample_index=index, expected="at least one token", found="0"
            )
    return planned


def _row_multiple(args: Any) -> int:
    """Tokens that a whole row is padded to a multiple of."""
    sizes = (
        parallel_state.get_context_parallel_world_size()
        * parallel_state.get_tensor_model_parallel_world_size()
    )
    local = getattr(args, "data_pad_size_multiplier", None) or 1
    return math.lcm(sizes * local, getattr(args, "dynamic_batch_pad_total_to", None) or 1)


def _refuse_other_layouts(qkv_format: str, allgather_cp: bool) -> None:
    problems = []
    if qkv_format != "thd":
        problems.append(
            f"qkv_format={qkv_format!r} puts every sample into a row of its own, padded to one "
            'length: set qkv_format="thd"'
        )
    if allgather_cp:
        problems.append(
            "allgather_cp=True cuts the row into one piece a context-parallel rank, and packed "
            "rows are cut in 2·cp chunks a sample: set allgather_cp=False"
        )
    if problems:
        raise DynamicBatchArgumentError("; ".join(problems))


def _refuse_arguments(args: Any) -> None:
    if getattr(args, "dynamic_batch_exchange", False):
        raise DynamicBatchArgumentError(
            "--dynamic-batch-exchange moves samples to other ranks, and the framework leaves "
            "every sample where its rollout data is: unset --dynamic-batch-exchange"
        )
    if getattr(args, "dynamic_batch_pad_each_to", None):
        raise DynamicBatchArgumentError(
            "--dynamic-batch-pad-each-to pads samples, and the framework's functions find tokens "
            "by the lengths of samples: unset it, and pad rows by --dynamic-batch-pad-total-to"
        )


@contextmanager
def _positions_left_to(chunks: list[Any], schedule: MicroBatchSchedule) -> Iterator[None]:
    """While models that see images run, they find the positions of tokens themselves.

    Frameworks give no position ids to any model; one without images needs none, or those of text.
    """
    handles = []
    if "multimodal_train_inputs" in schedule.template and "position_ids" not in schedule.template:
        handles = [
            chunk.register_forward_pre_hook(_without_positions, with_kwargs=True)
            for chunk in chunks
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _without_positions(
    module: Any, arguments: Any, keywords: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    del module
    return arguments, keywords | {"position_ids": None}


def _joined(inputs: Sequence[Mapping[str, Tensor] | None]) -> dict[str, Tensor]:
    """Name to the tensors of all samples, one behind the other."""
    gathered: dict[str, list[Tensor]] = {}
    for each in inputs:
        for name, tensor in (each or {}).items():
            gathered.setdefault(name, []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in gathered.items()}
