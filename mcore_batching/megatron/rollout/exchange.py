"""Planning of all data-parallel ranks' samples as one, and the exchange that it asks for.

Samples are numbered through, data-parallel rank after data-parallel rank:

    rank 0 holds samples 0 1 2, rank 1 holds 3 4
    plan: rank 0 runs ((1, 4),), rank 1 ((0, 3), (2,))
    moved: 4 to rank 0, 0 and 2 to rank 1

Lengths are gathered first, and every rank makes the same plan of them; only then do samples move,
each once, to the rank that runs it, or to the ranks that share its row. Samples that share a
segment move together, and the plan is of their hosts alone. They are found on the rank that brings
them: turns of a trajectory that several ranks bring are in as many segments.

A rank holds the samples of one step behind those of another, whether all steps are planned at once
or the later ones in a thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core import parallel_state
from torch import Tensor

from mcore_batching.batch.agreement.consensus import Statement
from mcore_batching.batch.rows.prefixes import samples_of_hosts
from mcore_batching.megatron.errors import PlanningFailedError
from mcore_batching.megatron.job.consensus import JobConsensus
from mcore_batching.megatron.job.flat_values import digest_of, flat, unflat
from mcore_batching.megatron.job.row_groups import make_row_groups
from mcore_batching.megatron.rollout.all_samples import AllSamples
from mcore_batching.megatron.rollout.cut_steps import CutSteps, Planned
from mcore_batching.megatron.rollout.maker import Plan
from mcore_batching.megatron.rollout.rollout import Rollout, RolloutRequest
from mcore_batching.megatron.rollout.sharing import say_saving
from mcore_batching.megatron.rows.sample_moves import Columns, SampleMoves
from mcore_batching.megatron.rows.schedule import GlobalPlan, MicroBatchSchedule, digest_of_plans
from mcore_batching.megatron.rows.shards import Shard, with_hosted
from mcore_batching.planning import Problem, StepPlan, plan_step
from mcore_batching.planning.planning_process import PlanRequest


def plan_all_samples(request: RolloutRequest, rollout: Rollout) -> Planned:
    """Plan all ranks' samples, and move them; of several steps perhaps the first's. A collective.

    Raises:
        CollectiveError: on every rank, if any could not, or ranks disagree.
    """
    settings = rollout.settings
    most = settings.config.max_context_parallel
    if most is not None:
        # All sizes that a row may have, before the plan: making a group is a collective over all
        # ranks, and a plan may give some size to rows of some ranks alone.
        make_row_groups(request.job, settings.dims.row_sizes(most))
    cut, samples = _gathered(request, rollout)
    exchange = _Exchange(
        consensus=request.job.consensus,
        unplanned=cut.unplanned(request, rollout),
        samples=samples,
        request=request,
        plan=request.plan,
    )
    num_steps = len(samples.steps)
    if num_steps < 2 or not request.may_plan_ahead:
        return Planned(exchange.moved(), num_steps)
    first = dataclasses.replace(samples, steps=samples.steps[:1])
    later = dataclasses.replace(samples, steps=samples.steps[1:])
    kept = list[Tensor]()

    def keep() -> None:
        # While all ranks can be told what is wrong with later steps, and before the caller can
        # change its values.
        for step in later.steps:
            with exchange.naming(step[0]):
                Problem.of(later.lengths_of(step), settings.dims, settings.config)
        kept.append(flat(cut.batch.data))

    made = dataclasses.replace(exchange, samples=first).moved(keep)
    unplanned = dataclasses.replace(exchange.unplanned, rollout_data={})
    rest = dataclasses.replace(exchange, samples=later, unplanned=unplanned)
    return Planned(made, num_steps, functools.partial(rest.planned_later, kept[0]))


def _gathered(request: RolloutRequest, rollout: Rollout) -> tuple[CutSteps, AllSamples]:
    """This rank's samples of every step, and those of all ranks by their lengths."""

    def work() -> tuple[CutSteps, Shard]:
        cut = CutSteps.of(request, rollout)
        rows = tuple((tuple(step),) for step in cut.steps)
        return cut, Shard(cut.batch.total_lengths, rows, cut.hosts)

    def says(cut: CutSteps) -> Statement:
        return cut.statement(request, rollout)

    agreed, shards = request.job.consensus.gather(
        "gathering lengths", work, says, failure=PlanningFailedError
    )
    say_saving(request.job, agreed.figures, agreed.told)
    return agreed.result, AllSamples.of(shards)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Exchange:
    """Steps that are about to be planned, and whose samples are about to move.

    Attributes:
        consensus: between the ranks.
        unplanned: what the steps are of; its rollout data are the samples that this rank brought.
        samples: of all ranks, and the steps.
        request: what the call asked for.
        plan: plans all samples of one step; None: in line.
    """

    consensus: JobConsensus
    unplanned: MicroBatchSchedule
    samples: AllSamples
    request: RolloutRequest
    plan: Callable[[PlanRequest], StepPlan] | None

    def moved(self, also: Callable[[], None] = lambda: None) -> MicroBatchSchedule:
        """The schedule of the samples that this rank runs. A collective over all ranks.

        Args:
            also: what else may fail on one rank.
        """
        samples, unplanned = self.samples, self.unplanned
        lengths, hosts = samples.lengths, samples.hosts
        together = self._planned_together([samples.lengths_of(step) for step in samples.steps])
        # Under dynamic CP the context-parallel ranks run rows of their own, of samples they all
        # brought.
        num_ranks = unplanned.config.num_ranks(unplanned.dims)
        sharing = num_ranks // unplanned.dims.data_parallel
        own = parallel_state.get_data_parallel_rank(with_context_parallel=sharing > 1)

        def work() -> tuple[tuple[tuple[GlobalPlan, ...], SampleMoves], list[Any]]:
            plans = tuple(self._global_plan(step, together) for step in range(len(samples.steps)))
            also()
            members = samples_of_hosts(hosts)
            runs_on = [_run_on(rank, plans, members) for rank in range(num_ranks)]
            moves = SampleMoves(own, samples.first, runs_on, sharing)
            return (plans, moves), moves.outgoing(unplanned.rollout_data)

        def says(made: tuple[tuple[GlobalPlan, ...], SampleMoves]) -> Statement:
            return Statement(
                equal={
                    "plan (sha256)": digest_of_plans(made[0]),
                    # The ranks of a replica each heard of their own counterparts' lengths.
                    "lengths of all samples (sha256)": digest_of(lengths),
                    "hosts of all samples (sha256)": digest_of(hosts),
                }
            )

        (plans, moves), arranged = self.consensus.exchange(
            "planning all samples",
            work,
            says,
            lambda made, incoming: (made, made[1].arranged(incoming)),
        )
        return self._scheduled(plans, moves, arranged)

    def planned_later(
        self, kept: Tensor, consensus: JobConsensus, plan: Plan
    ) -> MicroBatchSchedule:
        """As `moved`, of rollout data that were kept `flat`."""
        unplanned = dataclasses.replace(self.unplanned, rollout_data=unflat(kept))
        now = dataclasses.replace(self, consensus=consensus, unplanned=unplanned, plan=plan)
        return now.moved()

    def _scheduled(
        self, plans: tuple[GlobalPlan, ...], moves: SampleMoves, arranged: Columns
    ) -> MicroBatchSchedule:
        """Of the samples that are here now, by their places among these."""
        place, hosts = moves.places, None
        if self.unplanned.hosts is not None:
            # A host is always here as well: `_run_on` moves the samples of a segment together.
            hosts = [place[self.samples.hosts[number]] for number in moves.held]
        steps = tuple(
            tuple(tuple(place[number] for number in row) for row in made.rows_on(moves.own))
            for made in plans
        )
        return dataclasses.replace(
            self.unplanned,
            # A rank that runs no samples got none, and still needs the fields for placeholders.
            rollout_data={name: arranged.get(name, []) for name in self.unplanned.template},
            steps=with_hosted(steps, hosts),
            hosts=hosts,
            plan_digest=digest_of_plans(plans),
            moves=moves,
            plans=plans,
        )

    def _global_plan(self, step: int, made: Sequence[StepPlan] | None) -> GlobalPlan:
        """The plan of one step.

        Args:
            step: its number.
            made: the plans of all steps, where they are made; None: make it here.
        """
        computed, hosted = self.samples.steps[step]
        lengths = self.samples.lengths_of(self.samples.steps[step])
        # A sample over the cap is found inside the agreement, so that all ranks raise.
        with self.naming(computed):
            planned = made[step] if made else self._planned(lengths)
        hosted_lengths = tuple(self.samples.lengths[number] for number in hosted)
        planned = dataclasses.replace(planned, hosted_lengths=hosted_lengths)
        return GlobalPlan(planned, computed, lengths)

    def naming(self, computed: Sequence[int]) -> contextlib.AbstractContextManager[None]:
        """Let the planner's errors name samples by their number over all ranks."""
        forward_only = self.request.forward_only
        return self.request.job.options.naming_the_cap(forward_only=forward_only, samples=computed)

    def _planned_together(self, of_steps: Sequence[Sequence[int]]) -> list[StepPlan] | None:
        """The plans of all steps, each made by one rank of a block; None where that is no gain.

        None as well where a plan cannot be made: whoever then makes them all says why, as all do.

        Args:
            of_steps: lengths of the samples of each, the same on all ranks.
        """
        ranks, count = self.consensus.ranks, len(of_steps)
        if count == 1 or len(ranks) == 1:
            return None
        # Blocks of neighbours, with a rank for every step where there are as many ranks.
        blocks = max(1, len(ranks) // max(count, 1))
        bounds = [len(ranks) * number // blocks for number in range(blocks + 1)]
        of_block = [ranks[start:end] for start, end in itertools.pairwise(bounds)]
        [block] = [each for each in of_block if self.consensus.rank in each]
        place = block.index(self.consensus.rank)

        def work() -> tuple[None, list[StepPlan] | None]:
            # Not raised: on the other ranks of the block another step may be planned.
            with contextlib.suppress(Exception):
                return None, [self._planned(step) for step in of_steps[place :: len(block)]]
            return None, None

        equal = {"lengths of all samples (sha256)": digest_of(of_steps)}
        _, by_rank = self.consensus.gather(
            "planning steps",
            work,
            lambda _: Statement(equal=equal),
            among=block,
            failure=PlanningFailedError,
        )
        if None in by_rank:
            return None
        return [by_rank[step % len(block)][step // len(block)] for step in range(count)]

    def _planned(self, lengths: Sequence[int]) -> StepPlan:
        of = self.unplanned.dims, self.unplanned.config, self.unplanned.cost_model
        if self.plan is not None:
            return self.plan(PlanRequest(tuple(lengths), *of))
        return plan_step(lengths, *of, forward_only=self.request.forward_only)


def _run_on(
    rank: int, plans: Sequence[GlobalPlan], members: Mapping[int, Sequence[int]]
) -> list[int]:
    """The samples that a rank runs, step by step: by plan those that are computed, and all that
    they host."""
    # By their host: the plan names hosts alone, and what they host has to follow them.
    return [
        number
        for made in plans
        for number in sorted(n for row in made.rows_on(rank) for host in row for n in members[host])
    ]
