"""Time that the host spends on dynamic micro-batches, beside a plain loop over rows packed by hand.

    python tests/benchmarks/bench_host_time.py [--repeats 20]

Processor time of one process with a model that does next to nothing: what is left is Python and
launches. The plain loop is Megatron's schedule with the hooks that stock training gives it. The CPU
stand-in for CUDA looks at every function of torch, so it is off while the clock runs. Medians of
pairs of steps in turns. Most rows of a step are packed while the pipeline of its first epoch runs,
and are there in later ones.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["MCORE_BATCHING_CPU"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "grpo"))
import torch
import torch.distributed as dist
from bootstrap import initialize_model_parallel, pipeline_config
from kit.model import arguments, transformer_config

from mcore_batching import megatron
from mcore_batching.batch import token_mean
from mcore_batching.megatron import cpu_emulation
from mcore_batching.megatron import plan as engine_plan
from mcore_batching.megatron.compat import packed_seq_params
from mcore_batching.planning import ParallelDims
from mcore_batching.tools.report import Table

# isort: split
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config

VOCABULARY = 8
ROWS = 16
ROW_TOKENS = 1024
Samples = dict[str, list[Any]]


class AlmostNothing(MegatronModule):
    """Logits from a table with a row for each token."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.table = torch.nn.Parameter(torch.zeros(VOCABULARY, VOCABULARY))
        self.started: list[float] = []  # of each forward pass
        self.vocab_size = VOCABULARY
        self.share_embeddings_and_output_weights = False
        self.model_type = ModelType.encoder_or_decoder

    def set_input_tensor(self, tensor: Any) -> None:
        """Nothing comes from other stages."""

    def forward(self, input_ids: torch.Tensor, *unused: Any, **also: Any) -> torch.Tensor:
        """``[1, tokens, vocabulary]``"""
        self.started.append(time.process_time())
        return torch.nn.functional.embedding(input_ids, self.table)


def samples(count: int, tokens: int) -> Samples:
    """A rollout; half of each sample is its response."""
    half = tokens // 2
    return {
        "tokens": [torch.randint(VOCABULARY, (tokens,)) for _ in range(count)],
        "total_lengths": [tokens] * count,
        "response_lengths": [half] * count,
        "loss_masks": [torch.ones(half) for _ in range(count)],
        "advantages": [torch.randn(half) for _ in range(count)],
        "log_probs": [torch.randn(half) for _ in range(count)],
        "rewards": [1.0] * count,
    }


def rows_by_hand(data: Samples, per_row: int) -> list[dict[str, Any]]:
    """Samples of one length, concatenated, with what a loss needs."""
    total, rows = data["total_lengths"][0], []
    ends = range(0, (per_row + 1) * total, total)
    for first in range(0, len(data["tokens"]), per_row):
        tokens = torch.cat(data["tokens"][first : first + per_row])
        rows.append(
            {
                "tokens": tokens[None],
                "labels": tokens.roll(-1)[None],
                "position_ids": torch.arange(total).repeat(per_row)[None],
                "at": torch.cat([torch.arange(e - total // 2 - 1, e - 1) for e in ends[1:]]),
                "loss_masks": torch.cat(data["loss_masks"][first : first + per_row]),
                "params": (torch.tensor(ends, dtype=torch.int32), total, [*ends]),
            }
        )
    return rows


def bare(logits: torch.Tensor, *unused: Any) -> Any:
    """A loss of the logits alone."""
    return logits[0, 0, 0] * 1.0, {}


def of_log_probs(logits: torch.Tensor, row: Any, totals: Any) -> Any:
    """The usual one."""
    return -token_mean(megatron.response_log_probs(logits, row), row, totals), {}


def plain_log_probs(logits: torch.Tensor, row: dict[str, torch.Tensor], tokens: float) -> Any:
    """The same of a row packed by hand."""
    lines = logits[0].index_select(0, row["at"]).float().log_softmax(-1)
    values = lines.gather(1, row["labels"][0].index_select(0, row["at"])[:, None])[:, 0]
    return -(values * row["loss_masks"]).sum() / tokens, {}


def plain_step(model: list[Any], rows: list[dict[str, Any]], loss: Any, optimizer: Any) -> None:
    """Megatron's schedule over rows packed by hand, with the hooks of ``megatron.training``."""
    trained = sum(float(row["loss_masks"].sum()) for row in rows)

    def forward_step(data: Iterator[dict[str, Any]], chunk: Any, *unused: Any) -> Any:
        row = next(data)
        logits = chunk(
            input_ids=row["tokens"],
            position_ids=row["position_ids"],
            packed_seq_params=packed_seq_params(*row["params"]),
        )

        def made(output: torch.Tensor) -> Any:
            share, metrics = loss(output, row, trained)
            reported = {"loss": share.detach().clone(), **metrics}
            return share, torch.tensor(1, dtype=torch.int), reported

        return logits, made

    hooks = {
        "finalize_model_grads_func": finalize_model_grads,
        "grad_scale_func": optimizer.scale_loss,
    }
    with mock.patch.multiple(get_model_config(model[0]), **hooks):
        schedules.get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(rows),
            model=model[0],
            num_microbatches=len(rows),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )


def _on_cpu(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return function(*given, **named | ({"device": "cpu"} if "device" in named else {}))


@contextlib.contextmanager
def without_stand_in() -> Iterator[None]:
    """The stand-in's patches alone: CUDA is the CPU where Megatron and this package name it."""
    names = ("tensor", "zeros", "empty", "full", "ones", "zeros_like")
    made = {name: functools.partial(_on_cpu, getattr(torch, name)) for name in names}
    mode: Any = cpu_emulation._mode
    mode.__exit__(None, None, None)
    try:
        with (
            mock.patch.multiple(torch, **made),
            mock.patch.object(torch.Tensor, "cuda", lambda tensor, *a, **k: tensor),
            mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        ):
            yield
    finally:
        mode.__enter__()


def made_model() -> tuple[list[Any], Any]:
    """The model in Megatron's wrapper, and its optimizer."""
    config = transformer_config("dense", num_layers=1, **pipeline_config(ParallelDims()))
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = [DistributedDataParallel(config, ddp, AlmostNothing(config))]
    return model, get_megatron_optimizer(OptimizerConfig(lr=0.0, clip_grad=0.0), model)


def timed(model: list[Any], step: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds before the first forward pass, and from there to the last backward pass."""
    started, schedule = model[0].module.started, schedules.forward_backward_no_pipelining
    started.clear()
    ended = list[float]()

    def run(**given: Any) -> Any:
        made = schedule(**given)
        ended.append(time.process_time())
        return made

    began = time.process_time()
    with mock.patch.object(schedules, "forward_backward_no_pipelining", run):
        step()
    return 1000 * (started[0] - began), 1000 * (ended[-1] - started[0])


def beside_plain_loop(
    job: tuple[list[Any], Any], data: Samples, per_row: int, losses: tuple[Any, Any], repeats: int
) -> list[list[tuple[float, float]]]:
    """`timed` steps of rows of so many samples, less those of the plain loop, in the first epoch
    and in later ones."""
    (model, optimizer), (ours, plain) = job, losses
    args = arguments(ParallelDims(), max_tokens_per_gpu=per_row * data["total_lengths"][0])
    rows, epochs = rows_by_hand(data, per_row), []
    for is_first in (True, False):
        found = []
        rollout = megatron.get_data_iterator(args, model, data)
        assert rollout[1][0] == len(rows), rollout[1]
        for _ in range(repeats + 2):
            if is_first:
                rollout = megatron.get_data_iterator(args, model, data)
            step = functools.partial(megatron.train_step, ours, args, model, *rollout, optimizer)
            with without_stand_in():
                own = timed(model, step)
                others = timed(model, lambda: plain_step(model, rows, plain, optimizer))
            found.append((own[0] - others[0], own[1] - others[1]))
        epochs.append(found[2:])
    return epochs


def reading(model: list[Any], repeats: int) -> list[float]:
    """Milliseconds of `get_data_iterator` for 512 samples, without planning."""
    planning: list[float] = []
    plan = engine_plan.Planner.plan

    def timed_plan(*args: Any) -> Any:
        started = time.process_time()
        made = plan(*args)
        planning.append(time.process_time() - started)
        return made

    args, found = arguments(ParallelDims(), max_tokens_per_gpu=16_000), []
    data = samples(512, 2_000)
    with without_stand_in(), mock.patch.object(engine_plan.Planner, "plan", timed_plan):
        for _ in range(repeats + 1):
            planning.clear()
            started = time.process_time()
            megatron.get_data_iterator(args, model, data)
            found.append(1000 * (time.process_time() - started - sum(planning)))
    return found[1:]


def cell(times: list[float]) -> str:
    """The median, and the range in brackets."""
    return f"{statistics.median(times):.2f} ms ({min(times):.2f} to {max(times):.2f})"


def measured(repeats: int) -> Iterator[tuple[str, list[list[float]]]]:
    """A row's name, and milliseconds in the first and in later epochs."""
    job = made_model()
    losses = {"bare loss": (bare, bare), "log-probs": (of_log_probs, plain_log_probs)}
    for name, per_row in itertools.product(losses, (1, 4, 32)):
        data = samples(ROWS * per_row, ROW_TOKENS // per_row)
        steps = beside_plain_loop(job, data, per_row, losses[name], repeats)
        passes = [[after / ROWS for _, after in each] for each in steps]
        yield f"micro-batch of {per_row} samples, {name}", passes
    steps = beside_plain_loop(job, samples(512, 2_000), 8, (bare, bare), repeats)
    before_passes = [[before for before, _ in each] for each in steps]
    yield "before the first pass, 64 rows x 8 x 2,000", before_passes
    yield "get_data_iterator of 512 samples", [reading(job[0], repeats), []]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        initialize_model_parallel(ParallelDims())
        rows = [
            (name, *(cell(each) if each else "" for each in times))
            for name, times in measured(repeats)
        ]
        columns = ("host time beside the plain loop's", "first epoch", "later epochs")
        print(Table(columns=columns, rows=tuple(rows)))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
