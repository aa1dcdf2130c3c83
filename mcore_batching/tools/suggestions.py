"""Other caps, parallel dims, schedules and step sizes that let samples end sooner on the same GPUs.

Every suggestion is planned and simulated with the same samples, at a fraction of the effort.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mcore_batching.planning import (
    Argument,
    CostModel,
    ParallelDims,
    ParallelDimsError,
    PlannerConfig,
    PlanningError,
    StepPlan,
    plan_step,
    predicted_step_time,
)
from mcore_batching.planning.costs.layer_costs import OUTPUT, cut_layers, work_of_layers

Changes = tuple[Argument, ...]  # to set together, with their new values
# What changes, and what to plan with.
Setup = tuple[Changes, ParallelDims, PlannerConfig, CostModel]

# Of a plan that is only compared, at most: a fifth of the default. Doubled, advice takes
# twice as long.
COMPARED_PLAN_EFFORT = 300
LEAST_GAIN = 1.01  # less is not worth changing a job's parallel dims for


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Another way to run the same samples on the same GPUs."""

    changes: Changes
    gain: float  # predicted time of the samples now over that then
    otherwise: str = ""  # the change in words, where there is no argument for it


def suggestions(step: StepPlan, lengths: Sequence[int]) -> list[Suggestion]:
    """Changes that let the step of a plan for all ranks end sooner, the largest gain first."""
    now = predicted_step_time(step, lengths)
    found = []
    for changes, otherwise, time_of in _trials(step, lengths):
        try:
            then = time_of()
        except PlanningError:
            continue  # a sample does not fit, or no job can have these dims
        if then and now >= LEAST_GAIN * then:
            found.append(Suggestion(changes=changes, gain=now / then, otherwise=otherwise))
    return sorted(found, key=lambda suggestion: -suggestion.gain)


def _trials(
    step: StepPlan, lengths: Sequence[int]
) -> Iterator[tuple[Changes, str, Callable[[], float]]]:
    """Changes in arguments or in words, and what predicts the time of the same samples then."""
    own = [lengths[sample] for sample in step.sample_indices]

    def planned(
        samples: Sequence[int], dims: ParallelDims, config: PlannerConfig, model: CostModel
    ) -> float:
        quick = replace(config, plan_effort=min(config.plan_effort, COMPARED_PLAN_EFFORT))
        plan = plan_step(samples, dims, quick, model, forward_only=step.forward_only)
        return predicted_step_time(plan, samples)

    for changes, dims, config, model in alternatives(step):
        yield changes, "", functools.partial(planned, own, dims, config, model)
    layout = better_layout(step.cost_model, step.dims, own)
    if layout is not None:
        flags, model = layout
        yield (), flags, functools.partial(planned, own, step.dims, step.config, model)
    number, present = step.num_samples, (step.dims, step.config, step.cost_model)

    def per_sample(steps: Sequence[Sequence[int]]) -> float:
        time = sum(planned(each, *present) for each in steps)
        return time * number / sum(map(len, steps))

    # Twice and half the samples, drawn from the step's own: per sample, with the same work.
    sizes = {2 * number: [[*own, *own]], number // 2: [own[::2], own[1::2]]}
    for other, steps in sizes.items() if number > 1 else ():
        words = f"{other} samples a step instead of {number}, for each sample (another training)"
        yield (), words, functools.partial(per_sample, steps)


def better_layout(
    model: CostModel, dims: ParallelDims, lengths: Sequence[int]
) -> tuple[str, CostModel] | None:
    """The cut of a model's layers into stages whose slowest has least work on these samples.

    Megatron's flags for it, and the costs then; None where no cut is better, or none is known.
    """
    stages, body = dims.pipeline_parallel, model.layers.replace("|", "").rstrip(OUTPUT)
    if stages == 1 or dims.virtual_pipeline > 1 or len(body) < stages:
        return None
    ends = model.layers.replace("|", "")[len(body) :]
    works = work_of_layers(model, lengths)
    before = [0.0, *itertools.accumulate(works[each] for each in body)]

    def slowest(cut: Sequence[int]) -> float:
        of_stages = [before[after] - before[first] for first, after in itertools.pairwise(cut)]
        of_stages[-1] += sum(works[each] for each in ends)
        return max(of_stages)

    # A hybrid model's pattern may be cut anywhere; layers of other models are as many on each stage
    # but the first and the last.
    is_hybrid = not body.islower()
    cuts = _any_cut(before, stages, slowest) if is_hybrid else _even_cuts(len(body), stages)
    # Of cuts that are as good, the one with fewer flags.
    flags, cut = min(cuts.items(), key=lambda each: (slowest(each[1]), len(each[0])))
    layers = "|".join(body[first:after] for first, after in itertools.pairwise(cut))
    present = cut_layers(model.layers, stages).split("|")
    now = slowest([0, *itertools.accumulate(len(each.rstrip(OUTPUT)) for each in present)])
    if slowest(cut) * LEAST_GAIN > now:
        return None
    return flags or f"--hybrid-layer-pattern '{layers}'", replace(model, layers=layers + ends)


def _even_cuts(layers: int, stages: int) -> dict[str, list[int]]:
    """Megatron's flags for as many layers on each stage but the last, or the first and the last;
    where each stage ends."""
    cuts = {}
    for last in range(1, layers):
        for first in range(layers - last) if stages > 2 else (0,):
            others = stages - 1 - (first > 0)
            each, over = divmod(layers - first - last, others)
            if each and not over:
                counts = [first or each, *[each] * (stages - 2), last]
                flags = f"--decoder-last-pipeline-num-layers {last}"
                flags = f"--decoder-first-pipeline-num-layers {first} {flags}" if first else flags
                cuts[flags] = [0, *itertools.accumulate(counts)]
    return cuts


def _any_cut(
    before: Sequence[float], stages: int, slowest: Callable[[Sequence[int]], float]
) -> dict[str, list[int]]:
    """Stages filled one after the other up to about the least that lets the rest fit."""
    found = []
    # Limits 1 % apart, the least gain that is shown: above the mean where the output layer weighs
    # on the last stage, below it where single layers take longer.
    for share in range(50, 150):
        limit = share / 100 * before[-1] / stages
        cut = [0]
        for left in range(stages - 1, 0, -1):
            after = bisect_right(before, before[cut[-1]] + limit) - 1
            cut.append(min(max(after, cut[-1] + 1), len(before) - 1 - left))
        found.append([*cut, len(before) - 1])
    return {"": min(found, key=slowest)}


def alternatives(step: StepPlan) -> Iterator[Setup]:
    """Other caps and parallel dims for a plan's GPUs."""
    dims, config, model = step.dims, step.config, step.cost_model
    cap, ranks = config.max_tokens_per_gpu, dims.data_parallel
    stages, size = dims.pipeline_parallel, dims.context_parallel
    for other in (cap // 2, 2 * cap):
        if other:  # half of 1 is none
            changes = (Argument("max_tokens_per_gpu", other),)
            yield changes, dims, replace(config, max_tokens_per_gpu=other), model
    # A chunk takes its share of a stage's costs: only the bubble changes.
    for chunks in (2, 4) if stages > 1 and dims.virtual_pipeline == 1 else ():
        # More chunks than any model has, or a group of micro-batches shorter than the pipeline.
        with contextlib.suppress(ParallelDimsError):
            interleaved = replace(dims, virtual_pipeline=chunks)
            yield (Argument("virtual_pipeline", chunks),), interleaved, config, model

    def moved(share: float, **sizes: int) -> Iterator[Setup]:
        """Sizes changed so that a rank has this share of a token's work and memory."""
        changes = tuple(Argument(name, value) for name, value in sizes.items())
        bound, fixed, others = config.max_inflight_tokens, 1.0, dict[str, Any](sizes)
        if "pipeline_parallel" in sizes:
            # Stages hold other layers: a micro-batch's fixed part is theirs, and chunks are gone.
            fixed, others = share, others | {"virtual_pipeline": 1, "microbatch_group_size": None}
        costs = replace(
            model,
            linear=share * model.linear,
            quadratic=share * model.quadratic,
            per_micro_batch=fixed * model.per_micro_batch,
        )
        bounded = replace(config, max_inflight_tokens=bound and max(1, int(bound / share)))
        # More stages than any model has, or ranks over which the experts cannot be spread.
        with contextlib.suppress(ParallelDimsError):
            yield changes, replace(dims, **others), bounded, costs

    if ranks % 2 == 0 and config.max_context_parallel is None:
        yield from moved(0.5, context_parallel=2 * size, data_parallel=ranks // 2)
    if ranks % 2 == 0:
        yield from moved(0.5, pipeline_parallel=2 * stages, data_parallel=ranks // 2)
    if stages % 2 == 0:
        yield from moved(2.0, pipeline_parallel=stages // 2, data_parallel=2 * ranks)
