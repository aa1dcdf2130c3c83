"""A job that trains a few steps with ``--dynamic-batch-record``."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from bootstrap import build_model, pipeline_config
from megatron.core import parallel_state

from kit.exactness import arguments
from kit.model import adam, transformer_config
from kit.objective import packed_objective
from kit.samples import VOCABULARY
from kit.timing import rollouts
from mcore_batching.megatron import get_data_iterator, train_step
from mcore_batching.planning import ParallelDims


def record(dims: dict[str, Any], steps: int, cost_model: str, **flags: Any) -> dict[str, str]:
    """Train, and record into a folder that every rank finds.

    Args:
        dims: of the job.
        steps: optimizer steps.
        cost_model: as JSON.
        flags: further arguments of training.

    Returns:
        what planning twice printed, and on rank 0 what lies in the folder's one file.
    """
    box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box, src=0)
    directory = Path(box[0]) / "steps"
    model_file = Path(box[0]) / "cost.json"
    if dist.get_rank() == 0:
        model_file.write_text(cost_model)
    dist.barrier()
    shape = ParallelDims(**dims)
    model = build_model(
        transformer_config("dense", **pipeline_config(shape)),
        vocab_size=VOCABULARY,
        max_sequence_length=256,
    )
    optimizer = adam(model, distributed=False)
    args = arguments(
        shape,
        dynamic_batch_record=str(directory),
        dynamic_batch_cost_model=str(model_file),
        global_batch_size=8,
        **flags,
    )
    data = rollouts(4 * steps, 16, seed=parallel_state.get_data_parallel_rank())
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        get_data_iterator(args, model, data)
        iterators, counts = get_data_iterator(args, model, data)
    for step in range(steps):
        train_step(packed_objective, args, model, iterators, counts, optimizer, step=step)
    told = {"printed": printed.getvalue(), "recorded": ""}
    if dist.get_rank() == 0:
        (file,) = directory.glob("*.jsonl")
        told["recorded"] = file.read_text()
    return told
