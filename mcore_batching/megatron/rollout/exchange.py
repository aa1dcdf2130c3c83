"""Planning of all data-parallel ranks' samples as one, and the exchange that it asks for.

Lengths are gathered first, and every rank makes the same plan of them; only then do samples move,
each once, to the rank that runs it, or to the ranks that share its row. Samples that share a
segment move together, and the plan is of their hosts alone. They are found on the rank that brings
them: turns of a trajectory that several ranks bring are in as many segments.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from megatron.core import parallel_state
from torch import Tensor

from mcore_batching.batch.agreement.consensus import Statement
from mcore_batching.batch.rows.prefixes import Hosts, samples_of_hosts
from mcore_batching.megatron.errors import PlanningFailedError
from mcore_batching.megatron.job.consensus import digest_of
from mcore_batching.megatron.job.flat_values import flat, unflat
from mcore_batching.megatron.job.job import Job
from mcore_batching.megatron.job.row_groups import make_row_groups
from mcore_batching.megatron.rollout.all_samples import AllSamples
from mcore_batching.megatron.rollout.maker import Plan
from mcore_batching.megatron.rollout.planning_protocol import PlanningProtocol
from mcore_batching.megatron.rollout.rollout_batch import RolloutBatch
from mcore_batching.megatron.rollout.sharing import say_saving
from mcore_batching.megatron.rows.sample_moves import Columns, SampleMoves
from mcore_batching.megatron.rows.schedule import GlobalPlan, MicroBatchSchedule
from mcore_batching.megatron.rows.shards import GatheredShards, MicroBatches, Shard, with_hosted
from mcore_batching.planning import Problem, StepPlan, plan_step
from mcore_batching.planning.planning_process import PlanRequest

_Laid = tuple[tuple[GlobalPlan, ...], SampleMoves, str]
"""Plans, where their samples move, and the plans' digest."""


class ExchangingProtocol(PlanningProtocol):
    """Planning over all ranks' samples, which move where the plan wants them.

    Samples are numbered through, data-parallel rank after data-parallel rank:

        rank 0 holds samples 0 1 2, rank 1 holds 3 4
        plan: rank 0 runs ((1, 4),), rank 1 ((0, 3), (2,))
        moved: 4 to rank 0, 0 and 2 to rank 1

    Of several steps the first alone is planned and moved here, and the others in a thread, unless
    ``--dynamic-batch-no-plan-ahead`` is set. Either way a rank holds the samples of one step behind
    those of another.
    """

    scope: Literal["local", "global"] = "global"

    def lay_out(self) -> None:
        """Plan all ranks' samples, and move them; those of later steps perhaps not yet."""
        most = self.settings.config.max_context_parallel
        if most is not None:
            # All sizes that a row may have, before the plan: making a group is a collective over
            # all ranks, and a plan may give some size to rows of some ranks alone.
            make_row_groups(self.job, self.settings.dims.row_sizes(most))
        # Under dynamic CP the context-parallel ranks run rows of their own, of samples they all
        # brought.
        num_ranks = self.settings.config.num_ranks(self.settings.dims)
        self._sharing = num_ranks // self.settings.dims.data_parallel
        self._own = parallel_state.get_data_parallel_rank(with_context_parallel=self._sharing > 1)
        samples = AllSamples.of(self._gathered())
        self.num_steps = len(samples.steps)
        if self.num_steps < 2 or not self.may_wait:
            self._moved(samples)
            return
        first = dataclasses.replace(samples, steps=samples.steps[:1])
        later = dataclasses.replace(samples, steps=samples.steps[1:])
        rest, kept = copy.copy(self), list[Tensor]()

        def keep() -> None:
            # While all ranks can be told what is wrong with later steps, and before the caller can
            # change its values.
            for step in later.steps:
                with self._naming(step[0]):
                    Problem.of(later.lengths_of(step), self.settings.dims, self.settings.config)
            kept.append(flat(self.batch.data))

        self._moved(first, keep)
        self._follow = functools.partial(rest._followed, later, kept[0])

    def choose(self) -> tuple[MicroBatches, ...]:
        """Every step's micro-batches of this rank, as indices of the samples it now holds."""
        # The plan counts all ranks' samples through; iterators index those that are here.
        own, local = self._moves.own, self._moves.places
        return tuple(
            tuple(tuple(local[number] for number in row) for row in made.rows_on(own))
            for made in self._plans
        )

    def _schedule(
        self, chosen: tuple[MicroBatches, ...], own_digest: str = ""
    ) -> MicroBatchSchedule:
        """The schedule, which also knows where outputs go."""
        made = super()._schedule(chosen, own_digest)
        return dataclasses.replace(made, moves=self._moves, plans=self._plans)

    def _followed(
        self,
        samples: AllSamples,
        kept: Tensor,
        first: MicroBatchSchedule,
        job: Job,
        operation: str,
        plan: Plan,
    ) -> MicroBatchSchedule:
        """The schedule of all steps, `samples` of the later ones. A collective, in the thread."""
        del operation
        of_main, self.consensus, self.plan = self.consensus, job.consensus, plan
        self.batch = dataclasses.replace(self.batch, data=unflat(kept))
        self._moved(samples)
        assert first.moves is not None
        held, both = first.num_samples, zip(first.moves.runs_on, self._moves.runs_on, strict=True)
        steps = first.steps + tuple(
            tuple(tuple(held + i for i in indices) for indices in step)
            for step in with_hosted(self.choose(), self.hosts)
        )
        hosts = None
        if first.hosts is not None and self.hosts is not None:
            hosts = [*first.hosts, *(held + host for host in self.hosts)]
        later = self.batch.data
        data = {name: [*values, *later[name]] for name, values in first.rollout_data.items()}
        plans = (*first.plans, *self._plans)
        return dataclasses.replace(
            first,
            rollout_data=data,
            steps=steps,
            hosts=hosts,
            plan_digest=_digest(plans),
            # The main thread's: it is the one that reads them.
            gather_shards=GatheredShards(of_main, Shard(data["total_lengths"], steps, hosts)),
            moves=dataclasses.replace(first.moves, runs_on=[[*a, *b] for a, b in both]),
            plans=plans,
        )

    def _gathered(self) -> list[Shard]:
        """The lengths and steps of every data-parallel rank."""

        def work() -> tuple[tuple[RolloutBatch, Shard, Hosts | None], Shard]:
            batch, steps = self.batch.resolved(), self._own_steps()
            found = self._look_for_hosts(batch, steps)
            rows = tuple((tuple(step),) for step in steps)
            shard = Shard(batch.total_lengths, rows, self.hosts)
            return (batch, shard, found), shard

        def says(made: tuple[RolloutBatch, Shard, Hosts | None]) -> Statement:
            batch, shard, found = made
            return self._statement_of_steps(batch, len(shard.steps), found, {})

        agreed, shards = self.consensus.gather(
            "gathering lengths", work, says, failure=PlanningFailedError
        )
        self.batch = agreed.result[0]
        say_saving(self.job, agreed.figures, agreed.told)
        return shards

    def _moved(self, samples: AllSamples, also: Callable[[], None] = lambda: None) -> None:
        """Plan, hand over what the plan wants elsewhere, and hold what it wants here.

        Args:
            samples: of the steps that are planned.
            also: what else may fail on one rank.
        """
        lengths, hosts, members = samples.lengths, samples.hosts, samples_of_hosts(samples.hosts)
        together = self._planned_together([samples.lengths_of(step) for step in samples.steps])

        def work() -> tuple[_Laid, list[Any]]:
            plans = tuple(
                self._global_plan(samples, step, together) for step in range(len(samples.steps))
            )
            also()
            num_ranks = self._sharing * self.settings.dims.data_parallel
            runs_on = [_run_on(rank, plans, members) for rank in range(num_ranks)]
            moves = SampleMoves(self._own, samples.first, runs_on, self._sharing)
            return (plans, moves, _digest(plans)), moves.outgoing(self.batch.data)

        def says(made: _Laid) -> Statement:
            # The ranks of a replica each heard of their own counterparts' lengths.
            of_all = {
                "lengths of all samples (sha256)": digest_of(lengths),
                "hosts of all samples (sha256)": digest_of(hosts),
            }
            return Statement(equal={"plan (sha256)": made[2], **of_all})

        def received(made: _Laid, incoming: list[Any]) -> tuple[_Laid, Columns]:
            return made, made[1].arranged(incoming)

        (self._plans, self._moves, self.plan_digest), arranged = self.consensus.exchange(
            "planning all samples", work, says, received
        )
        # A rank that runs no samples got none, and still needs the fields for placeholders.
        data = {name: arranged.get(name, []) for name in self.batch.template}
        held = [lengths[number] for number in self._moves.held]
        self.batch = dataclasses.replace(self.batch, data=data, total_lengths=held)
        if self.hosts is not None:
            # A host is always here as well: `_run_on` moves the samples of a segment together.
            self.hosts = [self._moves.places[hosts[number]] for number in self._moves.held]

    def _global_plan(
        self, samples: AllSamples, step: int, made: Sequence[StepPlan] | None
    ) -> GlobalPlan:
        """The plan of one step.

        Args:
            samples: of all ranks.
            step: its number.
            made: the plans of all steps, where they are made; None: make it here.
        """
        computed, hosted = samples.steps[step]
        lengths = samples.lengths_of(samples.steps[step])
        # A sample over the cap is found inside the agreement, so that all ranks raise.
        with self._naming(computed):
            planned = made[step] if made else self._planned(lengths)
        hosted_lengths = tuple(samples.lengths[number] for number in hosted)
        return GlobalPlan(
            dataclasses.replace(planned, hosted_lengths=hosted_lengths), computed, lengths
        )

    def _naming(self, computed: Sequence[int]) -> contextlib.AbstractContextManager[None]:
        """Let the planner's errors name samples by their number over all ranks."""
        return self.job.options.naming_the_cap(forward_only=self.forward_only, samples=computed)

    def _planned_together(self, of_steps: Sequence[Sequence[int]]) -> list[StepPlan] | None:
        """The plans of all steps, each made by one rank of a block; None where that is no gain.

        None as well where a plan cannot be made: whoever then makes them all says why, as all do.

        Args:
            of_steps: lengths of the samples of each, the same on all ranks.
        """
        ranks, count = self.consensus.ranks, len(of_steps)
        # Blocks of neighbours, with a rank for every step where there are as many ranks.
        blocks = max(1, len(ranks) // max(count, 1))
        if count == 1 or len(ranks) == 1:
            return None
        of_block = [
            ranks[len(ranks) * block // blocks : len(ranks) * (block + 1) // blocks]
            for block in range(blocks)
        ]
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
        settings = self.settings
        of = settings.dims, settings.config, settings.cost_model
        if self.plan is not None:
            return self.plan(PlanRequest(tuple(lengths), *of))
        return plan_step(lengths, *of, forward_only=self.forward_only)


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


def _digest(plans: Sequence[GlobalPlan]) -> str:
    return digest_of([each.plan.digest() for each in plans])
