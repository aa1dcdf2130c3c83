"""Trains a small Megatron GPT by GRPO, with dynamic micro-batches.

    MCORE_BATCHING_CPU=1 torchrun --nproc-per-node 4 examples/grpo/grpo.py --compare
    MCORE_BATCHING_CPU=1 torchrun --nproc-per-node 4 examples/grpo/grpo.py --online [--step-wise]

(without the variable on four GPUs).

Each iteration takes the groups of some prompts. Forward-only passes give the log-probabilities of
the policy as it is (old) and of its frozen copy (reference); then several optimizer steps follow.

The first command takes recorded rollouts, and ``--global-batch-size`` samples per step.
``--baseline`` runs the same job with one sample per micro-batch, ``--compare`` both jobs and a
comparison. Nothing is generated, so old log-probabilities stand in for those of the policy that
sampled: it shows the engine at work, and does not make a good player.

The second makes one. After a short supervised start the policy plays a game of several turns,
token by token over the pipeline, and learns from what it won. A step takes the samples of
``--groups-per-step`` prompts, so neither the number of steps nor the learning rate
(``--lr-decay-style``) depends on how many turns were played, nor on whether a sample is a whole
game or, with ``--step-wise``, one turn.

Writes, under ``--out``: ``dynamic/`` and ``baseline/`` with ``metrics.jsonl`` (a line an
iteration), ``settings.json`` and ``micro_batches.png``; ``comparison.png`` once both are there;
``online/`` or ``online-step-wise/`` with the same files and ``reward.png``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import metrics
import online_reporting
import torch.distributed as dist
from bootstrap import (
    initialize_model_parallel,
    initialize_process_group,
)
from comparison import compare
from figures import draw_comparison, draw_micro_batches
from online import train_online
from options import dims_of, parse_arguments, settings_of
from reporting import Reporter
from reward_figure import draw_reward
from rollouts import Rollout, read_groups
from timeline import Span
from training import train

from mcore_batching.megatron import cpu_emulation
from mcore_batching.planning import ParallelDims

NEXT = """\
next: bash examples/quickstart.sh --online    (the policy plays a game itself, and learns from it)
      mcore-batching plan LENGTHS --max-tokens-per-gpu 16384 --dp 8 --pp 4    (your own lengths)
      README.md, "Your own loop"; a script of yours: python -m mcore_batching.run script.py …"""


def main() -> None:
    """Run the job on this rank."""
    options = parse_arguments()
    try:
        groups = [] if options.online else read_groups(options.rollouts)
        dims = dims_of(options, int(os.environ.get("WORLD_SIZE", "1")))
        initialize_process_group()
        initialize_model_parallel(dims, options.seed)
    except (ValueError, RuntimeError) as error:
        # What the user can put right: every rank finds the same, and one says it.
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"grpo.py: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    if options.online:
        run_online(options, dims)
    else:
        run_recorded(options, dims, groups)
    dist.destroy_process_group()


def run_recorded(
    options: argparse.Namespace, dims: ParallelDims, groups: Sequence[list[Rollout]]
) -> None:
    """Train on recorded rollouts, with dynamic micro-batches, without or both, and compare."""
    reporter = Reporter(dist.get_rank() == 0)
    both = ("dynamic", "baseline")
    for name in both if options.compare else both[options.baseline :][:1]:
        train_this = functools.partial(
            train, options, dims, groups, one_sample_a_micro_batch=name == "baseline"
        )
        run(name, options, dims, reporter, train_this)
    if dist.get_rank() == 0:
        compare_runs(options.out, reporter)
        reporter.say(NEXT)


def run_online(options: argparse.Namespace, dims: ParallelDims) -> None:
    """Train on games that the policy plays, and draw its reward."""
    reporter = Reporter(
        dist.get_rank() == 0, online_reporting.iteration_line, online_reporting.run_table
    )

    def on_warm_start(step: int, loss: float) -> None:
        if step % 20 == 0 or step == options.warm_start_steps:
            reporter.say(f"warm start, step {step:>3}  loss {loss:.3f}")

    name = "online-step-wise" if options.step_wise else "online"
    train_this = functools.partial(train_online, options, dims, on_warm_start=on_warm_start)
    done = run(name, options, dims, reporter, train_this)
    if dist.get_rank() == 0:
        draw_reward(done, name, options.out / name / "reward.png")
        reporter.say(f"{online_reporting.reward_summary(done)}\n{options.out / name}: reward.png")


def run(
    name: str,
    options: argparse.Namespace,
    dims: ParallelDims,
    reporter: Reporter,
    train_this: Callable[..., list[Span]],
) -> list[Any]:
    """Train once and write the run's files.

    Args:
        name: of its folder.
        options: the job's flags.
        dims: of the job.
        reporter: prints.
        train_this: trains; takes ``on_iteration``.

    Returns:
        metrics of every iteration.
    """
    folder: Path = options.out / name
    first = dist.get_rank() == 0
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").unlink(missing_ok=True)
        (folder / "settings.json").write_text(json.dumps(settings_of(options), indent=2) + "\n")
    done: list[Any] = []

    def on_iteration(each: metrics.IterationMetrics) -> None:
        done.append(each)
        reporter.iteration(each)
        if first:
            metrics.append(folder / "metrics.jsonl", each)

    reporter.begin(name, options.iterations)
    spans = train_this(on_iteration=on_iteration)
    reporter.end(done)
    if first:
        draw_micro_batches(
            spans,
            cap_tokens=options.max_tokens_per_gpu * dims.context_parallel,
            title=f"one optimizer step of the {name} run{shared_cores()}",
            out=folder / "micro_batches.png",
        )
        reporter.say(f"{folder}: metrics.jsonl, settings.json, micro_batches.png")
    return done


def shared_cores() -> str:
    """What stretches passes on the CPU, where there are fewer cores than processes."""
    cores, processes = len(os.sched_getaffinity(0)), dist.get_world_size()
    if not cpu_emulation.is_enabled() or cores >= processes:
        return ""
    return f"; {processes} processes share {cores} cores: passes take longer while others run"


def compare_runs(out: Path, reporter: Reporter) -> None:
    """Draw and print the comparison, if both runs are there and had the same settings."""
    folders = out / "dynamic", out / "baseline"
    if not all((folder / "metrics.jsonl").exists() for folder in folders):
        return
    settings = [json.loads((folder / "settings.json").read_text()) for folder in folders]
    different = [key for key in settings[0] if settings[0][key] != settings[1].get(key)]
    if different:
        reporter.say(
            f"{out}: no comparison, since the runs in dynamic and baseline differ in "
            f"{', '.join(different)}; --compare runs both anew"
        )
        return
    result = compare(
        *(metrics.read(folder / "metrics.jsonl", metrics.IterationMetrics) for folder in folders)
    )
    draw_comparison(result, out / "comparison.png")
    reporter.say(f"{result}\n{out}: comparison.png")


if __name__ == "__main__":
    main()
