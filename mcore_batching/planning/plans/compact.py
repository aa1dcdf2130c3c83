"""The compact form of one step's plan, for messages within a job: 4 bytes per sample and row.

    "mcbp" · CRC-32 of the rest · ranks, slots, 1 under dynamic CP or 0 ·
    samples of each row [ranks][slots] · under dynamic CP the size of each row · sample indices

All numbers are unsigned, 32 bits, little-endian. Dims, config and costs are not in it: all ranks of
a job have them.
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice

from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.costs.cost import CostModel
from mcore_batching.planning.errors import PlanFormatError
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.plans.plan import StepPlan

_MAGIC = b"mcbp"
_HEAD = struct.Struct("<4sI")
_NUMBER = "I" if array("I").itemsize == 4 else "L"
_COUNTS = 3
"""Numbers before those of the rows."""


def plan_to_bytes(plan: StepPlan) -> bytes:
    """Write a plan whose samples are numbered from 0.

    Raises:
        PlanFormatError: the samples are numbered otherwise, or ranks have different numbers of
            micro-batches.
    """
    slots = plan.num_microbatches
    if plan.sample_indices != tuple(range(plan.num_samples)):
        raise PlanFormatError("the samples of the plan must be numbered from 0; plan each step")
    if {len(rank) for rank in plan.micro_batches} != {slots}:
        raise PlanFormatError(f"every rank must have {slots} micro-batches")
    sizes = plan.context_parallel or ()
    numbers = array(_NUMBER, [len(plan.micro_batches), slots, bool(sizes)])
    numbers.extend(len(samples) for rank in plan.micro_batches for samples in rank)
    for rank_sizes in sizes:
        numbers.extend(rank_sizes)
    for rank in plan.micro_batches:
        for samples in rank:
            numbers.extend(samples)
    body = _little_endian(numbers).tobytes()
    return _HEAD.pack(_MAGIC, zlib.crc32(body)) + body


def plan_from_bytes(
    data: bytes,
    num_samples: int,
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel,
    *,
    forward_only: bool = False,
) -> StepPlan:
    """Read what `plan_to_bytes` wrote. What the plan contains is for `validate_plan` to check.

    Args:
        data: the compact form.
        num_samples: samples of the step.
        dims, config, cost_model, forward_only: those the plan was made with.

    Raises:
        PlanFormatError: other bytes, damaged ones, or a plan for other ranks.
    """
    body = memoryview(data)[_HEAD.size :]
    if len(data) < _HEAD.size or _HEAD.unpack_from(data) != (_MAGIC, zlib.crc32(body)):
        raise PlanFormatError(f"{len(data)} bytes that are no plan, or a damaged one; plan again")
    numbers = array(_NUMBER)
    if len(body) % numbers.itemsize or len(body) < _COUNTS * numbers.itemsize:
        raise PlanFormatError(f"a plan cannot have {len(data)} bytes; plan again")
    numbers.frombytes(body)
    numbers = _little_endian(numbers)
    ranks, slots, is_dynamic = numbers[:_COUNTS]
    is_due = config.max_context_parallel is not None
    due = dims.data_parallel * (dims.context_parallel if is_due else 1)
    if (ranks, is_dynamic) != (due, is_due) or ranks * slots > len(numbers):
        raise PlanFormatError(
            f"a plan for {ranks} ranks with {slots} micro-batches each, expected {due} ranks; "
            "plan again with the settings of this job"
        )
    rest = iter(numbers[_COUNTS:])
    counts = list(islice(rest, ranks * slots))
    sizes = tuple(tuple(islice(rest, slots)) for _ in range(ranks)) if is_dynamic else None
    flat = numbers[_COUNTS + ranks * slots * (1 + is_dynamic) :]
    if len(flat) != sum(counts):
        raise PlanFormatError(f"a plan of {sum(counts)} samples lists {len(flat)}; plan again")
    return StepPlan(
        micro_batches=tuple(_in_slots(_rows(flat, counts), slots, ranks)),
        num_microbatches=slots,
        sample_indices=tuple(range(num_samples)),
        dims=dims,
        config=config,
        context_parallel=sizes,
        cost_model=cost_model,
        forward_only=forward_only,
    )


def _rows(flat: array[int], counts: Iterable[int]) -> Iterator[tuple[int, ...]]:
    start = 0
    for count in counts:
        yield tuple(flat[start : start + count])
        start += count


def _in_slots(
    rows: Iterator[tuple[int, ...]], slots: int, ranks: int
) -> Iterator[tuple[tuple[int, ...], ...]]:
    for _ in range(ranks):
        yield tuple(islice(rows, slots))


def _little_endian(numbers: array[int]) -> array[int]:
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers
