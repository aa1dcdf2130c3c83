"""The planning protocol: from rollout data on every rank to this rank's micro-batches.

All ranks take its steps together, and agree (`batch.agreement.consensus`) where one needs what
others know:

1. take stock: settings and rollout data are read; settings must be the same everywhere; what one
   rank's samples leave open of undeclared fields, others tell;
2. share data: ranks without data get their replica's, replicas without samples learn the fields;
   nothing where every rank has samples. All know every replica's number of samples by then, of
   which the steps are cut;
3. pack: each replica packs its own samples of every optimizer step, of those that share segments
   the hosts alone, and says how soon it would end with how many micro-batches;
4. fill: samples are brought to the count with which the latest rank ends soonest; the ranks of a
   replica must have made the same;
5. choose: of two counts, under a bound on tokens in flight alone, by the outlooks of all ranks; no
   agreement, since all that it follows from has been compared.

So planning takes three collectives of one small message a round, and an optimizer step
(`prepare`, `Job.agree_after_pipeline`) two: the count waits for what every rank packs, the choice
for the outlook on that count, the pipeline for every rank's rows, the update for every rank's loss.
Where all samples are one step, as in a stock script, 1 and 3 are one agreement unless a rank lacks
data or samples, and where tokens in flight are not bounded, 4 goes into the step's first. What the
last step's passes took travels with 1, and tells the costs by which the next 3 packs.
`ExchangingProtocol` replaces 3 to 5 by one plan of all samples: three agreements, a gather of all
lengths, and two exchanges (sizes, samples), the last three of which grow with the ranks.

Of several steps the first alone is planned so where planning takes long: the others follow in a
thread, by 3 to 5 again. Under the exchange by its last agreements and exchanges, and one more
agreement and a gather of the plans, which ranks share out.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from megatron.core import parallel_state

from mcore_batching.batch import Schema
from mcore_batching.batch.agreement.consensus import Statement
from mcore_batching.batch.agreement.figures import Figure, largest, least, total
from mcore_batching.batch.rows.prefixes import Hosts
from mcore_batching.flags import FLAGS
from mcore_batching.megatron.checks.shared_prefixes import check_shared_prefixes
from mcore_batching.megatron.checks.split_backward import check_split_backward
from mcore_batching.megatron.checks.validation import prepare_model
from mcore_batching.megatron.errors import PlanningFailedError
from mcore_batching.megatron.job.consensus import digest_of
from mcore_batching.megatron.job.job import Job
from mcore_batching.megatron.learning.cost_learning import CostLearner, learners_of
from mcore_batching.megatron.rollout.maker import Make, Plan
from mcore_batching.megatron.rollout.rollout_batch import RolloutBatch
from mcore_batching.megatron.rollout.settings import Settings, say_oversize
from mcore_batching.megatron.rollout.sharing import (
    figures_of,
    look_for_hosts,
    reasons_to_say,
    say_saving,
)
from mcore_batching.megatron.rollout.step_shard import StepShard
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.megatron.rows.shards import (
    GatheredShards,
    MicroBatches,
    Shard,
    computed_alone,
    with_hosted,
)
from mcore_batching.megatron.topology import model_chunks, vocabulary_size
from mcore_batching.planning import CostModel, PlannerConfig, ShardOutlook, StepPlan
from mcore_batching.planning.learning.learnt_costs import LearntCosts
from mcore_batching.planning.pipeline import SplitStage
from mcore_batching.planning.planning_process import PlanRequest
from mcore_batching.planning.shard import shapes_slots


class PlanningProtocol:
    """Planning of samples that stay on their data-parallel rank.

    Args:
        job: the present one.
        model: this rank's model chunks.
        read: gives this rank's rollout data; what it raises is raised on every rank.
        schema: the kind of every field.
        steps: local sample indices of every optimizer step; None: by ``global_batch_size``.
        cost_model: what samples and micro-batches cost; None: by the arguments.
        config: the planner's settings for training; None: by the arguments.
        forward_only: plan for forward passes alone, under their own cap if they have one.
        one_step: all samples are one step, on every rank: packing need not wait for the number of
            all samples.
        hosts: as `MicroBatchSchedule.hosts`, where they are known; None: they are looked for if
            samples are to share segments.
        learnt: costs to plan by, in place of `cost_model` and of what this step would learn.
        checked: settings that the model was checked with, in place of all these.
        plan: plans all samples of one step; None: in line.

    Attributes:
        settings: from `take_stock` on.
        vocabulary_size: of the model, likewise; None where it does not say.
        batch: this replica's samples, from `share_data` on.
        shares: samples of every data-parallel rank, from `share_data` on; under `one_step` one
            entry, of all together.
        hosts: as `MicroBatchSchedule.hosts`, from `lay_out` on.
        plan_digest: of the plans of all data-parallel ranks together, from `lay_out` on.
        learnt: what is known of costs when the plan is made, from `take_stock` on; None where the
            costs are not learnt.
        make_all: gives the schedule of all steps, in a thread, where `run` gives that of the first
            alone; None where `run` gives all.
        num_steps: of that schedule.
    """

    scope: Literal["local", "global"] = "local"
    settings: Settings
    vocabulary_size: int | None
    batch: RolloutBatch
    shares: list[int]
    plan_digest: str
    make_all: Make | None = None
    num_steps: int
    _follow: Callable[..., MicroBatchSchedule] | None = None

    def __init__(
        self,
        job: Job,
        model: Any,
        read: Callable[[], dict[str, list[Any]] | None],
        *,
        schema: Schema,
        steps: Iterable[Iterable[int]] | None,
        cost_model: CostModel | None,
        config: PlannerConfig | None = None,
        forward_only: bool,
        one_step: bool = False,
        hosts: Sequence[int] | None = None,
        learnt: LearntCosts | None = None,
        checked: Settings | None = None,
        plan: Callable[[PlanRequest], StepPlan] | None = None,
    ) -> None:
        self.job = job
        self.model = model
        self.read = read
        self.schema = schema
        self.steps = steps
        self.given_cost_model = cost_model if learnt is None else learnt.cost_model
        self.given_config = config
        self.checked = checked
        self.forward_only = forward_only
        self.one_step = one_step
        self.hosts = hosts
        self.plan = plan
        self.consensus = job.consensus
        self._shards: list[StepShard] = []
        self._packed_lengths: list[int] = []
        self._latest_at_once: list[float] = []
        self._is_settled = False
        self._outlooks: list[list[ShardOutlook]] = []
        self.learnt = learnt
        self.splits: tuple[tuple[SplitStage, ...], ...] = ()

    def run(self) -> MicroBatchSchedule:
        """All steps of the protocol. A collective over all ranks.

        Raises:
            PlanningFailedError: on every rank, if a step failed on any.
            PlanMismatchError: on every rank, if they disagree on settings, fields or plan.
        """
        return self.begin()()

    def begin(self) -> Callable[[], MicroBatchSchedule]:
        """All steps of the protocol that need an agreement of their own. A collective.

        Returns:
            gives the schedule, once. Where `one_step` left the last agreement out, it may fail on
            one rank alone: call it in the work of the agreement before the pipeline, and compare
            the schedule's `own_digest` there.

        Raises:
            CollectiveError: as `run`.
        """
        self.take_stock()
        self.share_data()
        # Left to the agreement before the pipeline, which comes anyway: one round fewer a step.
        if self._is_settled:
            return self._filled_alone
        self.lay_out()
        schedule = self.conclude()
        return lambda: schedule

    def take_stock(self) -> None:
        """Read settings and rollout data; hear how many samples each replica has."""
        agreed = self.consensus.agree(
            "taking stock", self._read_stock, self._stock_statement, failure=PlanningFailedError
        )
        self.settings, self._given = agreed.result
        self._stock = agreed
        if self._learns:
            packed_by = self._learner.learnt
            self._learner.learn(agreed.figures)
            # What packs at once has packed before these figures were heard: the plan is of the
            # costs before, and the next batch's of these.
            self.learnt = packed_by if self._packs_at_once else self._learner.learnt
            assert self.learnt is not None
            self.settings = dataclasses.replace(self.settings, cost_model=self.learnt.cost_model)
        if not self.forward_only:  # of forward passes alone training has said it already
            say_oversize(self.job, self.settings, agreed.figures["longest sample"])

    def _read_stock(self) -> tuple[Settings, RolloutBatch | None]:
        """The settings, and this rank's rollout data if it was given any."""
        chunks = model_chunks(self.model)
        # Without a look at a model that may be running in another thread, with hooks.
        settings = self.checked or self._checked_settings(chunks)
        # Before the agreement is over: under `one_step` its figures pack by these settings.
        self.settings = settings
        self.vocabulary_size = vocabulary_size(chunks)
        return settings, RolloutBatch.read(
            self.read(),
            self.job.options.global_batch_size,
            self.schema,
            self.steps,
            self.vocabulary_size,
            self.job.memory.told_fields,
        )

    def _checked_settings(self, chunks: list[Any]) -> Settings:
        settings = Settings.of(
            self.job,
            chunks,
            self.given_config,
            self.given_cost_model,
            forward_only=self.forward_only,
        )
        # Of every model anew: `forward_only` may plan for another one, such as a reference model.
        prepare_model(chunks, settings.dims, settings.config)
        # Forward passes take what training's plan found, and their model is checked there.
        if self.job.options.share_prefixes and not self.forward_only:
            check_shared_prefixes(chunks)
        if not self.forward_only:  # that of a reference model is never split
            check_split_backward(self.job.options, chunks, settings.dims)
        return settings

    def _stock_statement(self, stock: tuple[Settings, RolloutBatch | None]) -> Statement:
        settings, batch = stock
        # Each setting by its own name, so that the error says which one differs.
        equal = {
            name: value
            for part in dataclasses.asdict(settings).values()
            for name, value in part.items()
        }
        # What decides which collectives come next: a rank that differed would wait alone.
        # Whoever records gathers the plans of all ranks; the others take other agreements.
        equal["steps are recorded"] = self.job.recorder is not None
        equal["costs are learnt"] = self._learns
        equal["samples stay on their rank"] = self.scope == "local"
        equal[FLAGS["no_plan_ahead"]] = self.job.options.no_plan_ahead
        equal[FLAGS["share_prefixes"]] = bool(self.job.options.share_prefixes)
        counted = self._counted(batch)
        figures = {**counted.figures, "ranks without data": largest(int(batch is None))}
        if self._learns:
            # A rank that went on from another checkpoint would plan by other costs ever after.
            equal["what was learnt of costs"] = self._learner.state_dict()
            figures |= self._learner.evidence(
                shares_rows=settings.config.max_context_parallel is not None,
                in_lockstep=settings.dims.in_lockstep,
            )
        return dataclasses.replace(
            counted,
            equal=equal,
            figures=figures,
            # What these samples leave open, other ranks' may tell.
            tell=(batch.told, batch.is_open) if batch is not None else None,
            asks=batch is not None and batch.is_open,
        )

    @property
    def _learns(self) -> bool:
        """True if costs are learnt from the training steps before this one."""
        # A model of the caller's own is not corrected, and forward passes alone are not timed.
        is_given = self.given_cost_model is not None or self.checked is not None
        return not is_given and not self.forward_only and self.job.options.learns_cost_model

    @property
    def _learner(self) -> CostLearner:
        return learners_of(self.job).of(self.model)

    def share_data(self) -> None:
        """Hand the data to ranks that lack it, and the fields to ranks without samples."""
        batch, stock = self._given, self._stock
        heard = [each for each in stock.told.values() if each is not None]
        somebody_asks = any(is_open for _, is_open in heard)
        # By what all ranks know, not by this one's data: the exchange that follows is a collective.
        if stock.figures["ranks without data"]:
            batch, stock = self.consensus.share_within_replica(batch, self._counted)
        assert batch is not None
        if somebody_asks:  # then all have heard what each tells
            batch = batch.hearing(told for told, _ in heard)
        figures = stock.figures
        somebody_is_empty, populated = figures["ranks without samples"], figures["first populated"]
        self.shares = figures["samples"]
        packed = self._packs_at_once and not (somebody_is_empty or somebody_asks)
        if packed and figures["fields"] == figures["fields, least"]:  # else packing names them
            self._latest_at_once = figures["ends"]
            # Tokens in flight are known when micro-batches are filled.
            self._is_settled = self.settings.config.max_inflight_tokens is None
        # One past the last rank: nobody has samples, so there is nobody to hear of fields from.
        if somebody_is_empty and populated < len(self.consensus.ranks):
            fields_of = batch
            shared = self.consensus.share(lambda: fields_of.resolved().fields(), populated)
            batch = batch.with_fields_of(shared)
        self.batch = batch

    def _counted(self, batch: RolloutBatch | None) -> Statement:
        """This rank's samples: is there any rank without, which is the first that has some, how
        long is the longest.

        Where packing needs no more than that also what it makes of them: a number for the fields,
        which is to be the same on all ranks; how soon the step would end by its count.
        """
        lengths = [] if batch is None else batch.total_lengths
        # One past the last rank stands for none, so that the least over all ranks is a rank with
        # samples.
        populated = self.consensus.rank if lengths else len(self.consensus.ranks)
        figures: dict[str, Figure] = {
            "ranks without samples": largest(int(not lengths)),
            "first populated": least(populated),
            "longest sample": largest(max(lengths, default=0)),
        }
        if self._packs_at_once:
            if not self._shards or lengths != self._packed_lengths:  # they may be shared meanwhile
                places, forward = range(len(lengths)), self.forward_only
                self._shards = [
                    StepShard(self.job.options, self.settings, places, lengths, forward)
                ]
                self._shards[0].pack()
            self._packed_lengths = lengths
            # Largest and least tell whether all ranks have the same fields; where not, packing says
            # by name which differ.
            fields = 0 if batch is None else int(digest_of(batch.comparable())[:12], 16)
            figures |= {"fields": largest(fields), "fields, least": least(fields)}
            figures["ends"] = largest(self._shards[0].ends)
        shares = [len(lengths)]
        if not self.one_step:
            # Each rank knows its own, and the sum over ranks has them all. Beside them there is
            # room for some 90 ranks in a message; those of more take another one.
            place = self.consensus.data_parallel_rank
            shares = [0] * place + shares + [0] * (len(self.consensus.replicas) - 1 - place)
        return Statement(figures={**figures, "samples": total(shares)})

    def _own_steps(self) -> list[list[int]]:
        """Local sample indices of every step."""
        if self.one_step:
            return [list(range(len(self.batch.total_lengths)))]
        shares, place = list(self.shares), self.consensus.data_parallel_rank
        # Ranks of a replica that read other samples are told so once all have packed.
        shares[place] = len(self.batch.total_lengths)
        return self.batch.steps_of(shares, place)

    @property
    def _packs_at_once(self) -> bool:
        """True if packing follows from this rank's settings and samples alone."""
        return self.one_step and self.scope == "local"

    def _filled_alone(self) -> MicroBatchSchedule:
        """The schedule, filled to the count that follows from what is agreed on."""
        [shard] = self._shards
        shard.fill(self._latest_at_once)
        # Of what all ranks know: each one's own plan is compared within its replica, by
        # `own_digest`.
        self.plan_digest = digest_of([self.shares, self._latest_at_once])
        # The only count: there is another to choose from where tokens in flight are bounded.
        return self._schedule(
            self._split((shard.filled[0],)),
            digest_of([self.batch.total_lengths, shard.filled]),
        )

    def lay_out(self) -> None:
        """Prepare what `choose` needs of the other ranks: here, pack and fill."""
        self._fill(self._latest_at_once or self._pack())

    def choose(self) -> tuple[MicroBatches, ...]:
        """Every step's micro-batches of this rank, as local sample indices. Not a collective."""
        both = zip(self._shards, self._outlooks, strict=True)
        return self._split(tuple(shard.chosen(outlooks) for shard, outlooks in both))

    def _split(self, chosen: tuple[MicroBatches, ...]) -> tuple[MicroBatches, ...]:
        """Know `splits`; micro-batches in the order that suits them."""
        if self.settings.config.split_backward == "off":
            return chosen
        split = [shard.split(rows) for shard, rows in zip(self._shards, chosen, strict=True)]
        self.splits = tuple(stages for _, stages in split)
        return tuple(rows for rows, _ in split)

    def conclude(self) -> MicroBatchSchedule:
        """The schedule. What it is chosen by is the same on the ranks of each replica."""
        made = self._schedule(self._chosen())
        if self._follow is not None:
            self.make_all = functools.partial(self._follow, made)
        return made

    def _chosen(self) -> tuple[MicroBatches, ...]:
        return self.consensus.do_alike("choosing", self.choose, failure=PlanningFailedError)

    @property
    def may_wait(self) -> bool:
        """True if later steps than the first may be planned while that one runs."""
        return not (self.one_step or self.forward_only or self.job.options.no_plan_ahead)

    def _packed_later(
        self, first: MicroBatchSchedule, job: Job, operation: str, plan: Plan
    ) -> MicroBatchSchedule:
        """The schedule of all steps, of the later ones' shards. A collective, in the thread."""
        del operation
        of_main, self.consensus = self.consensus, job.consensus

        def work() -> list[float]:
            for shard in self._shards:
                shard.plan = plan
                shard.pack()
            return [end for shard in self._shards for end in shard.ends]

        def says(ends: list[float]) -> Statement:
            return Statement(figures={"ends": largest(ends)})

        agreed = self.consensus.agree("packing", work, says, failure=PlanningFailedError)
        self._fill(agreed.figures["ends"])
        steps = first.steps + with_hosted(self._chosen(), self.hosts)
        shard = Shard(self.batch.total_lengths, steps, self.hosts, first.splits + self.splits)
        return dataclasses.replace(
            first,
            steps=steps,
            splits=shard.splits,
            plan_digest=digest_of([first.plan_digest, self.plan_digest]),
            # The main thread's: it is the one that reads them.
            gather_shards=GatheredShards(of_main, shard),
        )

    def _schedule(
        self, chosen: tuple[MicroBatches, ...], own_digest: str = ""
    ) -> MicroBatchSchedule:
        steps = with_hosted(chosen, self.hosts)
        shard = Shard(self.batch.total_lengths, steps, self.hosts, self.splits)
        # For later batches, whose samples may be too few or too empty to tell.
        self.job.memory.told_fields |= self.batch.inferred()
        return MicroBatchSchedule(
            rollout_data=self.batch.data,
            schema=self.batch.schema,
            template=self.batch.template,
            steps=steps,
            hosts=self.hosts,
            splits=self.splits,
            dims=self.settings.dims,
            config=self.settings.config,
            context_parallel_rank=parallel_state.get_context_parallel_rank(),
            pad_token_id=self.job.options.checked_pad_token_id(),
            vocabulary_size=self.vocabulary_size,
            plan_digest=self.plan_digest,
            samples_per_step=self.batch.global_batch_size,
            own_digest=own_digest,
            # Others' plans are for statistics and records: nobody waits for them in training.
            gather_shards=GatheredShards(self.consensus, shard),
            scope=self.scope,
            cost_model=self.settings.cost_model,
            learnt=self.learnt,
        )

    def _pack(self) -> list[float]:
        """Pack this rank's samples of every step, or of the first where others are to follow; of
        each step's ends the largest of all ranks."""

        def work() -> tuple[RolloutBatch, list[StepShard], Hosts | None]:
            batch, steps = self.batch.resolved(), self._own_steps()
            found = self._look_for_hosts(batch, steps)
            # All of them, while all ranks can be told what is wrong with later steps.
            shards = [
                StepShard(
                    self.job.options,
                    self.settings,
                    indices,
                    [batch.total_lengths[i] for i in indices],
                    self.forward_only,
                )
                # Who lies in a host's segment takes no room in a row, and comes back in
                # `_schedule`.
                for indices in computed_alone(tuple(map(tuple, steps)), self.hosts)
            ]
            for shard in shards[:now]:
                shard.pack()
            return batch, shards, found

        def says(packed: tuple[RolloutBatch, list[StepShard], Hosts | None]) -> Statement:
            batch, shards, found = packed
            ends = [end for shard in shards for end in shard.ends]
            return self._statement_of_steps(batch, len(shards), found, {"ends": largest(ends)})

        # Where nothing is searched for, packing takes less time than to start a process for it.
        searches = shapes_slots(self.settings.dims, self.settings.config)
        now = 1 if self.may_wait and searches else None
        agreed = self.consensus.agree("packing", work, says, failure=PlanningFailedError)
        self.batch, shards, _ = agreed.result
        self._shards, self.num_steps = shards[:now], len(shards)
        if len(shards) > len(self._shards):
            rest = copy.copy(self)
            rest._shards = shards[1:]
            self._follow = rest._packed_later
        say_saving(self.job, agreed.figures, agreed.told)
        latest: list[float] = agreed.figures["ends"]
        return latest

    def _statement_of_steps(
        self, batch: RolloutBatch, num_steps: int, found: Hosts | None, figures: dict[str, Figure]
    ) -> Statement:
        # Pipelines run step by step: ranks with fewer steps would leave the others waiting.
        equal = {"number of steps": num_steps, **batch.comparable()}
        # A rank without samples may not have been told one, and steps of its own need none.
        if batch.total_lengths and batch.steps is None:
            equal["global_batch_size"] = batch.global_batch_size
        saved = figures_of(found, batch.total_lengths, self.settings.cost_model)
        return Statement(
            equal=equal, figures={**figures, **saved}, tell=reasons_to_say(self.job, found)
        )

    def _look_for_hosts(self, batch: RolloutBatch, steps: Sequence[Sequence[int]]) -> Hosts | None:
        """Know `hosts`, where samples are to share segments; what was found in any case."""
        # Looked for when training is planned: forward passes take what was found then, and a stock
        # script's step packs at once.
        if self.hosts is not None or self.one_step or self.forward_only:
            return None
        found = look_for_hosts(self.job, model_chunks(self.model), batch, steps)
        if found is not None and self.job.options.share_prefixes:
            self.hosts = found.host
        return found

    def _fill(self, latest: list[float]) -> None:
        """Bring every step to the common counts; the worst outlook of all ranks on each."""

        def work() -> list[list[ShardOutlook]]:
            ends = iter(latest)
            return [shard.fill([next(ends) for _ in shard.ends]) for shard in self._shards]

        def says(outlooks: list[list[ShardOutlook]]) -> Statement:
            each = [outlook for by_count in outlooks for outlook in by_count]
            ends = [outlook.end for outlook in each]
            filled = [shard.filled for shard in self._shards]
            digest = digest_of([self.batch.total_lengths, self.hosts, filled])
            return Statement(
                # Stages and tensor-parallel ranks that ran other rows would send tensors of other
                # shapes.
                equal_in_replica={"samples and plan (sha256)": digest},
                figures={
                    "ends": largest(ends),
                    "tokens in flight": largest([outlook.inflight_tokens for outlook in each]),
                    # 32 bits at a time, whose sum over replicas travels as one integer.
                    "plans": total([int(digest[i : i + 8], 16) for i in range(0, len(digest), 8)]),
                },
            )

        agreed = self.consensus.agree("filling", work, says, failure=PlanningFailedError)
        self.plan_digest = digest_of(agreed.figures)
        # Each figure's largest, perhaps of different ranks: the step ends with its latest rank, and
        # must fit into memory on all.
        worst = map(ShardOutlook, agreed.figures["ends"], agreed.figures["tokens in flight"])
        self._outlooks = [[next(worst) for _ in shard.filled] for shard in self._shards]
