"""When every pass of a step runs, rank by rank, as the pipeline's simulation predicts it.

With expert parallelism all ranks run a slot in step: it takes what it takes the slowest, and the
others' passes end earlier inside it.

Guarantees: a rank's passes are those of `planning.pipeline`, and the last of all ends at
`predicted_step_time`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_batching.planning import CostModel, StepPlan
from mcore_batching.planning.pipeline import pipeline_operations
from mcore_batching.planning.weights import row_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedPass:
    """One pass of one micro-batch through one model chunk."""

    stage: int
    """Pipeline rank."""
    chunk: int
    """Model chunk of the stage."""
    slot: int
    """Number of the micro-batch on its data-parallel rank."""
    backward: bool
    """False for the forward pass."""
    start: float
    """In units of cost since the step began."""
    end: float
    """Likewise; the end of this rank's own work in it."""


@dataclass(frozen=True, kw_only=True)
class RankTimeline:
    """One data-parallel rank's step."""

    rank: int
    """Data-parallel rank."""
    passes: tuple[TimedPass, ...]
    """Of all its stages, stage after stage, each in its order."""
    tokens: tuple[int, ...]
    """Padded tokens of each micro-batch [num_microbatches], 0 of a placeholder."""
    num_samples: tuple[int, ...]
    """Samples of each micro-batch [num_microbatches], 0 of a placeholder."""
    end: float
    """When its last pass ends, in units of cost."""
    busy: float
    """Share of its stages' time until the step's end in which they work."""


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """A whole step."""

    ranks: tuple[RankTimeline, ...]
    """[data_parallel]"""
    end: float
    """When the last rank ends, in units of cost."""
    stages: int
    """Pipeline stages."""

    @property
    def busy(self) -> float:
        """Share of all stages' time until the step's end in which they work."""
        return sum(rank.busy for rank in self.ranks) / len(self.ranks)

    def extremes(self) -> dict[str, RankTimeline]:
        """The slowest, the median and the fastest rank, by their ends and then their numbers."""
        by_end = sorted(self.ranks, key=lambda rank: (-rank.end, rank.rank))
        return {
            "slowest": by_end[0],
            "median": by_end[len(by_end) // 2],
            "fastest": by_end[-1],
        }

    def working_stages(self, rank: int, num_bins: int) -> list[float]:
        """Share of a rank's stages that work, on average over each of so many equal times.

        Args:
            rank: data-parallel rank.
            num_bins: into how many times the step is cut.
        """
        width = self.end / num_bins or 1.0
        shares = [0.0] * num_bins
        for timed in self.ranks[rank].passes:
            first = min(int(timed.start / width), num_bins - 1)
            last = min(int(timed.end / width), num_bins - 1)
            for number in range(first, last + 1):
                inside = min(timed.end, (number + 1) * width) - max(timed.start, number * width)
                shares[number] += max(0.0, inside) / width / self.stages
        return shares


def step_timeline(
    step: StepPlan, lengths: Sequence[int], cost_model: CostModel | None = None
) -> StepTimeline:
    """Simulate a step.

    Args:
        step: a plan that covers its samples; it may be over the cap.
        lengths: total length of each sample of the whole batch [samples], in tokens.
        cost_model: the plan's own if None.
    """
    model, dims = cost_model or step.cost_model, step.dims
    costs = [
        [model.micro_batch([lengths[sample] for sample in samples]) for samples in rank]
        for rank in step.micro_batches
    ]
    slot_costs = costs
    if dims.expert_parallel > 1:
        slowest = [max(slot) for slot in zip(*costs, strict=True)]
        slot_costs = [slowest] * len(costs)
    passes = []
    for own, taken in zip(costs, slot_costs, strict=True):
        operations = pipeline_operations(
            taken,
            dims,
            backward_ratio=model.backward_ratio,
            forward_only=step.forward_only,
        )
        passes.append(
            tuple(
                TimedPass(
                    stage=operation.stage,
                    chunk=operation.chunk,
                    slot=operation.slot,
                    backward=operation.backward,
                    start=operation.start,
                    end=operation.end
                    if own is taken or not taken[operation.slot]
                    else operation.start
                    + (operation.end - operation.start)
                    * (own[operation.slot] / taken[operation.slot]),
                )
                for operation in operations
            )
        )
    ends = [max(timed.end for timed in timed_passes) for timed_passes in passes]
    end = max(ends)
    stages = dims.pipeline_parallel
    return StepTimeline(
        ranks=tuple(
            RankTimeline(
                rank=rank,
                passes=passes[rank],
                tokens=tuple(
                    row_tokens(samples, lengths, dims, step.config) if samples else 0
                    for samples in micro_batches
                ),
                num_samples=tuple(map(len, micro_batches)),
                end=ends[rank],
                busy=sum(timed.end - timed.start for timed in passes[rank]) / (end * stages)
                if end
                else 0.0,
            )
            for rank, micro_batches in enumerate(step.micro_batches)
        ),
        end=end,
        stages=stages,
    )
