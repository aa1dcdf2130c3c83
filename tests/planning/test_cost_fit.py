"""A cost model learnt from the times of passes: found out, followed, and not spoilt."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mcore_batching.planning import ConfigError, CostModel, ParallelDims
from mcore_batching.planning.costs.layer_costs import costs_of_chunks, costs_of_stage
from mcore_batching.planning.learning.fit import WINDOW_STEPS, evidence, relearnt, slowness
from mcore_batching.planning.learning.learnt_costs import LearntCosts, Timing
from mcore_batching.planning.pipeline import Clock, Schedule

LAUNCHES = CostModel(per_micro_batch=2048.0, backward_ratio=1.6)
ATTENTION = CostModel(quadratic=1 / 2000, per_micro_batch=16.0, backward_ratio=3.0)
NO_PAIRS = CostModel(quadratic=0.0, per_micro_batch=500.0)
SECONDS_PER_UNIT = 1e-6
STAGES = 2
RANKS = [(replica, stage) for replica in range(2) for stage in range(STAGES)]

Slowness = Callable[[int, int, int, random.Random], float]
"""``(step, replica, stage, random) -> how many times as long a pass takes``."""


def rows_of(generator: random.Random, number: int = 5) -> list[tuple[int, ...]]:
    """Rows under a cap of 8192, one of them a placeholder at times."""
    rows: list[tuple[int, ...]] = []
    for _ in range(number):
        lengths = [min(8192, round(generator.lognormvariate(6, 1.2)))]
        while sum(lengths) < generator.randrange(8192):
            lengths.append(max(1, round(generator.lognormvariate(6, 1.2))))
        rows.append(tuple(lengths))
    return [*rows[1:], ()] if generator.random() < 0.2 else rows


def shared_rows_of(
    generator: random.Random, sizes: Sequence[int] = (2, 4)
) -> list[tuple[tuple[int, ...], int]]:
    """Two rows on several ranks each, with their context-parallel sizes."""
    drawn = [generator.choice(sizes) for _ in range(2)]
    return [((round(8192 * size * generator.uniform(0.3, 1)),), size) for size in drawn]


def no_rows(generator: random.Random) -> list[Any]:
    return []


TWO_STAGES = ParallelDims(data_parallel=2, pipeline_parallel=2)


def learn(
    truth: Callable[[int], CostModel],
    num_steps: int = 6,
    noise: float = 0.0,
    slowness: Slowness = lambda *unused: 1.0,
    rows: Callable[[random.Random], list[tuple[int, ...]]] = rows_of,
    learnt: LearntCosts | None = None,
    shared_rows: Callable[[random.Random], list[tuple[tuple[int, ...], int]]] = no_rows,
) -> Iterator[LearntCosts]:
    """What is known after each step of a job of two pipelines of two stages."""
    generator = random.Random(1)
    shared: list[list[Timing]] = []
    learnt = learnt or LearntCosts(cost_model=CostModel())
    windows: dict[tuple[int, int], list[list[Timing]]] = {rank: [] for rank in RANKS}
    for step in range(num_steps):
        model = truth(step)
        run = [rows(generator) for _ in range(2)]
        for (replica, stage), window in windows.items():
            timed = []
            for lengths in run[replica]:
                own = costs_of_stage(model, TWO_STAGES, stage)
                seconds = SECONDS_PER_UNIT * own.micro_batch(lengths)
                seconds *= slowness(step, replica, stage, generator) * generator.gauss(1, noise)
                backward = model.backward_ratio * seconds * generator.gauss(1, noise)
                timed.append(
                    Timing(lengths=lengths, forward_seconds=seconds, backward_seconds=backward)
                )
            window.append(timed)
            del window[:-WINDOW_STEPS]
        parts = [
            evidence(window, learnt, stage=costs_of_stage(learnt.cost_model, TWO_STAGES, stage))
            for (_, stage), window in windows.items()
        ]
        shared.append([])
        for lengths, size in shared_rows(generator):
            seconds = SECONDS_PER_UNIT * model.on_ranks(size).micro_batch(lengths)
            seconds *= slowness(step, 0, 0, generator)
            shared[-1].append(
                Timing(
                    lengths=lengths,
                    forward_seconds=seconds * generator.gauss(1, noise),
                    backward_seconds=model.backward_ratio * seconds * generator.gauss(1, noise),
                    context_parallel=size,
                )
            )
        sums = [sum(numbers) for numbers in zip(*parts, strict=True)]
        learnt = relearnt(learnt, sums, shared[-WINDOW_STEPS:])
        yield learnt


def error(learnt: LearntCosts, truth: CostModel, seed: int = 7) -> float:
    """The largest relative error of predicted times of rows, whatever they hold."""
    generator = random.Random(seed)
    errors = []
    for lengths in rows_of(generator, 40):
        seconds = SECONDS_PER_UNIT * truth.micro_batch(lengths) * (1 + truth.backward_ratio)
        assert learnt.seconds_per_unit is not None
        errors.append(abs(learnt.seconds_per_unit * learnt.units(lengths) / seconds - 1))
    return max(errors)


def error_on_ranks(learnt: LearntCosts, truth: CostModel, sizes: Sequence[int]) -> float:
    """The largest relative error of predicted times of rows like `shared_rows_of`."""
    generator = random.Random(7)
    errors = []
    for lengths, size in (row for _ in range(20) for row in shared_rows_of(generator, sizes)):
        seconds = SECONDS_PER_UNIT * truth.on_ranks(size).micro_batch(lengths)
        seconds *= 1 + truth.backward_ratio
        assert learnt.seconds_per_unit is not None
        errors.append(abs(learnt.seconds_per_unit * learnt.units(lengths, size) / seconds - 1))
    return max(errors)


models = pytest.mark.parametrize("truth", [LAUNCHES, ATTENTION, NO_PAIRS], ids=str)


@models
def test_a_hidden_model_is_known_after_few_steps(truth: CostModel) -> None:
    *_, learnt = learn(lambda step: truth, num_steps=3)
    assert error(learnt, truth) < 0.01
    assert learnt.cost_model.backward_ratio == pytest.approx(truth.backward_ratio)


@models
def test_noise_and_stalls_do_not_spoil_it(truth: CostModel) -> None:
    """Not even where a whole rank stalls in the first step that is seen, by which all begins."""

    def stalls(step: int, replica: int, stage: int, generator: random.Random) -> float:
        if (step, replica, stage) == (0, 0, 1):
            return 5.0
        return 8.0 if generator.random() < 0.05 else 1.0

    for number, learnt in enumerate(learn(lambda step: truth, noise=0.03, slowness=stalls)):
        if number >= 2:
            assert error(learnt, truth) < 0.12
            assert error(learnt, truth, seed=8) < 0.12


def test_noise_alone_tells_nothing_of_rows_of_one_size() -> None:
    """Their fixed cost and that of their tokens look alike: plans would swing with every step."""
    truth = CostModel(per_micro_batch=256.0)

    def alike(generator: random.Random) -> list[tuple[int, ...]]:
        return [(round(2000 * generator.gauss(1, 0.1)),) for _ in range(4)]

    known = [
        learnt.cost_model.per_micro_batch
        for learnt in learn(lambda step: truth, num_steps=30, noise=0.3, rows=alike)
    ]
    assert max(known) < 4096
    of_row = [2000 + each for each in known[10:]]
    assert all(0.5 < after / before < 2.0 for before, after in itertools.pairwise(of_row))


@models
def test_one_stalled_step_of_all_ranks_moves_nothing(truth: CostModel) -> None:
    for learnt in list(
        learn(lambda step: truth, slowness=lambda step, *unused: 6.0 if step == 3 else 1.0)
    )[2:]:
        assert error(learnt, truth) < 0.02


def test_times_that_are_none_are_left_out() -> None:
    broken = [math.nan, 0.0, math.inf, -1.0]
    *_, learnt = learn(
        lambda step: LAUNCHES,
        num_steps=4,
        slowness=lambda step, *unused: broken[step] if unused[1] else 1.0,
    )
    assert error(learnt, LAUNCHES) < 0.01
    nothing = Timing(lengths=(5,), forward_seconds=math.nan, backward_seconds=1.0)
    sums = evidence([[nothing]], learnt)
    assert set(sums) == {0.0}
    assert relearnt(learnt, sums) is learnt
    overflown = [math.inf] * len(sums)
    assert relearnt(learnt, overflown) is learnt


def test_drift_is_followed() -> None:
    def truth(step: int) -> CostModel:
        return CostModel(quadratic=1e-4 * 1.03**step, per_micro_batch=500 * 1.03**step)

    for step, learnt in enumerate(learn(truth, num_steps=16, noise=0.01)):
        if step > 3:
            assert error(learnt, truth(step)) < 0.06


def test_two_steps_in_a_row_are_a_change() -> None:
    *_, learnt = learn(
        lambda step: LAUNCHES, num_steps=7, slowness=lambda step, *_: 1.0 if step < 5 else 2.0
    )
    assert learnt.seconds_per_unit == pytest.approx(2 * SECONDS_PER_UNIT, rel=0.1)
    *_, learnt = learn(lambda step: LAUNCHES if step < 5 else ATTENTION, num_steps=14)
    assert error(learnt, ATTENTION) < 0.05


def test_a_model_of_other_devices_is_given_up() -> None:
    """As after a resume elsewhere: all passes are off, so none of them is an outlier."""
    *_, before = learn(lambda step: LAUNCHES)
    *_, learnt = learn(
        lambda step: ATTENTION, num_steps=3, slowness=lambda *unused: 4.0, learnt=before
    )
    assert learnt.seconds_per_unit == pytest.approx(4 * SECONDS_PER_UNIT, rel=0.02)
    assert learnt.cost_model.quadratic == pytest.approx(ATTENTION.quadratic, rel=0.02)


def test_what_rows_cannot_tell_apart_stays() -> None:
    """Full rows of one sample each: fixed cost and cost of tokens are one number."""
    guess = CostModel(quadratic=1e-4, per_micro_batch=1000.0)
    *_, learnt = learn(
        lambda step: LAUNCHES,
        rows=lambda generator: [(4096,)] * 4,
        learnt=LearntCosts(cost_model=guess),
    )
    assert learnt.seconds_per_unit is not None
    found, seconds = learnt.cost_model, learnt.seconds_per_unit * learnt.units((4096,))
    assert seconds == pytest.approx(SECONDS_PER_UNIT * LAUNCHES.micro_batch((4096,)) * 2.6)
    assert (found.quadratic, found.per_micro_batch) == pytest.approx((1e-4, 1000.0), rel=1e-3)


def test_times_that_fall_with_tokens_leave_a_unit() -> None:
    """As those of a model that does nothing but launch kernels, with some noise."""
    rows = []
    for tokens in (1000, 2000, 4000, 8000):
        seconds = 0.1 - 1e-6 * tokens
        rows.append(
            Timing(lengths=(tokens,), forward_seconds=seconds, backward_seconds=2 * seconds)
        )
    learnt = LearntCosts(cost_model=CostModel())
    for _ in range(3):
        learnt = relearnt(learnt, evidence([rows], learnt))
    assert learnt.cost_model.per_micro_batch > 1e5
    assert learnt.cost_model.quadratic < 1e-3


def test_a_slow_stage_or_rank_changes_no_proportions() -> None:
    def slower(step: int, replica: int, stage: int, generator: random.Random) -> float:
        return (0.8, 1.2)[stage] * (2.0 if (replica, stage) == (1, 1) else 1.0)

    *_, learnt = learn(lambda step: LAUNCHES, num_steps=10, slowness=slower)
    known, speed = learnt.cost_model, learnt.seconds_per_unit
    assert known.per_micro_batch == pytest.approx(LAUNCHES.per_micro_batch, rel=0.1)
    assert known.quadratic == pytest.approx(LAUNCHES.quadratic, rel=0.3)
    assert speed == pytest.approx(SECONDS_PER_UNIT, rel=0.3)


def test_slowness_is_that_of_two_steps_of_three() -> None:
    def step(seconds: float) -> list[Timing]:
        return [Timing(lengths=(100,), forward_seconds=seconds / 3, backward_seconds=seconds / 1.5)]

    model = CostModel(quadratic=0.0, per_micro_batch=0.0)
    learnt = LearntCosts(cost_model=model, seconds_per_unit=1.0 / 300)
    assert slowness([step(1.0)], replace(learnt, seconds_per_unit=None)) == 1.0
    assert slowness([], learnt) == 1.0
    for seconds, expected in (([1, 1, 6], 1), ([1, 6, 6], 6), ([9, 9, 9, 1, 1, 2], 1)):
        assert slowness([step(float(each)) for each in seconds], learnt) == pytest.approx(expected)


def test_the_window_of_attention_is_kept() -> None:
    truth = replace(ATTENTION, window=512)
    *_, learnt = learn(
        lambda step: truth, learnt=LearntCosts(cost_model=CostModel(window=512)), num_steps=3
    )
    assert learnt.cost_model.window == 512
    assert error(learnt, truth) < 0.01


COMMUNICATION = replace(LAUNCHES, context_parallel_overhead=0.4, context_parallel_fixed=500.0)


@pytest.mark.parametrize("sizes", [(2, 4), (2,)], ids=str)
def test_what_communication_costs_is_known_after_few_steps(sizes: tuple[int, ...]) -> None:
    *_, learnt = learn(
        lambda step: COMMUNICATION,
        num_steps=4,
        shared_rows=lambda generator: shared_rows_of(generator, sizes),
    )
    assert error(learnt, COMMUNICATION) < 0.01
    assert error_on_ranks(learnt, COMMUNICATION, (2, 4, 8)) < 0.01
    assert learnt.cost_model.context_parallel_overhead == pytest.approx(0.4, abs=0.01)


def test_noise_stalls_and_broken_times_do_not_spoil_communication() -> None:
    def stalls(step: int, replica: int, stage: int, generator: random.Random) -> float:
        if step == 1:
            return math.nan
        return 8.0 if step == 4 or generator.random() < 0.05 else 1.0

    for number, learnt in enumerate(
        learn(
            lambda step: COMMUNICATION,
            num_steps=10,
            noise=0.03,
            slowness=stalls,
            shared_rows=shared_rows_of,
        )
    ):
        if number >= 3:
            assert error_on_ranks(learnt, COMMUNICATION, (2, 4)) < 0.15


def test_costs_of_communication_that_no_row_tells_stay() -> None:
    *_, learnt = learn(lambda step: COMMUNICATION)
    assert learnt.cost_model.context_parallel_overhead == 0.1
    assert learnt.cost_model.context_parallel_fixed == 64.0


def test_equal_shared_rows_are_told_without_much_change() -> None:
    """Of one size and length: the share and what is fixed are one number."""
    *_, learnt = learn(
        lambda step: COMMUNICATION,
        shared_rows=lambda generator: [((9000,), 2)],
        learnt=LearntCosts(cost_model=replace(LAUNCHES, context_parallel_fixed=300.0)),
        num_steps=8,
    )
    seconds = SECONDS_PER_UNIT * COMMUNICATION.on_ranks(2).micro_batch((9000,)) * 2.6
    assert learnt.seconds_per_unit is not None
    assert learnt.seconds_per_unit * learnt.units((9000,), 2) == pytest.approx(seconds, rel=1e-3)
    assert 0.1 < learnt.cost_model.context_parallel_overhead < 0.5
    assert 300 < learnt.cost_model.context_parallel_fixed < 2000


def test_where_all_rows_are_shared_their_times_are_known() -> None:
    guess = replace(COMMUNICATION, context_parallel_overhead=0.2)
    *_, learnt = learn(
        lambda step: COMMUNICATION,
        rows=no_rows,
        shared_rows=shared_rows_of,
        learnt=LearntCosts(cost_model=guess),
    )
    assert error_on_ranks(learnt, COMMUNICATION, (2, 4)) < 0.2


@models
def test_costs_are_learnt_where_the_last_stage_is_known_to_have_more_layers(
    truth: CostModel,
) -> None:
    """Half as much again for tokens as the mean stage, and less of the pairs of tokens."""
    known = {"layers": "aaa|aV", "layer_costs": (("a", 1.0, 1.0, 1.0, 1.0), ("V", 5.0, 0, 0, 1.0))}
    first = LearntCosts(cost_model=CostModel(**known))
    truth = replace(truth, **known)
    *_, learnt = learn(lambda step: truth, learnt=first)
    assert error(learnt, truth) < 0.01
    rows = [(512, 900), (4000,), (20,)]
    dims = ParallelDims(pipeline_parallel=2)

    def end(model: CostModel) -> float:
        kinds, which = costs_of_chunks(model, dims)
        assert which == ((0,), (1,))
        costs = [kind.micro_batch(lengths) for lengths in rows for kind in kinds]
        schedule = Schedule(dims=dims, backward_ratio=model.backward_ratio, which_cost=which)
        return Clock(costs, schedule).end

    seconds = (learnt.seconds_per_unit or 0.0) * end(learnt.cost_model)
    assert seconds == pytest.approx(SECONDS_PER_UNIT * end(truth), rel=0.01)
    assert LearntCosts.from_data(json.loads(json.dumps(learnt.to_data()))) == learnt


@pytest.mark.parametrize(
    ("name", "right", "others", "expected"),
    [
        ("quadratic", [0.0, 1.0, 1e-19, 0.0, 0.0], {}, 0.0),
        ("per_micro_batch", [1e19, 1.0, 0.0, 0.0, 0.0], {}, 1e18),
        (
            "context_parallel_overhead",
            [0.0, 1.0, 0.0, math.nextafter(-0.001, 0.0), 0.0],
            {},
            0.0,
        ),
        ("context_parallel_fixed", [0.0, 1.0, 0.0, 0.0, 1e-19], {}, 0.0),
        ("backward_ratio", [0.0, 1.0, 0.0, 0.0, 0.0], {"forward": 1e-19}, 1e18),
        ("seconds_per_unit", [0.0, 1e-19, 0.0, 0.0, 0.0], {}, 1e-18),
    ],
)
def test_what_is_learnt_can_be_read_back(
    name: str, right: list[float], others: dict[str, float], expected: float
) -> None:
    """Whatever a few wild times leave: a job could not load its own checkpoint."""
    normal = [[0.0] * 5 for _ in range(5)]
    for unknown in (0, 1, 2, 4):
        normal[unknown][unknown] = 1.0
    rest = {"forward": 1.0, "backward": 2.0, "count": 3.0} | others
    model = CostModel(
        quadratic=0.0,
        per_micro_batch=0.0,
        context_parallel_overhead=0.001,
        context_parallel_fixed=0.0,
    )
    learnt = relearnt(
        LearntCosts(cost_model=model), [*itertools.chain(*normal), *right, *rest.values()]
    )
    assert LearntCosts.from_data(learnt.to_data()) == learnt
    found = learnt.to_data()
    assert (found["cost_model"] | found)[name] == expected


def test_it_travels_as_json() -> None:
    *_, learnt = learn(lambda step: LAUNCHES, num_steps=3)
    data = json.loads(json.dumps(learnt.to_data()))
    assert LearntCosts.from_data(data) == learnt
    # As written when stages, transfers and weight gradients were learnt, too.
    data["cost_model"] |= {"weight_share": 0.8, "split_backward_overhead": 0.1}
    data |= {"stage_factors": [0.9, 1.1], "transfers": [{"seconds": 1.0}], "num_steps": 3}
    assert LearntCosts.from_data(data) == learnt


@pytest.mark.parametrize(
    "changes",
    [
        {"cost_model": {"linear": 1.0, "cubic": 2.0}},
        {"cost_model": {"linear": -1.0}},
        {"seconds_per_unit": math.nan},
        {"seconds_per_unit": "fast"},
        {"seconds_per_unit": 5e-324},
        {"cost_model": {"linear": 0.0}},
        {"cost_model": {"per_micro_batch": 1e90}},
        {"seconds_per_unit": 0.0},
    ],
    ids=str,
)
def test_a_state_that_is_none_is_refused(changes: dict[str, Any]) -> None:
    state = LearntCosts(cost_model=CostModel()).to_data()
    with pytest.raises(ConfigError):
        LearntCosts.from_data(state | changes)
    del state[next(iter(changes))]
    with pytest.raises(ConfigError, match="state_dict"):
        LearntCosts.from_data(state)


ABSURD = (5e-324, 1e-300, 1e-12, 1e-3, 1e6, 1e170, 1e300, math.inf, math.nan, 0.0)


def test_absurd_times_and_states_end_in_no_error() -> None:
    """Times that no clock tells do not count; of what is left every sum of squares is a number."""
    generator = random.Random(1)
    draw = generator.choice

    def row(size: int) -> Timing:
        lengths = tuple(draw((1, 100, 2**40)) for _ in range(generator.randint(0, 3)))
        times = {"forward_seconds": draw(ABSURD), "backward_seconds": draw(ABSURD)}
        return Timing(lengths=lengths, context_parallel=size, **times)

    for _ in range(400):
        costs = (1.0, 1e17, 1e-17)
        model = CostModel(linear=draw(costs), quadratic=draw(costs), per_micro_batch=draw(costs))
        learnt = LearntCosts(cost_model=model, seconds_per_unit=draw((None, *costs)))
        learnt = LearntCosts.from_data(learnt.to_data())
        for _ in range(3):
            steps = [[row(1) for _ in range(3)] for _ in range(3)]
            learnt = relearnt(learnt, evidence(steps, learnt), [[row(2)], [row(4)]])
            assert math.isfinite(learnt.units([5, 6], 2))


def test_an_absurd_time_changes_nothing() -> None:
    row = Timing(lengths=(64,), forward_seconds=1e-3, backward_seconds=2e-3)
    rows = [row, replace(row, lengths=(32, 5), backward_seconds=1e-3)]
    learnt = LearntCosts(cost_model=CostModel())
    usual = evidence([rows], learnt)
    for seconds in (1e170, 5e-324):
        absurd = [*rows, replace(row, forward_seconds=seconds)]
        assert evidence([absurd], learnt) == usual


def test_stalls_of_shared_rows_do_not_raise_the_overhead_without_end() -> None:
    def rows(size: int, stalled: float) -> list[list[Timing]]:
        return [
            [
                Timing(
                    lengths=(tokens,),
                    forward_seconds=1e-6 * tokens * stalled,
                    backward_seconds=2e-6 * tokens * stalled,
                    context_parallel=size,
                )
                for tokens in (1000, 4000, 16000)
            ]
        ]

    learnt = LearntCosts(cost_model=CostModel(quadratic=1e-4))
    for _ in range(8):
        learnt = relearnt(learnt, evidence(rows(1, 1.0), learnt), rows(8, 1000.0))
    assert learnt.cost_model.context_parallel_overhead <= 3.0
    usual = learnt.units((4000,)) * (learnt.seconds_per_unit or 0.0)
    assert usual == pytest.approx(0.012, rel=0.5)
