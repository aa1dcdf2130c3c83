"""``build_dp_schedule`` of the rollout manager of slime or miles, planned by this package.

Guarantees, beside the framework's own (samples of one rollout share a step, the same nested lists,
trailing rollouts left out):
- Every micro-batch holds at most the cap in *padded* tokens; a longer sample is alone.
- All ranks have the same number of micro-batches, valid for the interleaved schedule.
- Too few samples are no error: micro-batches without samples are placeholders, which the trainer
  runs by `mcore_batching.hook`. Each rank has at least one sample.

Needs neither PyTorch nor Megatron: it runs in the rollout manager's process.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from mcore_batching.flags import LEARNT, PLANNER_DEFAULTS, removed_settings
from mcore_batching.integrations.dims import job_dims
from mcore_batching.integrations.replacements import Hook, HookError, is_replacement, replacing
from mcore_batching.integrations.slime.learning import chosen_costs
from mcore_batching.planning import (
    LastStep,
    ParallelDims,
    Plan,
    PlannerConfig,
    group_steps,
    plan_batch,
)

NAME = "build_dp_schedule"

_INIT = "--custom-megatron-init-path mcore_batching.integrations.slime.init"

# Packages that have the function, and what to do if an older version lacks it.
_FRAMEWORKS = {
    "slime": f"(its pull request 1926): leave hook_schedule out, {_INIT} is enough",
    "miles": "(its pull request 1927): use a later miles",
}


def framework(module: str) -> str:
    """``slime`` or ``miles``: the one with this module loaded, else the one installed."""
    # Both may be installed; the trainer has imported its own.
    loaded = [name for name in _FRAMEWORKS if f"{name}.{module}" in sys.modules]
    for name in [*loaded, *_installed()]:
        return name
    raise HookError(
        "neither slime nor miles is installed: for another call mcore_batching.hook(modules)"
    )


def planning_modules(names: Sequence[str]) -> list[ModuleType]:
    """The ``dp_schedule`` modules of these frameworks, of which one must have it."""
    modules, too_old = [], []
    for name in names:
        try:
            modules.append(importlib.import_module(f"{name}.utils.dp_schedule"))
        except ModuleNotFoundError:
            too_old.append(f"this {name} has no {name}.utils.dp_schedule {_FRAMEWORKS[name]}")
    if too_old and not modules:
        raise HookError("; ".join(too_old))
    return modules


def hook_schedule() -> Hook | None:
    """Replace ``build_dp_schedule`` in this process, the rollout manager's.

    For Ray's ``worker_process_setup_hook``, or for the module of your own rollout function. Does
    nothing in a process without slime and miles, or where it is replaced already.

    Raises:
        HookError: this slime or miles has another function, or none.
    """
    modules, replacements = planning_modules(_installed()), []
    for module in modules:
        if not is_replacement(getattr(module, NAME)):
            replacements.append(replacing(module, NAME, build_dp_schedule))
    if not replacements:
        return None
    # Ray sends the manager's class by value: its globals are copies by now.
    hooked = Hook(modules, replacements, copies=True)
    print(hooked, flush=True)
    return hooked


def build_dp_schedule(
    original: Callable[..., Any],
    args: Any,
    train_parallel_config: dict[str, int],
    total_lengths: list[int],
    *,
    global_batch_size: int,
    rollout_indices: list[int],
    sample_is_multimodal: list[bool] | None = None,
) -> tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]:
    """The samples of each rank, and of each of its micro-batches.

    ``args`` have the planner's options, ``dynamic_batch_*`` from ``--custom-config-path``. A step
    takes ``global_batch_size`` rollouts, each of one sample or more. ``original``, the framework's
    own function, plans without ``use_dynamic_batch_size``, for too few rollouts and for images that
    are packed apart.

    Returns:
        samples of each rank [ranks][samples]; its micro-batches, as positions in these, [ranks]
        [micro-batches of all steps][samples]; micro-batches per rank [steps]; rollouts [steps].

    Raises:
        HookError: the trainer has no placeholders or no such option, or a rank has no sample.
        PlanningError: an option or a length is out of range.
    """
    # Too few rollouts for a step are an error of the framework itself.
    has_step = len(set(rollout_indices)) >= global_batch_size
    # Under this option micro-batches hold samples with images alone, or without: slime's own rule.
    has_images = any(sample_is_multimodal or ())
    is_apart = has_images and getattr(args, "multimodal_aware_packing", "off") != "off"
    if is_apart or not (args.use_dynamic_batch_size and has_step):
        step: dict[str, Any] = {
            "global_batch_size": global_batch_size,
            "rollout_indices": rollout_indices,
        }
        if sample_is_multimodal is not None:  # older versions do not have it
            step["sample_is_multimodal"] = sample_is_multimodal
        return original(args, train_parallel_config, total_lengths, **step)  # type: ignore[no-any-return]
    problems = option_problems(args)
    if getattr(args, "custom_megatron_init_path", _INIT) is None:
        problems.append(
            f"the trainer would train on placeholders: set {_INIT}, or call it in your own init"
        )
    if problems:
        raise HookError("; ".join(problems))
    dims = _parallel_dims(args, train_parallel_config)
    last = _last_step(args, rollout_indices, global_batch_size, dims.data_parallel)
    steps = group_steps(rollout_indices, global_batch_size, last=last)
    kept = sorted(itertools.chain(*steps))
    config, costs = _planner_config(args, dims), chosen_costs(args)
    # A step may end first with an idle rank, but the trainer needs a sample on each.
    for balance in (config.balance, "cost"):
        plan = plan_batch(
            [total_lengths[sample] for sample in kept],
            dims,
            dataclasses.replace(config, balance=balance),
            costs,
            groups=[rollout_indices[sample] for sample in kept],
            groups_per_step=global_batch_size,
        )
        partitions, micro_batches = _by_rank(plan, kept)
        if all(partitions):
            break
    else:
        raise HookError(
            f"data-parallel rank {partitions.index([])} would train no sample: set "
            f"--global-batch-size to {dims.data_parallel} or more"
        )
    if getattr(args, "enable_mtp_training", False) and not all(map(all, micro_batches)):
        raise HookError(
            "MTP would divide by a placeholder's 0 tokens: set --global-batch-size higher, or "
            "unset --enable-mtp-training"
        )
    counts = [step.num_microbatches for step in plan.steps]
    # slime scales a step's loss by its rollouts, which may have several samples each.
    sizes = [len({rollout_indices[sample] for sample in step}) for step in steps]
    return partitions, micro_batches, counts, sizes


def _by_rank(plan: Plan, kept: Sequence[int]) -> tuple[list[list[int]], list[list[list[int]]]]:
    """The samples of each rank, and the places in these of each of its micro-batches."""
    partitions: list[list[int]] = [[] for _ in plan.steps[0].micro_batches]
    micro_batches: list[list[list[int]]] = [[] for _ in partitions]
    for step in plan.steps:
        for rank, slots in enumerate(step.micro_batches):
            for samples in slots:
                first = len(partitions[rank])
                partitions[rank] += (kept[sample] for sample in samples)
                micro_batches[rank].append(list(range(first, first + len(samples))))
    return partitions, micro_batches


def _parallel_dims(args: Any, sent: dict[str, Any]) -> ParallelDims:
    """The trainer's dims: as it sent them to the rollout manager, the rest from arguments."""
    chunks, group = sent["vpp_size"] or 1, sent["microbatch_group_size_per_vp_stage"]
    stages = getattr(args, "pipeline_model_parallel_size", None)
    return job_dims(
        args,
        data_parallel=sent["dp_size"],
        # Megatron's default group is the number of stages.
        pipeline_parallel=stages or (group if chunks > 1 else 1),
        virtual_pipeline=chunks,
        context_parallel=sent["cp_size"],
        microbatch_group_size=group,
    )


# Options of the engine's own rows and training step, of which the framework has its own, by
# their names in the YAML of ``--custom-config-path``.
_ENGINES = {
    "dynamic_batch_share_prefixes": (
        "the framework finds tokens by lengths, so samples cannot share them: unset "
        "dynamic_batch_share_prefixes"
    ),
    "dynamic_batch_pad_each_to": (
        "the framework finds tokens by unpadded lengths: unset dynamic_batch_pad_each_to, and pad "
        "rows by dynamic_batch_pad_total_to"
    ),
    "dynamic_batch_context_parallel": (
        "the framework's context-parallel size is fixed: unset dynamic_batch_context_parallel"
    ),
    "dynamic_batch_forward_only_max_tokens_per_gpu": (
        "the framework's forward passes run training's micro-batches: unset "
        "dynamic_batch_forward_only_max_tokens_per_gpu"
    ),
}


def option_problems(args: Any) -> list[str]:
    """Options that the framework cannot follow, each with what to set instead."""
    # YAML reads `off` as False.
    problems = [text for name, text in _ENGINES.items() if getattr(args, name, None)]
    problems += removed_settings(args)
    is_learnt = getattr(args, "dynamic_batch_cost_model", None) == LEARNT
    if is_learnt and (getattr(args, "expert_model_parallel_size", None) or 1) > 1:
        problems.append(
            "costs are learnt from passes in which no rank waits, and expert-parallel ranks wait "
            "for each other in every one: set dynamic_batch_cost_model to fixed, or to a file of "
            "CostModel.to_json"
        )
    return problems


def row_multiple(args: Any, dims: ParallelDims) -> int:
    """Tokens to a multiple of which rows are padded: by ``get_batch``, and by the option."""
    # get_batch pads each rank's part to this times the tensor-parallel size.
    local = getattr(args, "data_pad_size_multiplier", None) or 1
    given = getattr(args, "dynamic_batch_pad_total_to", None) or 1
    return math.lcm(local * dims.tensor_parallel * dims.context_parallel, given)


def _planner_config(args: Any, dims: ParallelDims) -> PlannerConfig:
    """The planner's options, with rows padded as the framework's ``get_batch`` pads them."""
    options = {
        name: getattr(args, f"dynamic_batch_{name}", default)
        for name, default in PLANNER_DEFAULTS.items()
    }
    options["pad_total_to"] = row_multiple(args, dims)
    return PlannerConfig(max_tokens_per_gpu=args.max_tokens_per_gpu, **options)


def _last_step(args: Any, rollouts: Sequence[int], rollouts_per_step: int, ranks: int) -> LastStep:
    """Rollouts left over are dropped, or kept where miles would make a smaller step of them."""
    if not getattr(args, "allow_partial_train_step", False):
        return "drop"
    # miles drops a last step of fewer samples than ranks, too.
    *_, last = group_steps(rollouts, rollouts_per_step)
    return "keep" if len(last) >= ranks else "drop"


def _installed() -> list[str]:
    return [name for name in _FRAMEWORKS if importlib.util.find_spec(name) is not None]
