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
import functools
import importlib
import importlib.util
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from mcore_batching.flags import FIXED, LEARNT, PLANNER_DEFAULTS, removed_settings
from mcore_batching.integrations.dims import job_dims
from mcore_batching.integrations.replacements import Hook, HookError, is_replacement, replacing
from mcore_batching.integrations.slime.learning import learnt_costs, shape_costs
from mcore_batching.planning import (
    CostModel,
    LastStep,
    ParallelDims,
    Plan,
    PlannerConfig,
    group_steps,
    plan_batch,
)
from mcore_batching.planning.files import read_document

NAME = "build_dp_schedule"

_INIT = "--custom-megatron-init-path mcore_batching.integrations.slime.init"

# Packages that have the function, and what to do if an older version lacks it.
_FRAMEWORKS = {
    "slime": f"(its pull request 1926): leave hook_schedule out, {_INIT} is enough",
    "miles": "(its pull request 1927): use a later miles",
}

Schedule = tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]


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
            replacements.append(replacing(module, NAME, _in_place_of_own, like=build_dp_schedule))
    if not replacements:
        return None
    # Ray sends the manager's class by value: its globals are copies by now.
    hooked = Hook(modules, replacements, copies=True)
    print(hooked, flush=True)
    return hooked


def build_dp_schedule(
    args: Any,
    train_parallel_config: dict[str, int],
    total_lengths: list[int],
    *,
    global_batch_size: int,
    rollout_indices: list[int],
    sample_is_multimodal: list[bool] | None = None,
) -> Schedule:
    """The samples of each rank, and of each of its micro-batches.

    ``args`` have the planner's options, ``dynamic_batch_*`` from ``--custom-config-path``. A step
    takes ``global_batch_size`` rollouts, each of one sample or more. ``sample_is_multimodal``
    changes nothing here.

    Returns:
        samples of each rank [ranks][samples]; its micro-batches, as positions in these, [ranks]
        [micro-batches of all steps][samples]; micro-batches per rank [steps]; rollouts [steps].

    Raises:
        HookError: the trainer has no placeholders or no such option, or a rank has no sample.
        PlanningError: an option or a length is out of range.
    """
    if getattr(args, "custom_megatron_init_path", _INIT) is None:
        raise HookError(
            f"the trainer would train on placeholders: set {_INIT}, or call it in your own init"
        )
    if problems := list(option_problems(args)):
        raise HookError("; ".join(problems))
    dims, config = _parallel_dims(args, train_parallel_config), _planner_config(args)
    last = _last_step(args, rollout_indices, global_batch_size, dims.data_parallel)
    steps = group_steps(rollout_indices, global_batch_size, last=last)
    if not steps:
        raise HookError(
            f"no step has all of its {global_batch_size} rollouts: decrease --global-batch-size"
        )
    kept = sorted(itertools.chain(*steps))
    planned = functools.partial(
        plan_batch,
        [total_lengths[sample] for sample in kept],
        dims,
        cost_model=_cost_model(args),
        groups=[rollout_indices[sample] for sample in kept],
        groups_per_step=global_batch_size,
    )
    plan = planned(config)
    if _idle_ranks(plan):  # faster, but the trainer needs a sample on every rank
        plan = planned(dataclasses.replace(config, balance="cost"))
    _check(args, plan, dims)
    partitions: list[list[int]] = [[] for _ in range(dims.data_parallel)]
    micro_batches: list[list[list[int]]] = [[] for _ in range(dims.data_parallel)]
    for step in plan.steps:
        for rank, slots in enumerate(step.micro_batches):
            for samples in slots:
                # A micro-batch lists places in its rank's samples, not numbers of samples.
                first = len(partitions[rank])
                partitions[rank] += (kept[sample] for sample in samples)
                micro_batches[rank].append(list(range(first, first + len(samples))))
    counts = [step.num_microbatches for step in plan.steps]
    # slime scales a step's loss by its rollouts, which may have several samples each.
    sizes = [len({rollout_indices[sample] for sample in step}) for step in steps]
    return partitions, micro_batches, counts, sizes


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


def option_problems(args: Any) -> Iterator[str]:
    """Options of the engine's own rows and training step, of which the framework has its own.

    They are spelt as in the YAML of ``--custom-config-path``, which reads `off` as False.
    """
    if getattr(args, "dynamic_batch_share_prefixes", False):
        yield (
            "the framework finds tokens by lengths, so samples cannot share them: unset "
            "dynamic_batch_share_prefixes"
        )
    if getattr(args, "dynamic_batch_pad_each_to", None):
        yield (
            "the framework finds tokens by unpadded lengths: unset dynamic_batch_pad_each_to, "
            "and pad rows by dynamic_batch_pad_total_to"
        )
    if getattr(args, "dynamic_batch_context_parallel", None) is not None:
        yield "the framework's context-parallel size is fixed: unset dynamic_batch_context_parallel"
    yield from removed_settings(args)
    is_learnt = getattr(args, "dynamic_batch_cost_model", None) == LEARNT
    if is_learnt and (getattr(args, "expert_model_parallel_size", None) or 1) > 1:
        yield (
            "costs are learnt from passes in which no rank waits, and expert-parallel ranks wait "
            "for each other in every one: set dynamic_batch_cost_model to fixed, or to a file of "
            "CostModel.to_json"
        )


def _planner_config(args: Any) -> PlannerConfig:
    """The planner's options, with rows padded as the framework's ``get_batch`` pads them."""
    options = {
        name: getattr(args, f"dynamic_batch_{name}", default)
        for name, default in PLANNER_DEFAULTS.items()
    }
    # get_batch pads each rank's part to this times the tensor-parallel size.
    local = getattr(args, "data_pad_size_multiplier", 1)
    local *= getattr(args, "tensor_model_parallel_size", 1)
    local *= getattr(args, "context_parallel_size", 1)
    options["pad_total_to"] = math.lcm(local, options["pad_total_to"] or 1)
    return PlannerConfig(max_tokens_per_gpu=args.max_tokens_per_gpu, **options)


def _cost_model(args: Any) -> CostModel:
    chosen = getattr(args, "dynamic_batch_cost_model", None)
    if chosen in (None, FIXED):
        return shape_costs(args)
    return learnt_costs(args) if chosen == LEARNT else CostModel.from_json(read_document(chosen))


def _last_step(args: Any, rollouts: Sequence[int], rollouts_per_step: int, ranks: int) -> LastStep:
    """Rollouts left over are dropped, or kept where miles would make a smaller step of them."""
    if not getattr(args, "allow_partial_train_step", False):
        return "drop"
    # miles drops a last step of fewer samples than ranks, too.
    *_, last = group_steps(rollouts, rollouts_per_step)
    return "keep" if len(last) >= ranks else "drop"


def _idle_ranks(plan: Plan) -> list[int]:
    ranks = range(len(plan.steps[0].micro_batches))
    return [r for r in ranks if not any(any(step.micro_batches[r]) for step in plan.steps)]


def _check(args: Any, plan: Plan, dims: ParallelDims) -> None:
    """Refuse what the trainer cannot run."""
    idle = _idle_ranks(plan)
    if idle:
        raise HookError(
            f"data-parallel rank {idle[0]} would train no sample: set --global-batch-size to "
            f"{dims.data_parallel} or more"
        )
    full = all(all(rank) for step in plan.steps for rank in step.micro_batches)
    if not full and getattr(args, "enable_mtp_training", False):
        raise HookError(
            "MTP would divide by a placeholder's 0 tokens: set --global-batch-size higher, or "
            "unset --enable-mtp-training"
        )


def _in_place_of_own(original: Callable[..., Any], args: Any, *lengths: Any, **step: Any) -> Any:
    # Too few rollouts for a step are an error of the framework itself.
    has_step = len(set(step["rollout_indices"])) >= step["global_batch_size"]
    # Under this option micro-batches hold samples with images alone, or without: slime's own rule.
    is_apart = any(step.get("sample_is_multimodal") or ()) and (
        getattr(args, "multimodal_aware_packing", "off") != "off"
    )
    plans = args.use_dynamic_batch_size and has_step and not is_apart
    return (build_dp_schedule if plans else original)(args, *lengths, **step)


def _installed() -> list[str]:
    return [name for name in _FRAMEWORKS if importlib.util.find_spec(name) is not None]
