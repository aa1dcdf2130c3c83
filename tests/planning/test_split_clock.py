"""Split backward passes: times against passes played one by one, memory, and what plans say."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, replace
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from naive_pipeline import Node, played, played_split
from planning_cases import examples

from mcore_batching.planning import (
    ConfigError,
    CostModel,
    InvariantError,
    ParallelDims,
    PlanFormatError,
    PlannerConfig,
    StepPlan,
    plan_step,
    step_statistics,
    validate_plan,
)
from mcore_batching.planning.pipeline import (
    PARTS,
    Blocks,
    Clock,
    CoupledClock,
    Pass,
    Schedule,
    SplitClock,
    SplitStage,
    inflight_tokens,
    split_inflight_tokens,
)
from mcore_batching.planning.plans.statistics import step_clocks, step_problem
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search import choice
from mcore_batching.planning.search.objective import Objective

PP4 = ParallelDims(data_parallel=4, pipeline_parallel=4)
DICE = random.Random(0)
LENGTHS = [int(DICE.lognormvariate(7, 0.8)) + 1 for _ in range(64)]


@dataclass
class Split:
    """Pipelines some of whose passes are split."""

    clock: SplitClock
    schedule: Schedule
    costs: list[list[float]]
    weights: list[list[float]]
    tokens: list[list[int]]
    blocks: list[Blocks]
    overhead: float
    kept: float
    memory: float
    split: list[int]


BLOCKS: list[Blocks] = [[], [(0, 2)], [(2, 4)], [(0, 2), (2, 4)], [(0, 4)]]
"""Who shares a row, of 4 ranks."""


@st.composite
def splits(draw: st.DrawFn, of_ranks: tuple[int, ...] = (1, 4)) -> Split:
    stages = draw(st.sampled_from([1, 2, 3, 4, 8]))
    chunks = draw(st.sampled_from([1, 1, 2, 3])) if stages > 1 else 1
    dims = ParallelDims(
        pipeline_parallel=stages, virtual_pipeline=chunks, waits_for_sends=draw(st.booleans())
    )
    dice = random.Random(draw(st.integers(0, 10**9)))
    drawn = [[dice.randrange(3) for _ in range(chunks)] for _ in range(stages)]
    kinds = list(dict.fromkeys(kind for of_stage in drawn for kind in of_stage))
    which = tuple(tuple(map(kinds.index, of_stage)) for of_stage in drawn)
    schedule = Schedule(
        dims=dims,
        backward_ratio=draw(st.sampled_from([2.0, 3.0, 1.0])),
        which_cost=which if draw(st.booleans()) else (),
    )
    count = dims.round_up_num_microbatches(draw(st.integers(1, 12)))
    ranks, kinds = draw(st.sampled_from(of_ranks)), schedule.num_costs
    blocks = [dice.choice(BLOCKS) if ranks > 1 else () for _ in range(count)]
    costs, weights, tokens = ([[] for _ in range(ranks)] for _ in range(3))
    for slot in range(count):
        shared = {rank: block[0] for block in blocks[slot] for rank in range(*block)}
        for rank in range(ranks):
            if shared.get(rank, rank) == rank:
                made = [dice.choice((0.0, 1.0, 9 * dice.random())) for _ in range(kinds)]
                held = dice.choice((1, 1, dice.randrange(1, 1000)))
            costs[rank] += made
            weights[rank] += [cost * dice.random() for cost in made]
            tokens[rank].append(held)
    overhead, kept = draw(st.sampled_from([0.0, 0.2])), draw(st.sampled_from([1.0, 2.65]))
    memory = draw(st.sampled_from([1.0, 1.25, 0.6, 100.0]))
    most = max(inflight_tokens(own, schedule) for own in tokens) * chunks
    held = list(zip(*tokens, strict=True))
    clock = SplitClock(
        flat(costs),
        flat(weights),
        schedule,
        blocks,
        overhead=overhead,
        tokens=held,
        kept=kept,
        limit=int(memory * most),
    )
    chosen = clock.all_split
    if draw(st.booleans()):
        chosen = [is_split * dice.randrange(2) for is_split in chosen]
    return Split(clock, schedule, costs, weights, tokens, blocks, overhead, kept, memory, chosen)


def flat(of_ranks: list[list[float]]) -> list[float]:
    """As clocks of several ranks take costs."""
    return [each for place in zip(*of_ranks, strict=True) for each in place]


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-9)


def part_of(case: Split, rank: int, node: Node) -> float:
    stage, kind, chunk, slot = node
    assert kind == "W"
    place = case.schedule.place_of_cost(stage, Pass("W", chunk, slot))
    whole = case.costs[rank][place] * case.schedule.share("B")
    return min(whole, case.weights[rank][place] * case.schedule.share("F")) / PARTS


@examples(300)
@given(splits())
def test_times_are_those_of_passes_played_one_by_one(case: Split) -> None:
    clock, ranks = case.clock, len(case.costs)
    end = clock.run(case.split)
    times, ends, orders = played_split(
        case.costs, case.weights, case.schedule, clock.stages, case.overhead, case.blocks
    )
    assert end == close(max(ends.values()))
    assert clock.ends == [
        close(max(end for (own, _), end in ends.items() if own == rank)) for rank in range(ranks)
    ]
    found: dict[tuple[int, Node], tuple[float, float]] = {}
    for rank in range(ranks):
        for o in clock.operations(rank):
            node = rank, (o.stage, o.kind, o.chunk, o.slot)
            found[node] = found.get(node, (o.start, 0.0))[0], o.end
    assert found.keys() == times.keys()
    for node, timed in times.items():
        assert found[node] == (close(timed[0]), close(timed[1]))
    # What the plan says, simulated as such.
    costs, weights = flat(case.costs), flat(case.weights)
    plan = SplitClock(costs, weights, case.schedule, case.blocks, overhead=case.overhead)
    plan.follow(clock.stages)
    assert plan.end == end
    assert all(plan.operations(rank) == clock.operations(rank) for rank in range(ranks))
    # The critical path: a pass starts when the one before ends, or the W that its stage ran since;
    # where ranks share it, the stage of the last of them.
    path = clock.critical_path()
    places = clock.program.places
    assert path[-1] < 2 * ranks
    for after, before in pairwise(path):
        _, what = places[after // ranks] or (0, "")
        other, was = places[before // ranks] or (0, "")
        rank, ends_at = before % ranks, times[before % ranks, (other, *was)][1]
        starts_at = times[after % ranks, (clock.program.stages[after // ranks], *what)][0]
        ran = orders[rank, other]
        ran = ran[ran.index((other, *was)) + 1 :]
        # With what its stage ran of W before its next pass.
        of_w = ran[: next((at for at, node in enumerate(ran) if node[1] != "W"), len(ran))]
        took = sum(part_of(case, rank, node) for node in of_w)
        assert starts_at in (close(ends_at), close(ends_at + took))


@examples(300)
@given(splits())
def test_no_stage_holds_more_than_it_may_and_w_costs_no_pass_its_time(case: Split) -> None:
    clock, chunks = case.clock, case.schedule.dims.virtual_pipeline
    ranks = range(len(case.costs))
    clock.run(case.split)
    # With room for all W, no pass starts later than if all of it ran after the last, nor than
    # without split passes.
    early, late = (
        SplitClock(
            flat(case.costs),
            flat(case.weights),
            case.schedule,
            case.blocks,
            overhead=case.overhead,
            limit=10**9,
        )
        for _ in range(2)
    )
    early.run(case.split)
    late.follow([[SplitStage(s, (0,) * len(p)) for s, p in own] for own in early.stages])
    passes = [
        [o for rank in ranks for o in each.operations(rank) if o.kind != "W"]
        for each in (early, late)
    ]
    assert passes[0] == passes[1]
    if case.overhead == 0.0:
        early.run([0] * len(case.split))
        both = zip(passes[0], (o for rank in ranks for o in early.operations(rank)), strict=True)
        assert all(o.end <= plain.end * (1 + 1e-9) for o, plain in both)
    first = max(inflight_tokens(tokens, case.schedule) for tokens in case.tokens)
    for held_of, stages in zip(case.tokens, clock.stages, strict=True):
        for stage, of_stage in enumerate(stages):
            # Tokens of micro-batches from their forward pass to the end of their W.
            order = case.schedule.order(stage, len(held_of))
            due = ran = held = most = 0
            deferred: list[int] = []
            for what, is_split, before in zip(order, *of_stage, strict=True):
                assert 0 <= before <= due
                due, ran = due - before, ran + before
                while len(deferred) and ran >= PARTS:
                    ran, held = ran - PARTS, held - deferred.pop(0)
                tokens = held_of[what.slot]
                held += tokens if what.kind == "F" else -tokens
                if is_split:
                    assert what.kind == "B"
                    due += PARTS
                    deferred.append(math.ceil(case.kept * tokens))
                    held += deferred[-1]
                most = max(most, held)
            counted = split_inflight_tokens(
                held_of, case.schedule, of_stage, case.kept, stage=stage
            )
            assert counted == most / chunks
            own = inflight_tokens(held_of, case.schedule, stage=stage)
            assert counted <= max(own, case.memory * first)


@examples(100)
@given(splits())
def test_without_split_passes_times_are_the_clock_s(case: Split) -> None:
    case.clock.run([0] * len(case.split))
    clock: Clock = CoupledClock(flat(case.costs), case.schedule, case.blocks)
    if len(case.costs) == 1:
        clock = Clock(case.costs[0], case.schedule)
    assert case.clock.ends == clock.ends
    for rank in range(len(case.costs)):
        assert case.clock.operations(rank) == clock.operations(rank)


def test_a_part_that_ends_when_the_next_pass_may_start_runs_before_it() -> None:
    """Stage 0 is done with B0 at 32 and waits until 40 for B1: the time of all 8 parts of W0."""
    schedule = Schedule(dims=ParallelDims(pipeline_parallel=2))
    clock = SplitClock([8.0, 8.0], [8.0, 8.0], schedule, [(), ()])
    assert clock.run(clock.all_split) == 56
    assert clock.stages[0][0].parts_before == (0, 0, 0, 8)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("experts", [1, 4])
def test_a_plan_says_what_runs_when(chunks: int, experts: int) -> None:
    dims = replace(PP4, virtual_pipeline=chunks, expert_parallel=experts)
    config = PlannerConfig(max_tokens_per_gpu=16384, plan_effort=100)
    plain = plan_step(LENGTHS, dims, config)
    assert plain.split_backward == ()
    plan = plan_step(LENGTHS, dims, replace(config, split_backward="all"))
    validate_plan(plan, LENGTHS)
    assert StepPlan.from_json(plan.to_json()) == plan
    passes = 2 * chunks * plan.num_microbatches
    for stages in plan.split_backward:
        assert [len(each) for stage in stages for each in stage] == [passes] * 2 * 4
        assert all(sum(split) == passes // 2 for split, _ in stages)
    of_both = [step_statistics(each, LENGTHS) for each in (plain, plan)]
    assert of_both[1].step_time < 0.95 * of_both[0].step_time
    assert of_both[1].floor_time <= of_both[1].step_time
    assert of_both[1].peak_inflight_tokens <= of_both[0].peak_inflight_tokens


@examples(150)
@given(
    lengths=st.lists(st.integers(0, 100) | st.integers(0, 16384), max_size=6),
    stages=st.sampled_from([2, 4]),
    chunks=st.sampled_from([1, 2]),
    experts=st.sampled_from([1, 2]),
    sizes=st.sampled_from([None, 2]),
    fixed=st.sampled_from([0.0, 256.0, 4096.0]),
    pairs=st.sampled_from([0.0, 1 / 24576, 1 / 500]),
    weight_share=st.sampled_from([0.3, 1.0, 3.0]),
)
@example([4000] + [800] * 10, 4, 1, 2, None, 256.0, 1 / 500, 1.0)  # W of a cheaper row is longer
def test_no_step_with_split_passes_ends_before_its_floor(
    lengths: list[int],
    stages: int,
    chunks: int,
    experts: int,
    sizes: int | None,
    fixed: float,
    pairs: float,
    weight_share: float,
) -> None:
    """Of few samples too, whose weight gradients are of fixed costs above all."""
    dims = ParallelDims(
        data_parallel=2,
        pipeline_parallel=stages,
        virtual_pipeline=chunks,
        expert_parallel=experts if sizes is None else 1,
    )
    config = PlannerConfig(
        max_tokens_per_gpu=8192,
        plan_effort=1,
        max_context_parallel=sizes,
        split_backward="all",
        split_backward_memory=10.0,
    )
    model = CostModel(per_micro_batch=fixed, quadratic=pairs, weight_share=weight_share)
    statistics = step_statistics(plan_step(lengths, dims, config, model), lengths)
    assert statistics.step_time >= statistics.floor_time * (1 - 1e-9)


def test_broken_plans_are_told() -> None:
    config = PlannerConfig(max_tokens_per_gpu=16384, plan_effort=100, split_backward="all")
    plan = plan_step(LENGTHS, PP4, config)
    (split, parts), *others = plan.split_backward[2]
    first = split.index(True)

    def broken(*stages: SplitStage) -> StepPlan:
        ranks = list(plan.split_backward)
        ranks[2] = stages
        return replace(plan, split_backward=tuple(ranks))

    early = (*parts[:first], 1, *parts[first + 1 :])
    none = tuple(0 for _ in parts)
    for each, fault in (
        (replace(plan, config=replace(config, split_backward="off")), "split_backward='off'"),
        (replace(plan, split_backward=plan.split_backward[1:]), "every rank"),
        (broken(*others), "4 stages"),
        (broken(SplitStage(split[1:], parts[1:]), *others), "stage 0 runs"),
        (broken(SplitStage(split, early), *others), "not due"),
        (broken(SplitStage((True, *split[1:]), parts), *others), "no backward pass"),
        (broken(SplitStage(split, none), *others), "tokens, it may hold"),
    ):
        with pytest.raises(InvariantError, match=fault):
            validate_plan(each, LENGTHS)
    document = json.loads(plan.to_json())
    for lists, fault in (
        (3, "JSON array"),
        ([[[[0]]]], "two lists"),
        ([[[[2], [0]]]], "0 or 1"),
        ([[[[0], [-1]]]], "0 or more"),
    ):
        document["steps"][0]["split_backward"] = lists
        with pytest.raises(PlanFormatError, match=fault):
            StepPlan.from_json(json.dumps(document), verify_digest=False)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "1", True, None])
def test_factors_of_memory_are_checked(value: object) -> None:
    for name in ("split_backward_memory", "split_backward_held"):
        with pytest.raises(ConfigError, match=name):
            PlannerConfig(max_tokens_per_gpu=1, **{name: value})  # type: ignore[arg-type]


def test_weight_gradients_cost_what_is_not_attention() -> None:
    model = CostModel(linear=2.0, quadratic=0.5, per_micro_batch=3.0, weight_share=0.5)
    assert model.weights([4, 6]) == 0.5 * (3.0 + 2.0 * 10)


@examples(60)
@given(
    st.integers(0, 10**9),
    st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 2), (8, 1)]),
    st.sampled_from([1, 4]),
    st.sampled_from([0.0, 0.2, 2.0]),
)
def test_chosen_passes_are_worth_it_or_none_are(
    seed: int, stages: tuple[int, int], experts: int, overhead: float
) -> None:
    dice = random.Random(seed)
    lengths = [int(dice.lognormvariate(7, 1.0)) + 1 for _ in range(dice.randrange(0, 60))]
    dims = ParallelDims(
        data_parallel=4,
        pipeline_parallel=stages[0],
        virtual_pipeline=stages[1],
        expert_parallel=experts,
    )
    config = PlannerConfig(
        max_tokens_per_gpu=16384,
        plan_effort=50,
        split_backward_memory=dice.choice((1.0, 1.5)),
        split_backward_held=dice.choice((1.0, 2.65, 17.0)),
        max_inflight_tokens=dice.choice((None, 400_000)),
        max_context_parallel=dice.choice((None, 2, 4)),
    )
    owners = dice.choice((None, [dice.randrange(4) for _ in lengths]))
    if config.max_context_parallel:
        owners, lengths = None, [length * dice.choice((1, 3)) for length in lengths]
    model = CostModel(split_backward_overhead=overhead)
    plain = plan_step(lengths, dims, config, model, owners=owners)
    config = replace(config, split_backward="auto")
    plan = plan_step(lengths, dims, config, model, owners=owners)
    validate_plan(plan, lengths)
    figures = [step_statistics(each, lengths) for each in (plan, plain)]
    ends = [each.step_time for each in figures]
    held = [max(f.peak_inflight_tokens, f.last_stage_inflight_tokens) for f in figures]
    assert held[0] <= config.split_backward_memory * held[1]
    if plan.split_backward:
        assert ends[0] <= (0.9801 if owners is None else 1.0) * ends[1]
        if owners is not None:  # each rank chooses by its own pipeline
            alone = [
                [clock.end for clock in step_clocks(each, *step_problem(each, lengths))]
                for each in (plan, plain)
            ]
            for passes, now, before in zip(plan.split_backward, *alone, strict=True):
                assert now <= 0.9801 * before or not any(any(each.split) for each in passes)
        assert plan.micro_batches[0][-1] or not any(plan.micro_batches[0])
        for stages_of in plan.split_backward[::experts]:
            assert {len(stage.split) for stage in stages_of} == {
                2 * stages[1] * plan.num_microbatches
            }
    else:
        assert replace(plan, config=plain.config) == plain
    if owners is not None:
        for rank, micro_batches in enumerate(plan.micro_batches):
            assert all(owners[i] == rank for samples in micro_batches for i in samples)


@pytest.mark.parametrize(("chunks", "fixed", "count"), [(1, 20_000.0, 60), (2, 550.0, 8)])
def test_no_move_is_tried_where_the_longest_sample_ends_the_step(
    chunks: int, fixed: float, count: int
) -> None:
    """Nor for the split step, of which W of that sample's last pass is the end."""
    dims = replace(PP4, virtual_pipeline=chunks)
    lengths = [120_000, *[9_000] * count, *range(100, 3_000, 100)]
    config = PlannerConfig(max_tokens_per_gpu=131_072, split_backward="auto")
    with mock.patch.object(choice, "improve", wraps=choice.improve) as improve:
        plan = plan_step(lengths, dims, config, CostModel(per_micro_batch=fixed))
    assert plan.split_backward
    assert not improve.called


def test_shared_rows_keep_their_sizes_where_micro_batches_move() -> None:
    dice = random.Random(0)
    lengths = [min(60000, int(dice.lognormvariate(7.5, 1.3)) + 1) for _ in range(64)]
    config = PlannerConfig(max_tokens_per_gpu=16384, plan_effort=100, max_context_parallel=4)
    plain = plan_step(lengths, PP4, config)
    plan = plan_step(lengths, PP4, replace(config, split_backward="auto"))
    validate_plan(plan, lengths)
    assert plan.micro_batches != plain.micro_batches
    assert plan.context_parallel != plain.context_parallel
    ends = [step_statistics(each, lengths).step_time for each in (plan, plain)]
    assert ends[0] < 0.95 * ends[1]


def test_few_passes_are_split_and_none_where_weights_take_no_time_or_too_much_memory() -> None:
    config = PlannerConfig(max_tokens_per_gpu=16384, plan_effort=300, split_backward="auto")
    with mock.patch.object(SplitClock, "run", autospec=True, side_effect=SplitClock.run) as run:
        chosen = plan_step(LENGTHS, PP4, config)
    # A third of the effort, which pays for three times as many other passes, and the choice.
    simulated = sum(len(call.args[1]) for call in run.call_args_list)
    effort = Objective(Problem.of(LENGTHS, PP4, config)).effort
    assert 0.55 * effort < simulated < effort
    every = plan_step(LENGTHS, PP4, replace(config, split_backward="all"))
    ends = [step_statistics(each, LENGTHS).step_time for each in (chosen, every)]
    assert ends[0] <= 1.02 * ends[1]
    number = [
        sum(sum(stage.split) for rank in each.split_backward for stage in rank)
        for each in (chosen, every)
    ]
    assert 0 < number[0] < 0.75 * number[1]
    # Forward passes alone and one stage have nothing to split.
    for dims, options, changes in (
        (PP4, {"forward_only": True}, {}),
        (replace(PP4, pipeline_parallel=1), {}, {}),
        (PP4, {"cost_model": CostModel(weight_share=0.0)}, {}),
        (PP4, {"cost_model": CostModel(split_backward_overhead=1.0)}, {}),
        (PP4, {}, {"split_backward_held": 17.0}),
    ):
        plan = plan_step(LENGTHS, dims, replace(config, **changes), **options)  # type: ignore[arg-type]
        assert plan.split_backward == ()
    # Under full recomputation, with room for it.
    roomy = replace(config, split_backward_held=17.0, split_backward_memory=20.0)
    assert plan_step(LENGTHS, PP4, roomy).split_backward


@examples(100)
@given(splits((1,)))
def test_no_choice_ends_sooner_than_w_that_fills_every_wait(case: Split) -> None:
    """What is minimised while samples are moved, with W the same share of every micro-batch."""
    share = 0.7
    (costs,), schedule = case.costs, case.schedule
    weights = [share * cost for cost in costs]
    tokens = [[each] for each in case.tokens[0]]
    clock = SplitClock(costs, weights, schedule, case.blocks, tokens=tokens, limit=10**9)
    deferring = Clock(costs, replace(schedule, deferred_share=share))
    end = clock.run(case.split)
    assert deferring.end <= end * (1 + 1e-9)
    assert deferring.end <= Clock(costs, schedule).end * (1 + 1e-9)
    # Passes as if W took no time; then each stage's work, which W joins as soon as it is there.
    relaxed = replace(schedule, deferred_share=share)
    times = played([[cost] for cost in costs], relaxed)
    ends = []
    for stage in range(schedule.dims.pipeline_parallel):
        done = 0.0
        for what in schedule.order(stage, len(case.tokens[0])):
            start, stop = times[0, (stage, *what)]
            done = max(done, start) + stop - start
            if what.kind == "B":
                cost = costs[schedule.place_of_cost(stage, what)]
                done += cost * relaxed.share("W")
        ends.append(done)
    assert deferring.end == close(max(ends))
    weighed = deferring.weights()
    assert sum(map(float.__mul__, weighed, costs)) == close(deferring.end)
