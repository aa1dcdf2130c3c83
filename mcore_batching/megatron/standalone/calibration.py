"""Timing of a Megatron layer stack on the present device, for the planner's cost model.

The stack is that of a middle pipeline stage: transformer layers, no embedding, no logits. Rows of
several sizes are run forward and backward, each filled with sequences of one length, so that the
fit can separate work that grows with tokens from work that grows with their squares.

Where torchrun started several processes, rows of one sequence are also cut over 2, 4, ... of them,
each block of ranks its own row, all at once as in a step: what that takes beside the same row on
one rank is the cost of communication, and of kernels that get small.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch._C._distributed_c10d import HashStore

from mcore_batching.megatron import compat, cpu_emulation
from mcore_batching.megatron.attention.specs import packed_layer_spec, uses_transformer_engine
from mcore_batching.megatron.checks.shared_rows import let_rows_have_groups
from mcore_batching.megatron.job.job import job_of
from mcore_batching.megatron.job.row_groups import make_row_groups, row_group
from mcore_batching.megatron.standalone.bootstrap import (
    initialize_model_parallel,
    initialize_process_group,
    pipeline_config,
)
from mcore_batching.planning import ParallelDims
from mcore_batching.planning.cost_fit import CostFit, Timing, fit_cost_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerStack:
    """The layers to time: those of one pipeline stage on one GPU.

    Attributes:
        num_layers: of the stage.
        hidden_size: of the residual stream.
        ffn_hidden_size: of the feed-forward layers.
        num_attention_heads: query heads.
        num_query_groups: key-value heads.
        dtype: of weights and activations.
    """

    num_layers: int = 4
    hidden_size: int = 1024
    ffn_hidden_size: int = 4096
    num_attention_heads: int = 16
    num_query_groups: int = 8
    dtype: torch.dtype = torch.bfloat16


def calibrate(
    stack: LayerStack,
    *,
    max_tokens: int,
    repeats: int = 5,
    rows: Sequence[Sequence[int]] | None = None,
) -> tuple[CostFit, list[Timing]]:
    """Time a layer stack and fit the cost model.

    Joins a process group if there is none: torchrun's, or one of its own. A collective over its
    ranks; the slowest one's times count.

    Args:
        stack: the layers.
        max_tokens: of the longest row.
        repeats: timed runs of each row, of which the median counts.
        rows: sequence lengths of each row; None: `rows_to_time`.

    Returns:
        the fit, and the timings that it was fitted to; the same on every rank.

    Raises:
        ConfigError: the measured times do not grow with tokens.
    """
    if not dist.is_initialized():
        _join()
    dims = ParallelDims(data_parallel=dist.get_world_size())
    sizes = dims.row_sizes(dims.data_parallel)
    model = _stack(stack)
    if len(sizes) > 1:
        make_row_groups(job_of(), sizes)
        let_rows_have_groups([model])
    # By what is timed, since a row that is shared may be among the others.
    timed = {(tuple(lengths), 1): None for lengths in rows or rows_to_time(max_tokens)}
    timed |= {(row, size): None for row in _shared_rows(max_tokens, sizes) for size in sizes}
    seconds = [_seconds(model, stack, *each, repeats) for each in timed]
    slowest = torch.tensor(seconds, dtype=torch.float64, device=torch.cuda.current_device())
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    timings = [
        Timing(
            lengths=lengths,
            forward_seconds=forward,
            backward_seconds=backward,
            context_parallel=size,
        )
        for (lengths, size), (forward, backward) in zip(timed, slowest.tolist(), strict=True)
    ]
    return fit_cost_model(timings), timings


def _join() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        initialize_process_group()
    else:
        dist.init_process_group(
            "gloo" if cpu_emulation.is_enabled() else "nccl",
            store=HashStore(),
            rank=0,
            world_size=1,
        )
    initialize_model_parallel(ParallelDims(data_parallel=dist.get_world_size()))


def rows_to_time(max_tokens: int) -> list[tuple[int, ...]]:
    """Rows of `max_tokens`, a half, a quarter … of it, each of one, four and sixteen sequences."""
    made = []
    for divisor in (1, 2, 4, 8, 16):
        tokens = max_tokens // divisor
        for number in (1, 4, 16):
            if tokens // number >= 16:
                made.append((tokens // number,) * number)
    return made


def _shared_rows(max_tokens: int, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows of one sequence, of `max_tokens`, a half, a quarter … of it, that each size divides into
    two chunks a rank; none where one rank is all there are."""
    multiple = 2 * math.lcm(*sizes)
    lengths = [max_tokens // divisor // multiple * multiple for divisor in (1, 2, 4, 8, 16)]
    return [(length,) for length in lengths if length and len(sizes) > 1]


def _stack(stack: LayerStack) -> Any:
    config = TransformerConfig(
        num_layers=stack.num_layers,
        hidden_size=stack.hidden_size,
        ffn_hidden_size=stack.ffn_hidden_size,
        num_attention_heads=stack.num_attention_heads,
        num_query_groups=stack.num_query_groups,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=stack.dtype,
        pipeline_dtype=stack.dtype,
        bf16=stack.dtype == torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=uses_transformer_engine(),
        **pipeline_config(ParallelDims()),
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=packed_layer_spec(config),
        vocab_size=128,
        max_sequence_length=1 << 20,
        pre_process=False,
        post_process=False,
        position_embedding_type="rope",
    )
    return model.to(device=torch.cuda.current_device(), dtype=stack.dtype)


def _seconds(
    model: Any, stack: LayerStack, lengths: tuple[int, ...], size: int, repeats: int
) -> tuple[float, float]:
    """Median seconds of the forward and of the backward pass of a row on `size` ranks."""
    offsets = [0, *itertools.accumulate(lengths)]
    device = torch.cuda.current_device()
    hidden = torch.randn(
        offsets[-1] // size,
        1,
        stack.hidden_size,
        dtype=stack.dtype,
        device=device,
        requires_grad=True,
    )
    forward, backward = [], []
    for run in range(repeats + 1):
        params = compat.packed_seq_params(
            torch.tensor(offsets, dtype=torch.int32, device=device),
            max(lengths),
            offsets,
            row_group(size),
        )
        model.set_input_tensor(hidden)
        dist.barrier()
        started = _now()
        output = model(
            input_ids=None, position_ids=None, attention_mask=None, packed_seq_params=params
        )
        between = _now()
        output.backward(torch.ones_like(output))
        ended = _now()
        if run:  # the first run allocates, compiles kernels, and connects ranks
            forward.append(between - started)
            backward.append(ended - between)
    return statistics.median(forward), statistics.median(backward)


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()
