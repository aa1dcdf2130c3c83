"""What holds a step back, and what would let it end sooner.

Every suggestion is planned and simulated, with the same samples on the same number of GPUs, at a
fraction of the effort. A stage of a shorter pipeline holds more layers, so its micro-batches cost
more, and so do the activations of a token; over twice the context-parallel ranks a token costs
half, a micro-batch what it did.

Guarantees: a suggestion is made only if its predicted gain is a hundredth or more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mcore_batching.planning.cost import CostModel
from mcore_batching.planning.errors import PlanningError
from mcore_batching.planning.pipeline import pipeline_time
from mcore_batching.planning.statistics import predicted_step_time
from mcore_batching.planning.sums import ordered_sum
from mcore_batching.planning.tokens import padded_sample_tokens, row_capacity_tokens

if TYPE_CHECKING:
    from mcore_batching.planning.config import PlannerConfig
    from mcore_batching.planning.parallel_dims import ParallelDims
    from mcore_batching.planning.plan import StepPlan

EFFORT = 300
LEAST_GAIN = 1.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Another way to run the same samples on the same GPUs."""

    change: str
    """What to set, in the planner's words."""
    gain: float
    """Predicted time now over predicted time then."""


def what_holds_back(step: StepPlan, lengths: Sequence[int]) -> str:
    """The one thing that keeps the step from ending sooner.

    Args:
        step: a valid plan of one sample or more.
        lengths: total length of each sample of the whole batch [samples], in tokens.
    """
    model, dims = step.cost_model, step.dims
    end = predicted_step_time(step, lengths)
    if not end:
        return "nothing: by its cost model the step takes no time"
    longest = max(step.sample_indices, key=lambda sample: (lengths[sample], -sample))
    passes = 1.0 if step.forward_only else 1.0 + model.backward_ratio
    way = passes * dims.pipeline_parallel * model.micro_batch([lengths[longest]])
    if way >= 0.95 * end:
        back = "" if step.forward_only else " and back"
        return (
            f"sample {longest} ({lengths[longest]} tokens): its own way through "
            f"{_stages(dims)}{back} takes {way / end:.0%} of the step"
        )
    costs = [
        [model.micro_batch([lengths[i] for i in samples]) for samples in rank]
        for rank in step.micro_batches
    ]
    if dims.expert_parallel > 1:
        slowest = ordered_sum(max(slot) for slot in zip(*costs, strict=True))
        mean = ordered_sum(ordered_sum(rank) for rank in costs) / len(costs)
        if slowest > 1.05 * mean:
            return (
                f"slots whose micro-batches differ over ranks: with expert parallelism each waits "
                f"for its slowest, which adds up to {slowest / mean:.2f} x the mean"
            )
    else:
        ends = [
            pipeline_time(
                rank,
                dims,
                backward_ratio=model.backward_ratio,
                forward_only=step.forward_only,
            )
            for rank in costs
        ]
        mean = ordered_sum(ends) / len(ends)
        if max(ends) > 1.05 * mean:
            return (
                f"rank {ends.index(max(ends))}: it ends {max(ends) / mean:.2f} x as late as ranks "
                "do on average"
            )
    if _cap_binds(step, lengths):
        return (
            f"the cap of {step.config.cap_tokens(dims)} tokens: micro-batches are full, and "
            f"starting each of them costs as much as {model.per_micro_batch / model.sample(1):.0f} "
            "tokens"
        )
    samples_a_rank = step.num_samples / dims.data_parallel
    if dims.pipeline_parallel > 1 and samples_a_rank < 8 * dims.pipeline_parallel:
        return f"too few samples for this pipeline: {samples_a_rank:.0f} a rank for {_stages(dims)}"
    if dims.pipeline_parallel > 1:
        return f"filling and draining {_stages(dims)} with {step.num_microbatches} micro-batches"
    return "the work itself: ranks are even and there is no pipeline to fill"


def _cap_binds(step: StepPlan, lengths: Sequence[int]) -> bool:
    """Whether micro-batches are full, and what they cost to start is a twentieth of the step."""
    model, dims = step.cost_model, step.dims
    capacity = row_capacity_tokens(dims, step.config)
    tokens = sum(
        padded_sample_tokens(lengths[sample], dims, step.config) for sample in step.sample_indices
    )
    room = capacity * step.num_microbatches * dims.data_parallel
    starts = step.num_microbatches * dims.data_parallel * model.per_micro_batch
    work = starts + ordered_sum(model.sample(lengths[sample]) for sample in step.sample_indices)
    return tokens > 0.9 * room and starts > 0.05 * work and model.sample(1) > 0


def what_would_help(step: StepPlan, lengths: Sequence[int]) -> list[Suggestion]:
    """Changes of cap and layout that let the step end sooner, the largest gain first.

    Args:
        step: a valid plan made for all ranks together.
        lengths: total length of each sample of the whole batch [samples], in tokens.
    """
    from mcore_batching.planning.planner import plan_step

    own = [lengths[sample] for sample in step.sample_indices]
    now = predicted_step_time(step, lengths)
    found = []
    for change, dims, config, model in alternatives(step):
        quick = dataclasses.replace(config, plan_effort=min(config.plan_effort, EFFORT))
        try:
            plan = plan_step(own, dims, quick, model, forward_only=step.forward_only)
            then = predicted_step_time(plan, own)
        except PlanningError:
            continue  # a sample does not fit, or the layout does not exist
        if then and now >= LEAST_GAIN * then:
            found.append(Suggestion(change=change, gain=now / then))
    return sorted(found, key=lambda suggestion: -suggestion.gain)


def alternatives(
    step: StepPlan,
) -> Iterator[tuple[str, ParallelDims, PlannerConfig, CostModel]]:
    """Other caps and layouts for the same GPUs: what changes, and what to plan with.

    Args:
        step: a plan; its layout, options and cost model are where changes start.
    """
    dims, config, model = step.dims, step.config, step.cost_model
    cap, pipeline, ranks = config.max_tokens_per_gpu, dims.pipeline_parallel, dims.data_parallel
    if cap >= 2:
        smaller = dataclasses.replace(config, max_tokens_per_gpu=cap // 2)
        yield f"max_tokens_per_gpu={cap // 2}", dims, smaller, model
    larger = dataclasses.replace(config, max_tokens_per_gpu=2 * cap)
    yield f"max_tokens_per_gpu={2 * cap}", dims, larger, model
    if ranks % 2 == 0:
        size = dims.context_parallel
        wider = dataclasses.replace(dims, data_parallel=ranks // 2, context_parallel=2 * size)
        yield (
            f"context_parallel={2 * size} and data_parallel={ranks // 2}",
            wider,
            _with_bound(config, 2.0),
            _scaled(model, 0.5, per_micro_batch=1.0),
        )
        deeper = dataclasses.replace(
            _without_interleaving(dims),
            data_parallel=ranks // 2,
            pipeline_parallel=2 * pipeline,
        )
        yield (
            f"pipeline_parallel={2 * pipeline} and data_parallel={ranks // 2}",
            deeper,
            _with_bound(config, 2.0),
            _scaled(model, 0.5, per_micro_batch=0.5),
        )
    if pipeline % 2 == 0:
        shallower = dataclasses.replace(
            _without_interleaving(dims), data_parallel=2 * ranks, pipeline_parallel=pipeline // 2
        )
        yield (
            f"pipeline_parallel={pipeline // 2} and data_parallel={2 * ranks}",
            shallower,
            _with_bound(config, 0.5),
            _scaled(model, 2.0, per_micro_batch=2.0),
        )


def _with_bound(config: PlannerConfig, factor: float) -> PlannerConfig:
    """The same memory for activations where a token of the first stage takes another share."""
    bound = config.max_inflight_tokens
    if bound is None:
        return config
    return dataclasses.replace(config, max_inflight_tokens=max(1, int(factor * bound)))


def _without_interleaving(dims: ParallelDims) -> ParallelDims:
    return dataclasses.replace(dims, virtual_pipeline=1, microbatch_group_size=None)


def _scaled(model: CostModel, tokens: float, *, per_micro_batch: float) -> CostModel:
    return dataclasses.replace(
        model,
        linear=tokens * model.linear,
        quadratic=tokens * model.quadratic,
        per_micro_batch=per_micro_batch * model.per_micro_batch,
    )


def _stages(dims: ParallelDims) -> str:
    number = dims.pipeline_parallel
    return f"{number} stages" if number > 1 else "the one stage"
