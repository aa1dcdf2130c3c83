"""Start and end of every pass of a step on every rank, as the simulation predicts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mcore_batching.planning import StepPlan, step_problem
from mcore_batching.planning.clock import Operation
from mcore_batching.planning.plans.statistics import costs_on_stages, step_clocks
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.schedule import Pass


@dataclass(frozen=True, kw_only=True)
class RankTimeline:
    """One rank's step."""

    rank: int
    # Stage after stage, each in the order it runs. With expert parallelism a pass ends with this
    # rank's own work, before its slot does.
    passes: tuple[Operation, ...]
    # Of each micro-batch: padded tokens (under dynamic CP of this rank's part of it) and its
    # samples, 0 for a placeholder.
    tokens: tuple[int, ...]
    num_samples: tuple[int, ...]
    busy: float  # share of the makespan in which its stages work, 1 less the bubble

    @property
    def end(self) -> float:
        """End of its last pass, in units of cost."""
        return max(timed.end for timed in self.passes)


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """All ranks' step."""

    ranks: tuple[RankTimeline, ...]  # in the order of `StepPlan.micro_batches`
    end: float  # of the last rank, in units of cost: the step's predicted time
    stages: int

    @property
    def busy(self) -> float:
        """Share of the makespan in which stages work, 1 less the bubble."""
        return sum(rank.busy for rank in self.ranks) / len(self.ranks)

    def extremes(self) -> dict[str, RankTimeline]:
        """The slowest, the median and the fastest rank, by their ends and then their numbers."""
        by_end = sorted(self.ranks, key=lambda rank: (-rank.end, rank.rank))
        return {"slowest": by_end[0], "median": by_end[len(by_end) // 2], "fastest": by_end[-1]}


def step_timeline(step: StepPlan, lengths: Sequence[int]) -> StepTimeline:
    """Simulate a step, whose plan covers its samples; it may be over the cap."""
    problem, ranks = step_problem(step, lengths)
    passes = _passes(step, problem, ranks)
    end = max(timed.end for of_rank in passes for timed in of_rank)
    stages, timelines = step.dims.pipeline_parallel, []
    for rank, micro_batches in enumerate(ranks):
        sizes = tuple(step.row_size(rank, slot) for slot in range(len(micro_batches)))
        tokens = [
            problem.on_ranks[size].row_tokens(samples)
            for samples, size in zip(micro_batches, sizes, strict=True)
        ]
        if step.context_parallel is not None:
            tokens = [count // size for count, size in zip(tokens, sizes, strict=True)]
        work = sum(timed.end - timed.start for timed in passes[rank])
        timelines.append(
            RankTimeline(
                rank=rank,
                passes=tuple(passes[rank]),
                tokens=tuple(tokens),
                num_samples=tuple(map(len, micro_batches)),
                busy=work / (end * stages) if end else 0.0,
            )
        )
    return StepTimeline(ranks=tuple(timelines), end=end, stages=stages)


def _passes(
    step: StepPlan, problem: Problem, ranks: Sequence[Sequence[Sequence[int]]]
) -> list[list[Operation]]:
    """The passes of each rank, all stages together."""
    costs, schedule = costs_on_stages(step, problem, ranks), problem.schedule
    clocks = step_clocks(step, problem, ranks)
    operations = [clock.operations(rank) for clock in clocks for rank in range(len(clock.ends))]
    if not step.dims.in_lockstep:
        return operations
    # With expert parallelism one clock has the pace of all ranks: a slot takes as long as its
    # slowest micro-batch, and each rank's own passes end earlier within it.
    pace = [max(slot) for slot in zip(*costs, strict=True)]

    def own_end(timed: Operation, own: Sequence[float]) -> float:
        place = schedule.place_of_cost(timed.stage, Pass(timed.kind, timed.chunk, timed.slot))
        share = own[place] / pace[place] if pace[place] else 1.0
        return timed.start + (timed.end - timed.start) * share

    return [[replace(timed, end=own_end(timed, own)) for timed in operations[0]] for own in costs]
