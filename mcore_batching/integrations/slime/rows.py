"""Packed rows in slime's layout, in which its loss and log-prob functions find tokens by lengths.

Each sample is padded to a multiple of 2·cp and cut into 2·cp chunks; each rank's row is padded to a
multiple of ``tensor parallel × pad_multiplier`` tokens. With cp 2 and the tokens ``abcde`` (padded
``abcde...``) rank 0 holds ``ab..`` and rank 1 ``cde.``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state

from mcore_batching.batch import DEFAULT_SCHEMA, PackedMicroBatch, pack
from mcore_batching.batch.side_by_side import on_host
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.rollout.rollout_batch import REQUIRED_FIELDS
from mcore_batching.megatron.rows.prepared_step import MODEL_INPUTS, PortableRow
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.planning import row_multiple_tokens, sample_multiple_tokens

NEEDED_FIELDS = (*REQUIRED_FIELDS, "loss_masks")
"""Fields needed to build a row."""


def packed_row(
    schedule: MicroBatchSchedule,
    indices: tuple[int, ...],
    values: dict[str, list[Any] | None],
    pad_multiplier: int,
) -> PackedMicroBatch:
    """One context-parallel rank's part of a row: the model's inputs and the mask on the device.

    Args:
        schedule: the plan that the row is from.
        indices: of the row's samples, ``()`` for a placeholder.
        values: field name to one value per sample.
        pad_multiplier: the row is padded on each rank to a multiple of this times the
            tensor-parallel size.
    """
    size = parallel_state.get_context_parallel_world_size()
    local_multiple = pad_multiplier * parallel_state.get_tensor_model_parallel_world_size()
    given = {key: values[key] for key in NEEDED_FIELDS}
    row = pack(
        # pack reads lengths and masks: on the device each read would make the host wait.
        {key: on_host(each) for key, each in given.items() if each is not None},
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
    )
    names = (*MODEL_INPUTS, "loss_mask")
    return PortableRow(row, names, torch.device(torch.cuda.current_device())).on_device()


def row_multiple_of(args: Any) -> int:
    """The multiple, in tokens, to which a whole row is padded under a framework's arguments."""
    sizes = (
        parallel_state.get_context_parallel_world_size()
        * parallel_state.get_tensor_model_parallel_world_size()
    )
    local = getattr(args, "data_pad_size_multiplier", None) or 1
    return math.lcm(sizes * local, getattr(args, "dynamic_batch_pad_total_to", None) or 1)


def check_layout(qkv_format: str, allgather_cp: bool) -> None:
    """Refuse arguments that ask for another layout.

    Raises:
        DynamicBatchArgumentError: naming what to set instead.
    """
    problems = []
    if qkv_format != "thd":
        problems.append(f'qkv_format={qkv_format!r} does not pack samples: set qkv_format="thd"')
    if allgather_cp:
        problems.append(
            "allgather_cp=True cuts rows into one piece per rank, not 2·cp chunks per sample: set "
            "allgather_cp=False"
        )
    if problems:
        raise DynamicBatchArgumentError("; ".join(problems))
