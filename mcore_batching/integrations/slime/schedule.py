"""``build_dp_schedule`` of slime's rollout manager, planned by this package.

Guarantees, beside those of the framework's own (samples of one rollout share a step, samples and
micro-batches in the same nested lists, trailing rollouts left out):
- Every micro-batch holds at most the cap in *padded* tokens; a longer sample has one to itself.
- All ranks have equally many micro-batches, a number that the interleaved schedule can run.
- Too few samples are no error: what is missing are placeholders, micro-batches without samples,
  which `mcore_batching.hook` lets the trainer run. Each rank has a sample.

Needs neither PyTorch nor Megatron: it runs in the rollout manager's process.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_batching.integrations.replacements import (
    Hook,
    HookError,
    Replacement,
    check_signature,
    in_place_of,
    is_replacement,
)
from mcore_batching.planning import (
    ConfigError,
    CostModel,
    ParallelDims,
    Plan,
    PlannerConfig,
    group_steps,
    plan_batch,
)

NAME = "build_dp_schedule"

_INIT = "--custom-megatron-init-path mcore_batching.integrations.slime.init"

Schedule = tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]


def hook_schedule() -> Hook | None:
    """Replace ``build_dp_schedule`` in this process, the rollout manager's.

    For Ray's ``worker_process_setup_hook``, or for the module of a rollout function of your own. A
    process without slime, or one where it is replaced already, is left as it is.

    Raises:
        HookError: this slime has another function.
    """
    if importlib.util.find_spec("slime") is None:
        return None
    try:
        module = importlib.import_module("slime.utils.dp_schedule")
    except ModuleNotFoundError:
        raise HookError(
            "this slime has no slime.utils.dp_schedule (its pull request 1926): leave "
            f"hook_schedule out, {_INIT} is enough"
        ) from None
    original = getattr(module, NAME)
    if is_replacement(original):
        return None
    check_signature(f"{module.__name__}.{NAME}", original, build_dp_schedule, whole=True)

    def ours(args: Any, *arguments: Any, **keywords: Any) -> Any:
        if not args.use_dynamic_batch_size or _lacks_a_step(**keywords):
            return original(args, *arguments, **keywords)  # plans, or says what is wrong
        return build_dp_schedule(args, *arguments, **keywords)

    # Ray sends the manager's class by value: its globals are copies by now.
    hooked = Hook([module], [Replacement(NAME, original, in_place_of(original, ours))], copies=True)
    print(hooked, flush=True)
    return hooked


def build_dp_schedule(
    args: Any,
    train_parallel_config: dict[str, int],
    total_lengths: list[int],
    *,
    global_batch_size: int,
    rollout_indices: list[int],
) -> Schedule:
    """The samples of each rank, and of each of its micro-batches.

    Args:
        args: slime's arguments, with ``dynamic_batch_*`` from ``--custom-config-path`` for the
            planner's options.
        train_parallel_config: ``dp_size``, ``cp_size``, ``vpp_size`` and
            ``microbatch_group_size_per_vp_stage``.
        total_lengths: of each sample, in tokens.
        global_batch_size: rollouts of each step.
        rollout_indices: the rollout of each sample.

    Returns:
        samples of each rank [ranks][samples]; of each rank's micro-batches, as positions in these,
        [ranks][micro-batches of all steps][samples]; micro-batches per rank [steps]; rollouts
        [steps].

    Raises:
        HookError: the trainer does not know placeholders, or a rank would have no sample.
        PlanningError: an option or a length is out of range.
    """
    if getattr(args, "custom_megatron_init_path", _INIT) is None:
        raise HookError(
            f"the trainer would not know placeholders of this plan: set {_INIT}, or call it in "
            "the function that you set there"
        )
    dims, config = parallel_dims(args, train_parallel_config), planner_config(args)
    steps = group_steps(rollout_indices, global_batch_size, last="drop")
    plan = _plan(args, total_lengths, rollout_indices, global_batch_size, dims, config)
    if _idle_ranks(plan):  # the search may leave a rank empty, slime may not
        packed = dataclasses.replace(config, balance="cost")
        plan = _plan(args, total_lengths, rollout_indices, global_batch_size, dims, packed)
    _check(args, plan, dims)
    partitions: list[list[int]] = [[] for _ in range(dims.data_parallel)]
    micro_batches: list[list[list[int]]] = [[] for _ in range(dims.data_parallel)]
    for step in plan.steps:
        for rank, slots in enumerate(step.micro_batches):
            for samples in slots:
                first = len(partitions[rank])
                partitions[rank] += samples
                micro_batches[rank].append(list(range(first, first + len(samples))))
    counts = [step.num_microbatches for step in plan.steps]
    return partitions, micro_batches, counts, [global_batch_size] * len(steps)


def parallel_dims(args: Any, train_parallel_config: dict[str, int]) -> ParallelDims:
    """The trainer's parallel dims: what the rollout manager was told, the rest from arguments."""
    chunks = train_parallel_config["vpp_size"]
    group = train_parallel_config["microbatch_group_size_per_vp_stage"]
    stages = getattr(args, "pipeline_model_parallel_size", None)
    return ParallelDims(
        data_parallel=train_parallel_config["dp_size"],
        # Megatron's default group is the number of stages.
        pipeline_parallel=stages or (group if chunks > 1 else 1),
        virtual_pipeline=chunks,
        context_parallel=train_parallel_config["cp_size"],
        tensor_parallel=getattr(args, "tensor_model_parallel_size", 1),
        expert_parallel=getattr(args, "expert_model_parallel_size", 1),
        microbatch_group_size=group if chunks > 1 else None,
    )


def planner_config(args: Any) -> PlannerConfig:
    """The planner's options, with rows padded as slime's ``get_batch`` pads them.

    Raises:
        ConfigError: rows are to have context-parallel sizes of their own.
    """
    if getattr(args, "dynamic_batch_context_parallel", None) is not None:
        raise ConfigError(
            "slime cuts every row over its own context-parallel ranks: unset "
            "--dynamic-batch-context-parallel"
        )
    options = {
        each.name: getattr(args, f"dynamic_batch_{each.name}", each.default)
        for each in dataclasses.fields(PlannerConfig)
        if each.default is not dataclasses.MISSING
    }
    local = getattr(args, "data_pad_size_multiplier", 1)
    local *= getattr(args, "tensor_model_parallel_size", 1)
    local *= getattr(args, "context_parallel_size", 1)
    options["pad_total_to"] = math.lcm(local, options["pad_total_to"] or 1)
    return PlannerConfig(max_tokens_per_gpu=args.max_tokens_per_gpu, **options)


def _plan(
    args: Any,
    lengths: Sequence[int],
    rollouts: Sequence[int],
    rollouts_per_step: int,
    dims: ParallelDims,
    config: PlannerConfig,
) -> Plan:
    path = getattr(args, "dynamic_batch_cost_model", None)
    text = None if path is None else Path(path).read_text(encoding="utf-8")
    return plan_batch(
        lengths,
        dims,
        config,
        None if text is None else CostModel.from_json(text),
        groups=rollouts,
        groups_per_step=rollouts_per_step,
        last="drop",
    )


def _idle_ranks(plan: Plan) -> list[int]:
    ranks = range(len(plan.steps[0].micro_batches))
    return [r for r in ranks if not any(any(step.micro_batches[r]) for step in plan.steps)]


def _check(args: Any, plan: Plan, dims: ParallelDims) -> None:
    """Refuse what slime's trainer cannot run.

    Raises:
        HookError: naming the argument to set.
    """
    idle = _idle_ranks(plan)
    if idle:
        raise HookError(
            f"data-parallel rank {idle[0]} has no sample in any step, of which slime would make "
            f"its advantages: set --global-batch-size to {dims.data_parallel} rollouts or more"
        )
    empty = any(
        not samples for step in plan.steps for rank in step.micro_batches for samples in rank
    )
    if empty and getattr(args, "enable_mtp_training", False):
        raise HookError(
            "the loss of multi-token prediction divides by the tokens of a micro-batch, and a "
            "placeholder has none: unset --enable-mtp-training, or set --global-batch-size higher"
        )


def _lacks_a_step(*, global_batch_size: int, rollout_indices: Sequence[int]) -> bool:
    return len(set(rollout_indices)) < global_batch_size
