"""Stock training through ``megatron.training.pretrain``: with the flag as without it.

The reference is the padded run of the same script without the flag, one sample a micro-batch.
Differences come from float32 rounding alone: a loss is a sum over some thousand tokens in an order
that depends on packing, and 10 updates by Adam carry the difference on.
"""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest
from kit.harness import results, run_jobs
from kit.stock_jobs import CAP, JOBS, LAYERS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="this megatron-core ships without megatron.training (it does from 0.19 on)",
)

# float32 rounds to 6e-8 of a value. Wrong programs differ by 1e-3 and more at the first step.
LOSS = 3e-6
GRAD_NORM = 2e-5
ERROR_SECONDS = 45.0  # an error that came by a collective's timeout would take 60

Ranks = list[Any]


def runs(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("records", [names], ids=["-and-".join(names)], indirect=True)


@pytest.fixture(scope="module")
def launched() -> dict[str, Any]:
    return {}


@pytest.fixture
def records(
    request: pytest.FixtureRequest,
    launched: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Ranks]:
    """What every rank returned for each of the test's jobs.

    The first test runs the jobs of all selected tests, in one launch.
    """
    if not launched:
        selected = [
            name
            for item in request.session.items
            for name in getattr(getattr(item, "callspec", None), "params", {}).get("records", ())
        ]
        wanted = [JOBS[name] for name in dict.fromkeys(selected)]
        launched |= run_jobs(wanted, tmp_path_factory.mktemp("stock"))
    return [results(launched[name]) for name in request.param]


def last_stage(ranks: Ranks) -> list[dict[str, Any]]:
    """What the ranks saw that see losses."""
    return [record for record in ranks if record["steps"][0]["loss"]]


def assert_equal(steps: list[Any], expected: list[Any], *names: str) -> None:
    """These values of as many steps are the same, bit for bit."""
    for step, other in zip(steps, expected, strict=True):
        for name in names:
            assert step[name] == other[name], (step["iteration"], name)


def assert_close(steps: list[Any], expected: list[Any]) -> None:
    """Losses and gradients of as many steps differ by rounding."""
    for step, other in zip(steps, expected, strict=True):
        assert step["loss"] == pytest.approx(other["loss"], rel=LOSS), step["iteration"]
        assert step["grad_norm"] == pytest.approx(other["grad_norm"], rel=GRAD_NORM)


def assert_same_training(flagged: Ranks, padded: Ranks, num_steps: int) -> None:
    """The steps of a run with the flag are the first steps of the padded one."""
    expected = last_stage(padded)[0]
    steps = expected["steps"][:num_steps]
    assert not any(step["batching"] for step in steps)
    for record in last_stage(flagged):
        exact = ("iteration", "consumed_samples", "learning_rate", "skipped")
        assert_equal(record["steps"], steps, *exact)
        assert_close(record["steps"], steps)
        if num_steps == len(expected["steps"]):  # else the last ones are of other weights
            for losses, other in zip(record["evaluations"], expected["evaluations"], strict=True):
                assert losses == pytest.approx(other, rel=LOSS)


def assert_packed(flagged: Ranks) -> None:
    """All see the same plan, of fewer micro-batches than the padded run's one a sample."""
    records = last_stage(flagged)
    for name in ("micro-batches a rank", "fill", "placeholders"):
        plans = [[step["batching"][name] for step in record["steps"]] for record in records]
        assert all(plan == plans[0] for plan in plans), name
    counts = batching(flagged, "micro-batches a rank")
    assert sum(counts) < 4 * len(counts)


def values(ranks: Ranks, name: str) -> list[Any]:
    """One value of every step, on the last rank."""
    return [step[name] for step in ranks[-1]["steps"]]


def batching(ranks: Ranks, name: str) -> list[float]:
    """One of the logged statistics of every step."""
    return [statistics[name] for statistics in values(ranks, "batching")]


TRAINED: dict[str, tuple[str, int, bool]] = {
    "pp2": ("pp2-padded", 6, False),
    "pp2-overlapped-reduction": ("pp2-padded", 5, True),
    "pp2-two-samples": ("pp2-two-samples-padded", 5, True),
    "pp2-ramp-up": ("pp2-ramp-up-padded", 7, True),
    "vpp2": ("vpp2-padded", 5, True),
    "vpp2-placeholders": ("vpp2-padded", 5, False),
    # Megatron's local attention refuses context parallelism: the reference is data-parallel.
    "tp2-cp2": ("dp4-padded", 5, False),
    "tp2-staying": ("dp4-padded", 5, False),
    # Megatron's own script names the length of padded samples from 0.19 on, at which layers of
    # experts would cut rows.
    "ep2-tokens-per-sample": ("ep2-padded", 5, False),
    # Under a cap of half the longest sample.
    "pp2-shared": ("pp2-padded", 5, True),
    "cp2-shared": ("pp2-padded", 5, True),
    "dp4-shared": ("dp4-padded", 5, True),
}
"""By job: its padded run, its steps, and whether it takes ``--long``."""


@pytest.mark.parametrize(
    ("records", "name"),
    [
        pytest.param((padded, name), name, id=name, marks=pytest.mark.long if is_long else ())
        for name, (padded, _, is_long) in TRAINED.items()
    ],
    indirect=["records"],
)
def test_the_steps_are_those_of_the_padded_run(records: list[Ranks], name: str) -> None:
    padded, flagged = records
    assert_same_training(flagged, padded, TRAINED[name][1])
    if "shared" not in name:  # rows of several sizes are more, and smaller
        assert_packed(flagged)


@runs("vpp2-placeholders", "pp2")
def test_placeholders_run_where_they_are_planned(records: list[Ranks]) -> None:
    with_placeholders, without = records
    assert set(batching(with_placeholders, "placeholders")) == {2}
    assert set(batching(without, "placeholders")) == {0}


@runs("pp2-evaluated", "pp2-conversations")
def test_conversations_of_a_row_are_samples_of_their_own(records: list[Ranks]) -> None:
    """And the loss of an evaluation, which stock code takes of rows under ``--sft``, of tokens."""
    padded, flagged = map(last_stage, records)
    for record in flagged:
        steps, expected = record["steps"], padded[0]["steps"]
        assert_close(steps, expected)
        assert_equal(steps, expected, "learning_rate")
        consumed = [each["consumed_samples"] / 2 for each in expected]
        assert [step["consumed_samples"] for step in steps] == consumed
        assert {step["batching"]["truncated"] for step in steps} == {1}
        assert len(record["evaluations"]) == 4
        for losses, expected in zip(record["evaluations"], padded[0]["evaluations"], strict=True):
            assert losses == pytest.approx(expected, rel=LOSS)


@runs("ep2-auxiliary-loss")
def test_routers_losses_are_logged_as_means_over_the_micro_batches_that_ran(
    records: list[Ranks],
) -> None:
    (ranks,) = records
    assert min(batching(ranks, "micro-batches a rank")) > 1
    for step, micro_batches in enumerate(batching(ranks, "micro-batches a rank")):
        routed = [record["steps"][step]["moe"] for record in ranks]
        assert {each["times"] for each in routed} == {micro_batches * LAYERS // 2}
        num_replicas = 2
        mean = sum(each["recorded"] for each in routed) / num_replicas / micro_batches / LAYERS
        for each in routed:
            assert each["reported"] == {"load_balancing_loss": pytest.approx(mean, rel=LOSS)}


@pytest.mark.parametrize(
    "records",
    [
        ("pp2", "vpp2-placeholders", "tp2-cp2", "tp2-staying"),
        # A token counts once, however many ranks share its row.
        pytest.param(("pp2", "pp2-shared", "cp2-shared", "dp4-shared"), marks=pytest.mark.long),
    ],
    ids=["rows of one rank", "rows of several sizes"],
    indirect=True,
)
def test_floating_point_operations_are_counted_of_samples_alone(records: list[Ranks]) -> None:
    """Once, however many ranks and model chunks see a sample; of placeholders and padding none."""
    usual = values(records[0], "tokens")
    for step, tokens in enumerate(usual):
        plan = values(records[0], "batching")[step]
        room = CAP * 2 * plan["micro-batches a rank"]  # of both data-parallel ranks
        assert tokens == pytest.approx(room * plan["fill"], rel=1e-6)
    squares = values(records[0], "squares")
    for ranks in records:
        assert values(ranks, "tokens") == usual[: len(ranks[-1]["steps"])]
        assert values(ranks, "squares") == squares[: len(ranks[-1]["steps"])]


@runs("pp2", "pp2-resumed")
def test_resumed_run_goes_on_as_the_uninterrupted_one(records: list[Ranks]) -> None:
    """Bit for bit: loading restores all there is, and nothing else differs between the two."""
    unsaved, ranks = records
    for rank, record in enumerate(ranks):
        whole, resumed = record["whole"]["steps"], record["resumed"]["steps"]
        assert [step["iteration"] for step in whole] == [1, 2, 3, 4, 5, 6]
        assert [step["iteration"] for step in resumed] == [4, 5, 6]
        names = ("loss", "grad_norm", "learning_rate", "consumed_samples", "tokens")
        assert_equal(resumed, whole[3:], *names)
        # After the last step, and of validation and test data in the end.
        evaluated = record["whole"]["evaluations"]
        assert len(evaluated) == 3
        assert record["resumed"]["evaluations"] == evaluated == unsaved[rank]["evaluations"]
        assert_equal(whole, unsaved[rank]["steps"], "loss")
        assert record["relaunched"]["steps"] == []
        # Megatron's own.
        assert record["relaunched"]["message"].startswith("no samples left to consume")


@runs("pp2", "pp2-rerun")
def test_rerun_step_is_the_same_step(records: list[Ranks]) -> None:
    """Megatron's rerun state machine rewinds its iterators and runs the third step again."""
    usual, ranks = records
    for record, before in zip(last_stage(ranks), last_stage(usual), strict=True):
        counts = [step["batching"]["micro-batches a rank"] for step in before["steps"][:5]]
        counts[2] *= 2
        num_losses = [step["num_losses"] for step in record["steps"]]
        assert num_losses == [*itertools.accumulate(counts)]
        assert_equal(record["steps"], before["steps"][:5], "loss", "grad_norm")


def assert_equal_steps(ranks: Ranks, before: Ranks) -> None:
    """Bit for bit."""
    for record, expected in zip(ranks, before, strict=True):
        assert record["evaluations"] == expected["evaluations"]
        names = ("iteration", "loss", "grad_norm", "consumed_samples", "tokens")
        assert_equal(record["steps"], expected["steps"], *names)


@pytest.mark.parametrize(
    ("records", "count"),
    [
        pytest.param((f"{name}-not-ahead", f"{name}-ahead"), count, id=name, marks=marks)
        for name, count, marks in (
            # Of five steps the first is planned in line.
            ("pp2", 4, ()),
            # Of 2, 2, 4, 4, 8, 8 and 8 samples: but the first of each number.
            ("pp2-ramp-up", 4, pytest.mark.long),
            # The third step, too, when it is run again.
            ("pp2-rerun", 4, pytest.mark.long),
        )
    ],
    indirect=["records"],
)
def test_steps_planned_ahead_are_the_same_steps(records: list[Ranks], count: int) -> None:
    in_turn, ahead = records
    assert_equal_steps(ahead, in_turn)
    # The first rank makes all plans, `count` of them in its worker.
    first, *others = zip(*([record["in_line"] for record in each] for each in records), strict=True)
    assert first[0] - first[1] == count
    assert others == [(0, 0)] * 3
    assert [record["said"] for record in ahead] == [[]] * 4
    # Each was begun while the step before was still to run.
    assert [record["idle"] for record in ahead] == [0] * 4


@runs("pp2-not-ahead", "pp2-early-exit")
def test_an_early_exit_leaves_the_step_that_was_made_ahead(records: list[Ranks]) -> None:
    in_turn, ended = records
    assert [record.pop("error") for record in ended] == ["SystemExit"] * 4
    assert max(record["seconds"] for record in ended) < ERROR_SECONDS
    parts = {"steps": 3, "evaluations": 1}
    until = [{name: each[name][:number] for name, number in parts.items()} for each in in_turn]
    assert_equal_steps(ended, until)


@pytest.mark.long
@runs("thousands-of-steps")
def test_thousands_of_steps_made_ahead_take_no_more_memory(records: list[Ranks]) -> None:
    ranks = records[0]
    assert [record["error"] for record in ranks] == [None] * len(ranks)
    # The first rank alone plans and has a worker. Every step asks for what was made, the first in
    # vain.
    assert [len(record["held"]) for record in ranks] == [20, 0, 0, 0]
    # Until then lengths come for the first time, and the allocator keeps room for them. The kit
    # keeps every step's figures, 2 KiB: 0.4 % of what a rank holds in a thousand steps.
    for at_1000, *_, at_the_end in zip(*ranks[0]["held"][9:], strict=True):
        assert at_the_end < 1.012 * at_1000


ERRORS: dict[str, tuple[int, str, str]] = {
    "loss-raises": (3, "ForwardFailedError", "ArithmeticError: the loss function has had enough"),
    "data-ends": (
        0,
        "PlanningFailedError",
        "StockDataError: the data iterator ended after 0 of 4 micro-batches",
    ),
    # One step ahead, and raised where the sample is drawn.
    "reading-raises": (0, "PlanningFailedError", "OSError: the file is gone"),
}
"""By job: the rank at fault, what all raise, and the cause."""


@pytest.mark.parametrize(
    ("records", "name"), [((name,), name) for name in ERRORS], ids=ERRORS, indirect=["records"]
)
def test_error_on_one_rank_ends_all(records: list[Ranks], name: str) -> None:
    (ranks,), (at_fault, error, cause) = records, ERRORS[name]
    assert [record["error"] for record in ranks] == [error] * 4
    assert len({record["message"] for record in ranks}) == 1
    assert f"rank {at_fault}: {cause}" in ranks[0]["message"]
    assert [record["cause"] != "NoneType" for record in ranks] == [r == at_fault for r in range(4)]
    assert [len(record["steps"]) for record in ranks] == [2] * 4
    assert max(record["seconds"] for record in ranks) < ERROR_SECONDS
