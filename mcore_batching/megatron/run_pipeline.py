"""`run_pipeline`: the one place that calls Megatron's schedule, for training, forward passes alone
and stock scripts; the forward pass of one row; the shapes of what pipeline stages send each other.

With variable lengths Megatron's neighbours exchange the shape of every tensor first, and wait for
the device each time. All stages of a replica run the same rows in an order that the schedule fixes:
each has beforehand the shapes that it will receive. Another shape raises before anything is sent.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from mcore_batching.batch import PackedMicroBatch
from mcore_batching.megatron import compat
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.job import Job
from mcore_batching.megatron.logits import noting_use, output_layer, why_not_fused
from mcore_batching.megatron.mtp import LaterLosses, predict_later_tokens
from mcore_batching.megatron.prefix_attention import Paths
from mcore_batching.megatron.prepare import PreparedStep
from mcore_batching.megatron.routing import replayed, replayed_step
from mcore_batching.megatron.timing import learner_of
from mcore_batching.megatron.topology import context_parallel_group, row_group
from mcore_batching.planning import ParallelDims
from mcore_batching.planning.schedule import Schedule

Shape = list[int]


class PlannedTransfers:
    """The shapes of one stage's transfers, in the order in which its schedule reads them.

    ``shapes`` are of each micro-batch's hidden states ``[tokens of this rank, 1, hidden size]``.
    """

    def __init__(
        self, shapes: Sequence[Shape], dims: ParallelDims, stage: int, *, forward_only: bool
    ) -> None:
        # The first stage's first chunk has no predecessor, the last stage's last chunk no
        # successor; over the two neighbours every other tensor goes in and out in one order.
        first, last = (0, 0), (dims.pipeline_parallel - 1, dims.virtual_pipeline - 1)
        order = Schedule(dims=dims, forward_only=forward_only).order(stage, len(shapes))

        passes = [(each.kind, (stage, each.chunk), shapes[each.slot]) for each in order]
        forward = [(at, shape) for kind, at, shape in passes if kind == "F"]
        backward = [(at, shape) for kind, at, shape in passes if kind == "B"]
        self._from_previous = iter([shape for at, shape in forward if at != first])
        self._to_next = iter([shape for at, shape in forward if at != last])
        self._from_next = iter([shape for at, shape in backward if at != last])
        self._to_previous = iter([shape for at, shape in backward if at != first])

    def __call__(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape, Shape]:
        """The shapes that come from the previous and from the next stage, for Megatron."""
        # Compared before anything is sent: a neighbour that receives another shape hangs or
        # reads garbage.
        if tensor_send_next is not None:
            _check(list(tensor_send_next.shape), next(self._to_next, None))
        if tensor_send_prev is not None:
            _check(list(tensor_send_prev.shape), next(self._to_previous, None))
        return (
            # Drawn only where Megatron receives: drawing moves on to the next micro-batch.
            _planned(next(self._from_previous, None)) if recv_prev else [0, 0, 0],
            _planned(next(self._from_next, None)) if recv_next else [0, 0, 0],
        )


_ADVICE = "set --dynamic-batch-no-planned-shapes, and stages exchange shapes before each transfer"


def _check(shape: Shape, planned: Shape | None) -> None:
    if shape != _planned(planned):
        raise DynamicBatchArgumentError(
            f"a stage sends shape {shape}, but its neighbour expects {planned}; {_ADVICE}"
        )


def _planned(shape: Shape | None) -> Shape:
    if shape is None:
        raise DynamicBatchArgumentError(f"a stage has more transfers than its schedule; {_ADVICE}")
    return shape


_ALL_LOGITS = (
    "the logits of whole rows are made, as a function of them reads more than response_log_probs "
    "and response_log_probs_and_entropy do, which multiply by the output layer a chunk of tokens "
    "at a time"
)


def run_for_losses(
    job: Job,
    chunk: Any,
    row: PackedMicroBatch,
    later: LaterLosses | None = None,
    *,
    fused: bool = False,
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The chunk's output, logits ``[1, local tokens, local vocabulary]`` or hidden states, and what
    makes of it, on the last stage, what losses are given.

    ``row`` is this context-parallel rank's slice, on the device; without ``later`` the layers of
    multi-token prediction are left out. ``fused`` logits are `FusedLogits` where the last layer is
    a product.
    """
    config = get_model_config(chunk)  # once: it is looked up through all wrappers
    copies, dtype = _makes_float32_copy(chunk), None
    in_model_dtype = job.options.logits_in_model_dtype or job.options.fuse_output_layer
    if fused and not why_not_fused(chunk):
        dtype = torch.float32 if copies and not in_model_dtype else config.params_dtype
        in_model_dtype = in_model_dtype or hasattr(unwrap_model(chunk), "output_layer")
    arguments: dict[str, Any] = {
        "input_ids": row.tokens,
        "position_ids": row.position_ids,
        # Offsets bound what attends to what; a dense mask has the square of the row's tokens.
        "attention_mask": None,
        # With labels Megatron's model would return its own loss instead of logits.
        "labels": None,
        "packed_seq_params": row_params(config, row, later),
    }
    # Else the wrapper copies logits to float32. The model inside would refuse the argument.
    if copies and in_model_dtype:
        arguments["fp32_output"] = False
    multimodal = joined_multimodal_inputs(row.fields.get("multimodal_train_inputs") or [])
    when_made = functools.partial(job.say_once, "logits made", _ALL_LOGITS)
    with output_layer(chunk, dtype, when_made) as logits_of, replayed(chunk, row):
        return chunk(**arguments, **multimodal), logits_of


def row_params(config: Any, row: PackedMicroBatch, later: LaterLosses | None) -> Any:
    """The packed-sequence parameters by which the layers of every chunk, middle stages included,
    keep samples apart and leave padding out; without ``later`` the layers of multi-token
    prediction are left out. ``config`` is the chunk's."""
    params = compat.packed_seq_params(
        row.cu_seqlens_padded,
        _longest(config, row),
        row.host_cu_seqlens_padded,
        row_group(row.context_parallel_size),
    )
    if row.nodes.has_branches:
        params.attention_geometry = Paths(row, context_parallel_group(row))
    # Routers balance experts by the tokens they count: padding, of which a placeholder consists,
    # must not be among them.
    if config.num_moe_experts:
        mask = torch.ones_like(row.padding_mask) if row.is_placeholder else row.padding_mask
        if config.sequence_parallel:  # a tensor-parallel rank holds its part between layers
            size = parallel_state.get_tensor_model_parallel_world_size()
            mask = mask.chunk(size, 1)[parallel_state.get_tensor_model_parallel_rank()].contiguous()
        params.own_padding_mask = mask  # bool [1, tokens], True for padding
    predict_later_tokens(params, config, row, later)
    return params


def joined_multimodal_inputs(inputs: Sequence[Mapping[str, Tensor] | None]) -> dict[str, Tensor]:
    """Multimodal inputs of all samples, concatenated name by name.

    {"pixels": [2, 3]}, None, {"pixels": [1, 3]}  ->  {"pixels": [3, 3]}   (shapes)
    """
    gathered: dict[str, list[Tensor]] = {}
    for sample in inputs:
        # None for a sample without images, beside others that have some.
        for name, tensor in (sample or {}).items():
            gathered.setdefault(name, []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in gathered.items()}


def _longest(config: Any, row: PackedMicroBatch) -> int:
    """Tokens of the longest sequence; where RoPE is fused, up to an eighth more.

    Megatron keeps the rotary embeddings of the last 32 lengths: exact ones near 131k take 2.1 GB.
    Unfused it takes positions by row instead of by sequence where the length is the row's.
    """
    if not config.apply_rope_fusion or row.nodes.has_branches:
        return row.max_seqlen
    step = 1 << max(row.max_seqlen.bit_length() - 4, 0)
    return -(-row.max_seqlen // step) * step


def _makes_float32_copy(chunk: Any) -> bool:
    """True if a chunk is, or wraps, Megatron's `Float16Module`, which casts logits."""
    # Megatron wraps several times over: data parallelism around half precision.
    module = chunk
    while module is not None and not isinstance(module, Float16Module):
        module = getattr(module, "module", None)
    return module is not None


def run_pipeline(
    job: Job,
    model: list[Any],
    prepared: PreparedStep,
    operation: str,
    forward_step: Callable[..., Any],
    *,
    forward_only: bool,
    inside: Sequence[contextlib.AbstractContextManager[Any]] = (),
    rows: Sequence[Iterator[Any]] | None = None,
    schedule: Callable[..., Any] | None = None,
    **options: Any,
) -> tuple[list[Any], Collection[float]]:
    """Run a step's rows forward, and backward unless ``forward_only``.

    Args:
        inside: context managers of the caller's around the passes; the first is the outermost.
        rows: one iterator per model chunk; None: over the prepared rows.
        schedule: from ``get_forward_backward_func``; None: that which it gives now.
        options: further arguments of the schedule.

    Returns:
        what the last stage's loss function returned by row; temperatures that it used.
    """
    rows = prepared.iterators(len(model)) if rows is None else rows
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        # Outermost the watch: it reports to the other ranks whatever raises inside of it.
        enter(job.watch.reporting(operation))
        if not forward_only:  # forward passes alone teach no costs
            enter(_recorded(job, prepared))
            if job.options.learns_cost_model:
                passes = prepared.schedule.rows_alone(prepared.step)
                enter(learner_of(job, model).timing(passes, prepared.schedule.dims))
        dims, config = prepared.schedule.dims, get_model_config(model[0])
        # Without other stages nothing is sent.
        if dims.pipeline_parallel > 1 and not job.options.no_planned_shapes:
            # Under sequence parallelism a tensor-parallel rank holds, and sends, its part.
            shards = dims.tensor_parallel if config.sequence_parallel else 1
            tokens = prepared.schedule.row_tokens(prepared.step)
            shapes = [[of_row // shards, 1, config.hidden_size] for of_row in tokens]
            stage = parallel_state.get_pipeline_model_parallel_rank()
            transfers = PlannedTransfers(shapes, dims, stage, forward_only=forward_only)
            enter(compat.shapes_of_transfers(transfers))
        # Around all passes: the backward ones recompute with the experts of the forward ones.
        enter(replayed_step(model))
        for each in inside:
            enter(each)
        use = enter(noting_use())
        # Here, as the model may have been built after rows were planned.
        compat.end_states_with_samples()
        for chunk in model:
            compat.mask_padding(chunk)
        made: list[Any] = (schedule or get_forward_backward_func())(
            forward_step_func=forward_step,
            # The interleaved schedule takes lists, the others a model and an iterator.
            data_iterator=rows if len(rows) > 1 else rows[0],
            model=model if len(model) > 1 else model[0],
            num_microbatches=prepared.num_rows,
            # Not read, since lengths vary.
            **{"seq_length": 1, "micro_batch_size": 1, **options},
            forward_only=forward_only,
        )
    return made, use.temperatures


@contextlib.contextmanager
def _recorded(job: Job, prepared: PreparedStep) -> Iterator[None]:
    """Record the step that runs inside."""
    recorder = job.recorder
    if recorder is None:
        yield
        return
    # The device runs behind the host: without these two waits the clock would time launches.
    torch.cuda.synchronize()
    started = time.monotonic()
    yield
    torch.cuda.synchronize()
    seconds, schedule = time.monotonic() - started, prepared.schedule
    learnt = schedule.settings.learnt
    recorder.append(
        *schedule.step_plan(prepared.step),
        seconds,
        seconds_per_unit=None if learnt is None else learnt.seconds_per_unit,
    )
