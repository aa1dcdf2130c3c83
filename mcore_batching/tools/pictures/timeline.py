"""Start and end of every pass of a step on every rank, as the simulation predicts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mcore_batching.planning import CostModel, StepPlan, step_problem
from mcore_batching.planning.pipeline import Operation, Pass
from mcore_batching.planning.plans.statistics import costs_on_stages, step_clocks
from mcore_batching.planning.problem import Problem


@dataclass(frozen=True, kw_only=True)
class RankTimeline:
    """One rank's step."""

    rank: int
    """As `StepPlan.micro_batches` numbers it."""
    passes: tuple[Operation, ...]
    """Stage after stage, each in the order it runs. With expert parallelism a pass ends with this
    rank's own work, before its slot does."""
    tokens: tuple[int, ...]
    """Padded tokens of each micro-batch [num_microbatches], 0 for a placeholder; under dynamic CP
    of this rank's part of it."""
    sizes: tuple[int, ...]
    """Context-parallel size of each micro-batch [num_microbatches]."""
    num_samples: tuple[int, ...]
    """Samples of each micro-batch [num_microbatches], 0 for a placeholder."""
    end: float
    """End of its last pass, in units of cost."""
    busy: float
    """Share of the makespan in which its stages work, 1 less the bubble."""


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """All ranks' step."""

    ranks: tuple[RankTimeline, ...]
    """In the order of `StepPlan.micro_batches`."""
    end: float
    """End of the last rank, in units of cost: the step's predicted time."""
    stages: int
    """Pipeline stages."""

    @property
    def busy(self) -> float:
        """Share of the makespan in which stages work, 1 less the bubble."""
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
        """Mean share of a rank's stages that work in each of `num_bins` equal parts of the step.

        Args:
            rank: data-parallel rank.
            num_bins: number of parts.
        """
        width = self.end / num_bins or 1.0  # of a step of no time any
        shares = [0.0] * num_bins  # adds up over stages, each a 1 / stages of the rank
        for timed in self.ranks[rank].passes:
            # A pass may begin in one part and end several further on: each gets what is inside.
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
    problem, ranks = step_problem(step, lengths, cost_model)
    passes = _passes(step, problem, ranks)
    sizes = [
        tuple(step.row_size(rank, slot) for slot in range(step.num_microbatches))
        for rank in range(len(ranks))
    ]
    # Tokens of a row are shown whole, but under dynamic CP those of this rank's part.
    parts = (
        sizes if step.context_parallel is not None else [[1] * step.num_microbatches] * len(ranks)
    )
    ends = [max(timed.end for timed in rank_passes) for rank_passes in passes]
    end = max(ends)
    stages = step.dims.pipeline_parallel
    return StepTimeline(
        ranks=tuple(
            RankTimeline(
                rank=rank,
                passes=tuple(passes[rank]),
                tokens=tuple(
                    problem.on_ranks[size].row_tokens(samples) // part
                    for samples, size, part in zip(
                        micro_batches, sizes[rank], parts[rank], strict=True
                    )
                ),
                sizes=sizes[rank],
                num_samples=tuple(map(len, micro_batches)),
                end=ends[rank],
                busy=sum(timed.end - timed.start for timed in passes[rank]) / (end * stages)
                if end
                else 0.0,
            )
            for rank, micro_batches in enumerate(ranks)
        ),
        end=end,
        stages=stages,
    )


def _passes(
    step: StepPlan, problem: Problem, ranks: Sequence[Sequence[Sequence[int]]]
) -> list[list[Operation]]:
    """The passes of each rank, all stages together."""
    costs, schedule = costs_on_stages(step, problem, ranks), problem.schedule
    # With expert parallelism one clock has the pace of all ranks: a slot takes as long as its
    # slowest micro-batch, and each rank's own passes end earlier within it.
    clocks = step_clocks(step, problem, ranks)
    at_the_pace = [clock.operations(rank) for clock in clocks for rank in range(len(clock.ends))]
    if step.dims.in_lockstep:
        at_the_pace *= len(costs)
    pace = [max(slot) if step.dims.in_lockstep else 0.0 for slot in zip(*costs, strict=True)]
    return [
        [
            replace(o, end=o.start + (o.end - o.start) * own[place] / pace[place])
            if pace[place]
            else o
            for o in operations
            for place in [schedule.place_of_cost(o.stage, Pass(o.kind, o.chunk, o.slot))]
        ]
        for own, operations in zip(costs, at_the_pace, strict=True)
    ]
