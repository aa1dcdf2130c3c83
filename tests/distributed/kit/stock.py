"""Jobs that run a stock training script through the launcher, and record what Megatron saw of it.

A process runs script after script: what ``megatron.training`` keeps of one is taken down before the
next. Losses are recorded at full precision, as the training loop hands them to its log.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from megatron.core.transformer.moe import moe_logging
from megatron.training import argument_utils, get_args, training

from kit.harness import REPOSITORY
from kit.worker import release_groups
from kit.workers import worker_with
from mcore_batching import run
from mcore_batching.integrations.megatron_lm import forward_backward, install
from mcore_batching.integrations.megatron_lm.forward_backward import PREFIX
from mcore_batching.megatron.plan import Planner

# Every parser reads the sources of Megatron's dataclasses for its help texts, half a second each
# time; here once a process.
_Factory = argument_utils.ArgumentGroupFactory
_read_docstrings = _Factory._get_field_docstrings
_docstrings_of = functools.cache(lambda of: _read_docstrings(_Factory.__new__(_Factory), of))
_Factory._get_field_docstrings = lambda self, of: _docstrings_of(of)


def train(script: str, words: Sequence[str]) -> dict[str, Any]:
    """Run a script through ``mcore_batching.run`` in this process; ``{folder}`` in its arguments is
    one that all jobs of a launch share.

    Returns:
        what this rank saw: ``steps``, for every iteration what the log was given of it
        (`_listening`); ``evaluations``, the losses that each returned; ``error``, ``message``,
        ``cause`` and ``seconds`` since the last step, if the run raised (``SystemExit`` where
        Megatron exits early).
    """
    folder = Path(sys.argv[1])
    before = sys.argv, list(sys.path)
    record: dict[str, Any] = {"steps": [], "evaluations": []}
    try:
        # A script may end the process group, which is that of the jobs to come.
        with _listening(record), mock.patch.object(dist, "destroy_process_group"):
            try:
                run.main([str(REPOSITORY / script), *(w.format(folder=folder) for w in words)])
            finally:
                install([]).undo()  # the one that there is, or an empty one
    except (Exception, SystemExit) as exception:
        record |= {
            "error": type(exception).__name__,
            "message": str(exception),
            "cause": type(exception.__cause__).__name__,
            "seconds": time.monotonic() - record.get("ended", 0.0),
        }
    finally:  # forget the run, so that another can begin
        training.destroy_global_state()
        release_groups()
        sys.argv, sys.path[:] = before
    return record


def train_and_resume(script: str, words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Records of a run that saves checkpoints, ``whole``, one that goes on from that at half of its
    steps, ``resumed``, and one ``relaunched`` when all is done."""
    half = words[words.index("--save-interval") + 1]
    loads = ["--load" if word == "--save" else word for word in words]
    return {
        "whole": train(script, words),
        "resumed": train(script, [*loads, "--ckpt-step", half]),
        "relaunched": train(script, loads),
    }


@contextlib.contextmanager
def _listening(record: dict[str, Any]) -> Iterator[None]:
    """Record what ``megatron.training`` logs and evaluates.

    Before the launcher hooks anything: the hooks then call these, as they would the originals.
    """
    log, evaluate = training.training_log, training.evaluate
    tracker, statistics = moe_logging.MoEMetricsTracker, forward_backward.step_statistics
    report, record_loss = tracker.report, tracker.record
    signature = inspect.signature(log)
    moe: dict[str, Any] = {"recorded": 0.0, "times": 0, "reported": None}
    figures: dict[str, Any] = {}

    @functools.wraps(log)
    def training_log(*arguments: Any, **options: Any) -> Any:
        given = signature.bind(*arguments, **options).arguments
        losses = {name: float(value) for name, value in given["loss_dict"].items()}
        ours = {n.removeprefix(PREFIX): v for n, v in losses.items() if n.startswith(PREFIX)}
        step = {
            "iteration": given["iteration"],
            # Losses and statistics are there on the last pipeline stage.
            "loss": {n: v for n, v in losses.items() if not n.startswith(PREFIX)},
            "batching": ours | figures,
            "grad_norm": float(given["grad_norm"]),
            "learning_rate": given["learning_rate"],
            "consumed_samples": get_args().consumed_train_samples,
            "skipped": given["skipped_iter"],
            # Sums over samples of their lengths and of their squares.
            "tokens": given["total_real_tokens_in_batch"],
            "squares": given["seqlen_squared_sum_in_batch"],
            # Loss functions called so far, if the script counts them.
            "num_losses": getattr(get_args(), "num_losses", None),
        }
        result = log(*arguments, **options)
        record["steps"].append(step | {"moe": dict(moe)})
        record["ended"] = time.monotonic()
        moe.update(recorded=0.0, times=0, reported=None)
        return result

    @functools.wraps(evaluate)
    def evaluated(*arguments: Any, **options: Any) -> Any:
        result = evaluate(*arguments, **options)
        record["evaluations"].append({k: float(v) for k, v in result[0].items()})
        return result

    def of_step(*plan_and_lengths: Any) -> Any:
        made = statistics(*plan_and_lengths)
        figures.update(placeholders=made.num_placeholders, balance=made.rank_balance)
        return made

    def recorded(self: Any, name: str, value: Any, *rest: Any, **options: Any) -> None:
        moe["recorded"] += float(value)
        moe["times"] += 1
        record_loss(self, name, value, *rest, **options)

    def reported(self: Any, *arguments: Any, **options: Any) -> Any:
        # The losses that it adds to; most were there before.
        total_loss_dict = options["total_loss_dict"]
        before = {name: float(value) for name, value in total_loss_dict.items()}
        text = report(self, *arguments, **options)
        moe["reported"] = {
            name: float(value) - before.get(name, 0.0)
            for name, value in total_loss_dict.items()
            if name.endswith("_loss")
        }
        return text

    with (
        # It draws random numbers, as many as layout and micro-batch size want, before the weights.
        mock.patch.object(training, "set_jit_fusion_options"),
        mock.patch.multiple(training, training_log=training_log, evaluate=evaluated),
        mock.patch.object(forward_backward, "step_statistics", of_step),
        mock.patch.multiple(tracker, report=reported, record=recorded),
    ):
        yield


def train_ahead(script: str, words: Sequence[str], fault: str | None = None) -> dict[str, Any]:
    """`train` with something that happens to the worker, and what `worker_with` yields of it."""
    with worker_with(fault) as made:
        record = train(script, words)
    return record | made


def held(script: str, words: Sequence[str]) -> dict[str, Any]:
    """``error`` of `train` over many steps, each made ahead, if it raised, and ``held``: every
    hundredth step what this process and its planning process hold, KiB of memory each."""
    looks: list[list[int]] = []
    plan, numbers = Planner.plan, itertools.count(1)

    def planned(self: Planner, *arguments: Any) -> Any:
        if next(numbers) % 100 == 0:
            pid = self.worker.pid
            assert pid is not None
            looks.append([*map(_resident_kib, (os.getpid(), pid))])
        return plan(self, *arguments)

    with mock.patch.object(Planner, "plan", planned):
        record = train(script, words)
    return {"error": record.get("error"), "held": looks}


def _resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
