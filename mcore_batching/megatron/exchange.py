"""Planning of all data-parallel ranks' samples as one step, and the exchange that it asks for.

Lengths are gathered first, and every rank makes the same plan of them; only then do samples move,
each once, to the rank that runs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

from mcore_batching.batch.consensus import Statement
from mcore_batching.megatron.arguments import naming_the_cap
from mcore_batching.megatron.errors import PlanningFailedError
from mcore_batching.megatron.planning_protocol import PlanningProtocol
from mcore_batching.megatron.rollout_batch import RolloutBatch
from mcore_batching.megatron.shards import MicroBatches
from mcore_batching.planning import StepPlan, plan_step

_Samples = tuple[list[int], dict[str, list[Any]]]
"""Numbers of some samples; field name to their values."""


class ExchangingProtocol(PlanningProtocol):
    """Planning of one step over all ranks' samples, which move where the plan wants them.

    Samples are numbered through, data-parallel rank after data-parallel rank:

        rank 0 holds samples 0 1 2, rank 1 holds 3 4
        plan: rank 0 runs ((1, 4),), rank 1 ((0, 3), (2,))
        moved: 4 to rank 0, 0 and 2 to rank 1
    """

    scope: Literal["local", "global"] = "global"

    def lay_out(self) -> None:
        """Plan all ranks' samples, and move them."""
        shards = self._gather_lengths()
        self._lengths = [length for shard in shards for length in shard]
        incoming = self._exchange_samples([len(shard) for shard in shards])
        self._hold(incoming)

    def choose(self) -> tuple[MicroBatches, ...]:
        """This rank's micro-batches of the one step, as indices of the samples it now holds."""
        micro_batches = self._plan.micro_batches[self.consensus.data_parallel_rank]
        local = {number: place for place, number in enumerate(self._samples_of_own)}
        return (tuple(tuple(local[i] for i in ids) for ids in micro_batches),)

    def _gather_lengths(self) -> list[list[int]]:
        def says(batch: RolloutBatch) -> Statement:
            return Statement(equal=batch.comparable(), largest=[len(batch.total_lengths)])

        agreed = self.consensus.agree(
            "gathering lengths", self.batch.resolved, says, failure=PlanningFailedError
        )
        self.batch = agreed.result
        return self.consensus.gather_integers(self.batch.total_lengths, agreed.largest[0])

    def _exchange_samples(self, counts: Sequence[int]) -> list[_Samples]:
        """Plan, and hand over what the plan wants elsewhere; what each rank handed to this one."""
        settings, own = self.settings, self.consensus.data_parallel_rank
        first = list(accumulate(counts, initial=0))
        mine = range(first[own], first[own + 1])

        def leaving(plan: StepPlan, rank: int) -> _Samples:
            numbers = [i for i in _samples_of(plan, rank) if i in mine]
            places = [i - mine.start for i in numbers]
            columns = self.batch.data.items()
            return numbers, {name: [values[i] for i in places] for name, values in columns}

        def work() -> tuple[StepPlan, list[_Samples]]:
            with naming_the_cap(self.args, forward_only=self.forward_only):
                plan = plan_step(
                    self._lengths,
                    settings.dims,
                    settings.config,
                    settings.cost_model,
                    forward_only=self.forward_only,
                )
            return plan, [leaving(plan, rank) for rank in range(len(counts))]

        def says(plan: StepPlan) -> Statement:
            return Statement(equal={"plan (sha256)": plan.digest()})

        self._plan, incoming = self.consensus.exchange("planning all samples", work, says)
        self.plan_digest = self._plan.digest()
        return incoming

    def _hold(self, incoming: Sequence[_Samples]) -> None:
        """Go on with the samples that the plan wants here."""
        held: dict[int, tuple[dict[str, list[Any]], int]] = {}
        for numbers, columns in incoming:
            held |= {number: (columns, place) for place, number in enumerate(numbers)}
        here = self._samples_of_own = _samples_of(self._plan, self.consensus.data_parallel_rank)
        data = {
            name: [columns[name][place] for columns, place in (held[i] for i in here)]
            for name in self.batch.template
        }
        lengths = [self._lengths[i] for i in here]
        self.batch = dataclasses.replace(self.batch, data=data, total_lengths=lengths)


def _samples_of(plan: StepPlan, rank: int) -> list[int]:
    """The samples that a data-parallel rank runs, ascending."""
    return sorted(i for micro_batch in plan.micro_batches[rank] for i in micro_batch)
