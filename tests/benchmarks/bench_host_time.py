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
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["MCORE_BATCHING_CPU"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "grpo"))
import torch
import torch.distributed as dist
from bootstrap import initialize_model_parallel

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
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

VOCABULARY = 8
ROWS = 16
ROW_TOKENS = 1024
Loss = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


class AlmostNothing(MegatronModule):
    """Logits from a table with a row for each token."""

    def __init__(self, config: TransformerConfig) -> None:
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


def samples(count: int, tokens: int) -> dict[str, list[Any]]:
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


def rows_by_hand(data: dict[str, list[Any]], per_row: int) -> list[dict[str, Any]]:
    """Samples of one length, concatenated, with what a loss needs."""
    rows = []
    for first in range(0, len(data["tokens"]), per_row):
        each = {name: values[first : first + per_row] for name, values in data.items()}
        tokens, total = torch.cat(each["tokens"]), each["total_lengths"][0]
        ends = range(0, (per_row + 1) * total, total)
        at = [torch.arange(end - total // 2 - 1, end - 1) for end in ends[1:]]
        rows.append(
            {
                "tokens": tokens[None],
                "labels": tokens.roll(-1)[None],
                "position_ids": torch.arange(total).repeat(per_row)[None],
                "at": torch.cat(at),
                "loss_masks": torch.cat(each["loss_masks"]),
                "offsets": torch.tensor(ends, dtype=torch.int32),
                "ends": [*ends],
                "longest": total,
            }
        )
    return rows


def bare(logits: torch.Tensor, *unused: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss of the logits alone."""
    return logits[0, 0, 0] * 1.0, {}


def of_log_probs(
    logits: torch.Tensor, row: Any, totals: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The usual one."""
    values = megatron.response_log_probs(logits, row)
    return -token_mean(values, row, totals), {}


def plain_log_probs(
    logits: torch.Tensor, row: dict[str, torch.Tensor], tokens: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same of a row packed by hand."""
    lines = logits[0].index_select(0, row["at"]).float().log_softmax(-1)
    values = lines.gather(1, row["labels"][0].index_select(0, row["at"])[:, None])[:, 0]
    return -(values * row["loss_masks"]).sum() / tokens, {}


def plain_step(model: list[Any], rows: list[dict[str, Any]], loss: Loss, optimizer: Any) -> None:
    """Megatron's schedule over rows packed by hand, with the hooks of ``megatron.training``."""
    trained = sum(float(row["loss_masks"].sum()) for row in rows)

    def forward_step(data: Iterator[dict[str, Any]], chunk: Any, *unused: Any) -> Any:
        row = next(data)
        params = packed_seq_params(row["offsets"], row["longest"], row["ends"])
        logits = chunk(
            input_ids=row["tokens"], position_ids=row["position_ids"], packed_seq_params=params
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
    mode: Any = cpu_emulation._mode
    mode.__exit__(None, None, None)
    made = {}
    for name in ("tensor", "zeros", "empty", "full", "ones", "zeros_like"):
        made[name] = functools.partial(_on_cpu, getattr(torch, name))
    try:
        with (
            mock.patch.multiple(torch, **made),
            mock.patch.object(torch.Tensor, "cuda", lambda tensor, *a, **k: tensor),
            mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        ):
            yield
    finally:
        mode.__enter__()


def arguments(cap: int) -> SimpleNamespace:
    """As Megatron parses them."""
    return SimpleNamespace(
        max_tokens_per_gpu=cap,
        global_batch_size=None,
        seq_length=1,
        dynamic_batch_cost_model="fixed",
    )


class Job:
    """One process, its model and optimizer."""

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        initialize_model_parallel(ParallelDims())
        config = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=1,
            calculate_per_token_loss=True,
            variable_seq_lengths=True,
            moe_token_dispatcher_type="alltoall",
            use_cpu_initialization=True,
        )
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.model = [DistributedDataParallel(config, ddp, AlmostNothing(config))]
        self.optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.0, clip_grad=0.0), self.model)

    def timed(self, step: Callable[[], Any]) -> tuple[float, float]:
        """Milliseconds before the first forward pass, and from there to the last backward pass."""
        module, schedule = self.model[0].module, schedules.forward_backward_no_pipelining
        module.started.clear()
        ended = list[float]()

        def run(**given: Any) -> Any:
            made = schedule(**given)
            ended.append(time.process_time())
            return made

        began = time.process_time()
        with mock.patch.object(schedules, "forward_backward_no_pipelining", run):
            step()
        first = module.started[0]
        return 1000 * (first - began), 1000 * (ended[-1] - first)

    def beside_plain_loop(
        self,
        data: dict[str, list[Any]],
        per_row: int,
        losses: tuple[Loss, Loss],
        repeats: int,
        *,
        first_epoch: bool,
    ) -> list[tuple[float, float]]:
        """`timed` steps of rows of so many samples, less those of the plain loop."""
        (ours, plain), args = losses, arguments(per_row * data["total_lengths"][0])
        rollout = megatron.get_data_iterator(args, self.model, data)
        rows, found = rows_by_hand(data, per_row), []
        assert rollout[1][0] == len(rows), rollout[1]
        for _ in range(repeats + 2):
            if first_epoch:
                rollout = megatron.get_data_iterator(args, self.model, data)
            step = functools.partial(
                megatron.train_step, ours, args, self.model, *rollout, self.optimizer
            )
            with without_stand_in():
                own = self.timed(step)
                others = self.timed(lambda: plain_step(self.model, rows, plain, self.optimizer))
            found.append((own[0] - others[0], own[1] - others[1]))
        return found[2:]

    def reading(self, repeats: int) -> list[float]:
        """Milliseconds of `get_data_iterator` for 512 samples, without planning."""
        planning: list[float] = []
        plan = engine_plan._plan_together

        def timed(*args: Any) -> Any:
            started = time.process_time()
            made = plan(*args)
            planning.append(1000 * (time.process_time() - started))
            return made

        args, data, found = arguments(16_000), samples(512, 2_000), []
        with without_stand_in(), mock.patch.object(engine_plan, "_plan_together", timed):
            for _ in range(repeats + 1):
                planning.clear()
                started = time.process_time()
                megatron.get_data_iterator(args, self.model, data)
                found.append(1000 * (time.process_time() - started) - sum(planning))
        return found[1:]


def cell(times: list[float]) -> str:
    """The median, and the range in brackets."""
    return f"{statistics.median(times):.2f} ms ({min(times):.2f} to {max(times):.2f})"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        job = Job(folder)
        found: dict[str, list[list[float]]] = {}
        epochs = (True, False)
        for name, losses in {
            "bare loss": (bare, bare),
            "log-probs": (of_log_probs, plain_log_probs),
        }.items():
            for per_row in (1, 4, 32):
                data = samples(ROWS * per_row, ROW_TOKENS // per_row)
                given = data, per_row, losses, repeats
                steps = [job.beside_plain_loop(*given, first_epoch=first) for first in epochs]
                found[f"micro-batch of {per_row} samples, {name}"] = [
                    [passes / ROWS for _, passes in each] for each in steps
                ]
        given = samples(512, 2_000), 8, (bare, bare), repeats
        steps = [job.beside_plain_loop(*given, first_epoch=first) for first in epochs]
        found["before the first pass, 64 rows x 8 x 2,000"] = [
            [before for before, _ in each] for each in steps
        ]
        found["get_data_iterator of 512 samples"] = [job.reading(repeats)]
        rows = [
            (name, *map(cell, times), *[""] * (2 - len(times))) for name, times in found.items()
        ]
        columns = ("host time beside the plain loop's", "first epoch", "later epochs")
        print(Table(columns=columns, rows=tuple(rows)))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
