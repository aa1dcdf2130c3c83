"""The flags of ``grpo.py``, and the parallel dims that they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from byte_tokens import PADDING

from mcore_batching.megatron import add_dynamic_batch_arguments
from mcore_batching.planning import ParallelDims

BUNDLED_ROLLOUTS = Path(__file__).parents[1] / "data" / "arithmetic_rollouts.jsonl"
ONLINE_DEFAULTS: dict[str, Any] = {
    "max_tokens_per_gpu": 512,
    "iterations": 40,
    "prompts_per_iteration": 32,
    "num_layers": 2,
    "hidden_size": 64,
    "lr": 1e-3,
    "kl_coefficient": 0.01,
}
"""What ``--online`` takes instead of the other defaults."""
STEP_WISE_DEFAULTS: dict[str, Any] = {"dynamic_batch_share_prefixes": True}
"""What ``--online --step-wise`` takes instead: a turn begins the next."""
ONLY_ONLINE = (
    "step_wise",
    "trajectories_per_prompt",
    "groups_per_step",
    "warm_start_steps",
    "warm_start_lr",
)
"""Options that mean nothing without ``--online``."""
NOT_ONLINE = ("rollouts", "global_batch_size", "baseline", "compare")
"""Options that mean nothing with it."""
AT_LEAST_ONE = (
    "iterations",
    "prompts_per_iteration",
    "global_batch_size",
    "trajectories_per_prompt",
    "groups_per_step",
)
HYBRID_LAYERS = "*-MG"
"""Attention, MLP, Mamba-2, GatedDeltaNet, as in Megatron's patterns."""
LR_DECAY_STYLES = ("constant", "linear", "cosine")
NOT_SETTINGS = ("out", "baseline", "compare")
"""Options in which two runs may differ and still be compared."""


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options in which comparable runs agree, as JSON values."""
    return {
        key: str(value.resolve()) if isinstance(value, Path) else value
        for key, value in sorted(vars(options).items())
        if key not in NOT_SETTINGS
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="GRPO with dynamic micro-batches, on recorded rollouts or on games in play."
    )
    add_dynamic_batch_arguments(parser)
    parser.set_defaults(use_dynamic_batch_size=True, max_tokens_per_gpu=2048)
    dims = parser.add_argument_group("layout")
    dims.add_argument("--dp", type=int, help="data parallel (default: what the others leave)")
    dims.add_argument("--pp", type=int, default=2, help="pipeline stages")
    dims.add_argument("--vpp", type=int, default=1, help="model chunks a stage")
    dims.add_argument("--tp", type=int, default=1, help="tensor parallel")
    dims.add_argument("--cp", type=int, default=1, help="context parallel")
    dims.add_argument("--sequence-parallel", action="store_true")
    job = parser.add_argument_group("job")
    job.add_argument("--rollouts", type=Path, default=BUNDLED_ROLLOUTS, metavar="FILE")
    job.add_argument("--iterations", type=int, default=6)
    job.add_argument("--prompts-per-iteration", type=int, default=32)
    job.add_argument("--global-batch-size", type=int, default=64, help="samples per step")
    job.add_argument("--num-layers", type=int, default=4)
    job.add_argument(
        "--hybrid-layer-pattern",
        metavar="LAYERS",
        help="a HybridModel, not a GPTModel: a letter for each layer (* attention, - MLP, "
        "M Mamba-2, G GatedDeltaNet), | between model chunks",
    )
    job.add_argument("--hidden-size", type=int, default=128)
    job.add_argument("--lr", type=float, default=3e-4)
    job.add_argument("--lr-decay-style", choices=LR_DECAY_STYLES, default="constant")
    job.add_argument("--clip", type=float, default=0.2)
    job.add_argument("--kl-coefficient", type=float, default=0.05)
    job.add_argument("--seed", type=int, default=1234)
    job.add_argument(
        "--dtype",
        choices=("float32", "float64"),
        default="float32",
        help="float64: runs that differ in rounding alone play the same games; gradients are not "
        "clipped",
    )
    job.add_argument("--out", type=Path, default=Path("runs/grpo"), metavar="DIR")
    runs = job.add_mutually_exclusive_group()
    runs.add_argument("--baseline", action="store_true", help="one sample per micro-batch")
    runs.add_argument("--compare", action="store_true", help="both, and a comparison")
    online = parser.add_argument_group("play (--online)")
    online.add_argument("--online", action="store_true", help="the policy plays the games itself")
    online.add_argument("--step-wise", action="store_true", help="a sample is one turn of a game")
    online.add_argument("--trajectories-per-prompt", type=int, default=8)
    online.add_argument("--groups-per-step", type=int, default=8, help="prompts per step")
    online.add_argument("--warm-start-steps", type=int, default=80, help="supervised, before play")
    online.add_argument("--warm-start-lr", type=float, default=3e-3)
    return parser


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags of the job, those of the engine among them."""
    parser = _parser()
    given = parser.parse_known_args(arguments)[0]
    if given.online:
        parser.set_defaults(**ONLINE_DEFAULTS)
        if given.step_wise:
            parser.set_defaults(**STEP_WISE_DEFAULTS)
    options = parser.parse_args(arguments)
    for name in NOT_ONLINE if options.online else ONLY_ONLINE:
        if getattr(options, name) != parser.get_default(name):
            what = "recorded rollouts: leave out" if options.online else "games in play: add"
            parser.error(f"{_flag(name)} is for {what} --online")
    for name in AT_LEAST_ONE:
        if getattr(options, name) < 1:
            parser.error(f"{_flag(name)} must be 1 or more, got {getattr(options, name)}")
    if options.warm_start_steps < 0:
        parser.error(f"--warm-start-steps must be 0 or more, got {options.warm_start_steps}")
    pattern = options.hybrid_layer_pattern
    if pattern is not None:
        if not set(pattern) <= {*HYBRID_LAYERS, "|"}:
            parser.error(f"--hybrid-layer-pattern {pattern} has other layers than {HYBRID_LAYERS}")
        if len(pattern.split("|")) != options.pp * options.vpp:
            parser.error(
                f"--hybrid-layer-pattern {pattern} is not cut into {options.pp * options.vpp} "
                f"model chunks (--pp {options.pp} × --vpp {options.vpp}): set one | less than these"
            )
        options.num_layers = len(pattern.replace("|", ""))
    elif options.num_layers % (options.pp * options.vpp):
        parser.error(
            f"--num-layers {options.num_layers} cannot be cut into {options.pp * options.vpp} "
            f"equal model chunks (--pp {options.pp} × --vpp {options.vpp}): set --num-layers to a "
            f"multiple of {options.pp * options.vpp}"
        )
    options.pad_token_id = PADDING
    return options


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def dims_of(options: argparse.Namespace, num_processes: int) -> ParallelDims:
    """The parallel dims that the flags ask for.

    Raises:
        ValueError: the processes cannot be laid out so.
    """
    model_parallel = options.pp * options.tp * options.cp
    return ParallelDims(
        data_parallel=options.dp or max(num_processes // model_parallel, 1),
        pipeline_parallel=options.pp,
        virtual_pipeline=options.vpp,
        context_parallel=options.cp,
        tensor_parallel=options.tp,
        sequence_parallel=options.sequence_parallel,
    )
