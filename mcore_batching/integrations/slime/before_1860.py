"""``get_data_iterator``, ``forward_only`` and ``get_batch`` as slime before its pull request 1860.

`mcore_batching.hook` puts them into a framework's modules. Planning and forward passes are the
engine's; rows have slime's layout, in which its loss and log-prob functions find tokens by lengths:
each sample is padded to a multiple of 2·cp and cut into 2·cp chunks, and each rank's row is padded
to a multiple of ``tensor parallel × pad_multiplier`` tokens. With cp 2 and the tokens ``abcde``
(padded ``abcde...``) rank 0 holds ``ab..`` and rank 1 ``cde.``.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from mcore_batching.batch import DEFAULT_SCHEMA, PackedMicroBatch, Schema, SchemaError
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.row_block import Layout, RowBlock
from mcore_batching.batch.row_index import Nodes
from mcore_batching.flags import LEARNT
from mcore_batching.integrations.slime.iterator import PlaceholderIterator
from mcore_batching.integrations.slime.rollout_manager import option_problems
from mcore_batching.megatron import compat
from mcore_batching.megatron.errors import DynamicBatchArgumentError, refuse
from mcore_batching.megatron.forward_only import forward_only as run_forward_only
from mcore_batching.megatron.iterator import DataIterator, rollout_of
from mcore_batching.megatron.job import job_of
from mcore_batching.megatron.model_inputs import changed_inputs, joined_multimodal_inputs
from mcore_batching.megatron.plan import plan_rollout
from mcore_batching.megatron.prepare import MODEL_INPUTS
from mcore_batching.megatron.samples import REQUIRED_FIELDS, read_samples
from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.megatron.topology import model_chunks
from mcore_batching.planning import row_multiple_tokens, sample_multiple_tokens

_ROW_FIELDS = (*REQUIRED_FIELDS, "loss_masks")
# Others may be of the whole batch rather than of this rank's samples, or log-probs that are already
# cut for context parallelism.
_PLANNED = (*_ROW_FIELDS, "multimodal_train_inputs", "position_ids", "dynamic_global_batch_size")


class _LiveDataIterator(DataIterator):
    """A `DataIterator` that draws values from the framework's dict as it is at that time."""

    def __init__(self, schedule: MicroBatchSchedule, rollout_data: dict[str, Any]) -> None:
        super().__init__(schedule)
        self._live = rollout_data

    @property
    def rollout_data(self) -> dict[str, Any]:
        """The framework's own dict, not a copy."""
        return self._live

    def get_next(self, keys: Sequence[str]) -> dict[str, list[Any] | None]:
        """The next micro-batch's values, None for fields that the dict lacks."""
        indices = self._schedule.micro_batches[self.offset]
        self.offset += 1
        live = {key: self._live.get(key) for key in keys}
        return {
            key: None if values is None else [values[i] for i in indices]
            for key, values in live.items()
        }


def get_data_iterator(
    schema: Schema, args: Any, model: Any, rollout_data: dict[str, Any] | None
) -> tuple[list[PlaceholderIterator], list[int]]:
    """`mcore_batching.megatron.get_data_iterator`, with rows padded as slime pads them.

    A collective over all ranks. ``args.data_pad_size_multiplier`` must equal the ``pad_multiplier``
    of `get_batch`. A `DynamicBatchArgumentError` where an argument requires another layout, or for
    the engine's own rows or training step.
    """
    layout = getattr(args, "qkv_format", "thd"), getattr(args, "allgather_cp", False)
    problems = [*_layout_problems(*layout), *option_problems(args)]
    if getattr(args, "dynamic_batch_exchange", False):
        problems.append("samples stay on their rank: unset dynamic_batch_exchange")
    if getattr(args, "dynamic_batch_cost_model", None) == LEARNT:
        problems.append(
            "no pass is timed here: set dynamic_batch_cost_model to fixed, or to a file"
        )
    refuse("the hooked batching", problems)
    # A copy, since the framework goes on with its own.
    planning_args = copy.copy(args)
    planning_args.dynamic_batch_share_prefixes = False
    planning_args.dynamic_batch_exchange = False
    planning_args.dynamic_batch_pad_total_to = math.lcm(
        _row_multiple(getattr(args, "data_pad_size_multiplier", None) or 1),
        getattr(args, "dynamic_batch_pad_total_to", None) or 1,
    )
    job = job_of(planning_args)
    samples = read_samples(job, model, DEFAULT_SCHEMA, lambda: _planned(rollout_data))
    schedule = plan_rollout(samples)
    # Rows are padded to a multiple of the tensor-parallel size, which is enough for sequence
    # parallelism. Samples must not be: slime finds tokens by unpadded lengths.
    dims = dataclasses.replace(schedule.dims, sequence_parallel=False)
    settings = dataclasses.replace(schedule.settings, dims=dims)
    schedule.samples = dataclasses.replace(schedule.samples, settings=settings)
    # A rank that was given nothing has what its replica sent it, without later fields.
    live = dict(schedule.rollout_data) if rollout_data is None else rollout_data
    return [
        PlaceholderIterator(_LiveDataIterator(schedule, live), schema, schedule.template)
        for _ in range(dims.virtual_pipeline)
    ], schedule.num_microbatches


def forward_only(
    f: Callable[..., Any],
    args: Any,
    model: Any,
    data_iterator: Sequence[Any],
    num_microbatches: Sequence[int],
    store_prefix: str = "",
) -> dict[str, list[Tensor]]:
    """`mcore_batching.megatron.forward_only`, with the model called as slime calls it.

    It resets the iterators before. A `DynamicBatchArgumentError` if they are the framework's own.
    """
    if getattr(args, "custom_megatron_before_log_prob_hook_path", None):
        raise DynamicBatchArgumentError(
            "forward_only does not call custom_megatron_before_log_prob_hook_path: unset it, and "
            "call the function before"
        )
    live = [_live(each).reset() for each in data_iterator]  # the caller may have drawn from them
    with _own_positions(model_chunks(model), rollout_of(live)):
        return run_forward_only(f, args, model, live, num_microbatches, store_prefix)


def get_batch(
    data_iterator: Any,
    keys: Sequence[str],
    pad_multiplier: int = 128,
    qkv_format: str = "thd",
    allgather_cp: bool = False,
) -> dict[str, Any]:
    """The next micro-batch as a packed row in slime's layout.

    Returns:
        for each key one value per sample, None if the rollout data lacks it; but ``tokens`` is the
        row, int64 ``[1, local tokens]`` on the device, and ``multimodal_train_inputs`` holds by
        name the tensors of all samples concatenated. Besides: ``unconcat_tokens`` of each sample,
        ``packed_seq_params``, ``dynamic_global_batch_size`` if the rollout data has it, and
        ``full_loss_masks`` ``[1, local tokens]``, each mask where its token is predicted.
    """
    refuse("the hooked get_batch", _layout_problems(qkv_format, allgather_cp))
    live = _live(data_iterator)
    schedule, slot = rollout_of([live]), live.offset
    # The row needs more than the keys that the framework requests.
    values = data_iterator.get_next(list(dict.fromkeys([*keys, *_ROW_FIELDS])))
    row = _packed_row(schedule, schedule.micro_batches[slot], values, pad_multiplier)
    masks, images = values["loss_masks"], values.get("multimodal_train_inputs")
    batch: dict[str, Any] = {key: values[key] for key in keys}
    batch |= {
        "unconcat_tokens": values["tokens"],
        "tokens": row.tokens,
        "packed_seq_params": compat.packed_seq_params(
            row.cu_seqlens_padded, row.max_seqlen, row.host_cu_seqlens_padded
        ),
        "full_loss_masks": row.loss_mask if masks is None else row.loss_mask.to(masks[0].dtype),
    }
    if images is not None:
        batch["multimodal_train_inputs"] = joined_multimodal_inputs(images)
    if "dynamic_global_batch_size" in live.rollout_data:
        batch["dynamic_global_batch_size"] = live.rollout_data["dynamic_global_batch_size"]
    return batch


def _packed_row(
    schedule: MicroBatchSchedule,
    indices: tuple[int, ...],
    values: Mapping[str, list[Any] | None],
    pad_multiplier: int,
) -> PackedMicroBatch:
    """This rank's part of a row, on the device."""
    columns = Columns.read({key: values[key] for key in _ROW_FIELDS}, DEFAULT_SCHEMA)
    samples = range(len(columns.total_lengths))
    alignments = (
        sample_multiple_tokens(schedule.dims, schedule.config),
        math.lcm(
            _row_multiple(pad_multiplier), row_multiple_tokens(schedule.dims, schedule.config)
        ),
    )
    layout = Layout(
        context_parallel_size=schedule.dims.context_parallel,
        context_parallel_rank=parallel_state.get_context_parallel_rank(),
        pad_token_id=schedule.pad_token_id,
    )
    block = RowBlock(
        columns,
        [samples],
        [Nodes.of(columns.total_lengths, samples, None, *alignments)],
        layout,
        sample_indices=[indices],
        is_placeholder=not indices,
    )
    device = torch.device(torch.cuda.current_device())
    (row,) = block.pinned(device, (*MODEL_INPUTS, "loss_mask"), ()).on_device().rows()
    return row


def _row_multiple(pad_multiplier: int) -> int:
    """To how many tokens a row of all its ranks is padded."""
    ranks: int = parallel_state.get_context_parallel_world_size()
    ranks *= parallel_state.get_tensor_model_parallel_world_size()
    return ranks * pad_multiplier


def _live(data_iterator: Any) -> _LiveDataIterator:
    """The iterator inside one that `get_data_iterator` returned."""
    own = data_iterator.own if isinstance(data_iterator, PlaceholderIterator) else data_iterator
    if not isinstance(own, _LiveDataIterator):
        raise DynamicBatchArgumentError(
            f"expected an iterator of the hooked get_data_iterator, got {type(own).__name__}: "
            "call get_data_iterator after mcore_batching.hook"
        )
    return own


def _planned(rollout_data: dict[str, Any] | None) -> dict[str, Any] | None:
    """The fields of the rollout data that planning reads; a sample without tokens is refused."""
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


def _layout_problems(qkv_format: str, allgather_cp: bool) -> Iterator[str]:
    if qkv_format != "thd":
        yield f'qkv_format={qkv_format!r} does not pack samples: set qkv_format="thd"'
    if allgather_cp:
        yield "allgather_cp=True cuts whole rows, not samples, into pieces: set allgather_cp=False"


def _own_positions(chunks: list[Any], schedule: MicroBatchSchedule) -> AbstractContextManager[None]:
    # slime passes no position ids. Multimodal models then compute their own from the images; to a
    # text model 0, 1, 2, … per sample are the same.
    fields = schedule.template
    finds_them = "multimodal_train_inputs" in fields and "position_ids" not in fields
    return changed_inputs(
        chunks if finds_them else [], lambda inputs: inputs | {"position_ids": None}
    )
