"""Trains a small Megatron GPT by GRPO on recorded rollouts, with dynamic micro-batches.

    MCORE_BATCHING_CPU=1 torchrun --nproc-per-node 4 examples/grpo.py --compare

(without the variable on four GPUs).

Each iteration takes the groups of some prompts. Forward-only passes give the log-probabilities of
the policy as it is (old) and of its frozen initial copy (reference); then several optimizer steps
follow, each over ``--global-batch-size`` samples. ``--baseline`` runs the same job with one sample
a micro-batch, ``--compare`` both jobs and a comparison.

The rollouts are recorded ones: nothing is generated, so old log-probabilities stand in for those
of the policy that sampled. The job shows the engine at work; it does not make a good player.

Writes, under ``--out``: ``dynamic/`` and ``baseline/`` with ``metrics.jsonl`` (a line an
iteration), ``settings.json`` and ``micro_batches.png``; ``comparison.png`` once both are there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import metrics
import torch.distributed as dist
from comparison import compare
from figures import draw_comparison, draw_micro_batches
from options import layout_of, parse_arguments, settings_of
from reporting import Reporter
from rollouts import Rollout, read_groups
from training import train

from mcore_batching.megatron.bootstrap import initialize_model_parallel, initialize_process_group
from mcore_batching.planning import Layout


def main() -> None:
    """Run the job on this rank."""
    options = parse_arguments()
    try:
        groups = read_groups(options.rollouts)
        layout = layout_of(options, int(os.environ.get("WORLD_SIZE", "1")))
        initialize_process_group()
        initialize_model_parallel(layout, options.seed)
    except (ValueError, RuntimeError) as error:
        # What the user can put right: every rank finds the same, and one says it.
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"grpo.py: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    reporter = Reporter(speaks=dist.get_rank() == 0)
    both = ("dynamic", "baseline")
    for name in both if options.compare else both[options.baseline :][:1]:
        run(name, options, layout, groups, reporter)
    if dist.get_rank() == 0:
        compare_runs(options.out, reporter)
    dist.destroy_process_group()


def run(
    name: str,
    options: argparse.Namespace,
    layout: Layout,
    groups: Sequence[list[Rollout]],
    reporter: Reporter,
) -> None:
    """One run, ``"dynamic"`` or ``"baseline"``, and its files."""
    folder: Path = options.out / name
    first = dist.get_rank() == 0
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").unlink(missing_ok=True)
        (folder / "settings.json").write_text(json.dumps(settings_of(options), indent=2) + "\n")
    done: list[metrics.IterationMetrics] = []

    def on_iteration(each: metrics.IterationMetrics) -> None:
        done.append(each)
        reporter.iteration(each)
        if first:
            metrics.append(folder / "metrics.jsonl", each)

    reporter.begin(name, options.iterations)
    spans = train(
        options,
        layout,
        groups,
        one_sample_a_micro_batch=name == "baseline",
        on_iteration=on_iteration,
    )
    reporter.end(done)
    if first:
        draw_micro_batches(
            spans,
            cap_tokens=options.max_tokens_per_gpu * layout.context_parallel,
            title=f"one optimizer step of the {name} run",
            out=folder / "micro_batches.png",
        )
        reporter.say(f"{folder}: metrics.jsonl, micro_batches.png")


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
    result = compare(*(metrics.read(folder / "metrics.jsonl") for folder in folders))
    draw_comparison(result, out / "comparison.png")
    reporter.say(f"{result}\n{out}: comparison.png")


if __name__ == "__main__":
    main()
