"""What transfers between pipeline stages cost, learnt without clocks that agree.

Of neighbouring stages each knows its own clock alone. Differences on either do:

    stage s        [F]..........................[B]     B's start - F's end
    stage s + 1         [F]................[B]          B's end   - F's start
                     ^                        ^
                     the first difference less the second: two transfers, and what a receiver made
                     them wait for by being busy

Each is at least as long as a transfer twice; so is, but for one transfer, the time that a receiver
stood idle before its pass, and that is the whole of it where the transfer had to wait. Hence under
1F1B, whose transfers begin when both stages are free, the least of the three is a transfer's time.
An interleaved stage receives while it runs another pass: there the first one counts, and only
where both receivers stood idle that long, so that neither made a transfer wait.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mcore_batching.planning.cost import CostModel
from mcore_batching.planning.cost_fit import MOST_SECONDS, anchored_solution, best_scale
from mcore_batching.planning.damping import damped, has_changed, last_two
from mcore_batching.planning.errors import ConfigError
from mcore_batching.planning.parallel_dims import ParallelDims

ANCHOR = 0.005
"""Weight of the cost before over that of the window's transfers."""
_NO_OUTLIER = 0.1
"""Share of a row's passes: transfers are not off by what is a small part of even this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Time of a transfer of one row from a stage to its neighbour.

    Raises:
        ConfigError: a time is negative or not finite.
    """

    seconds: float = 0.0
    """Whatever it holds."""
    seconds_per_token: float = 0.0
    """Of the row, on each rank that shares it."""

    def __post_init__(self) -> None:
        """Check that times are finite and 0 or more."""
        for value in (self.seconds, self.seconds_per_token):
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ConfigError(
                    f"learnt times of transfers must be finite and 0 or more, got {value!r}; start "
                    "without what was learnt"
                )

    def time(self, tokens: float) -> float:
        """Of a row with so many tokens, in seconds."""
        return self.seconds + self.seconds_per_token * tokens


@dataclass(frozen=True, slots=True)
class TimedTransfer:
    """A measured transfer.

    Attributes:
        link: the stage before it.
        tokens: of its row, on each rank; more than 0.
        seconds: that it took.
    """

    link: int
    tokens: float
    seconds: float


def time_of_transfer(round_trip: float, idle: float, *, overlapped: bool) -> float | None:
    """Time of a transfer, forward or backward; None where it cannot be told.

    Args:
        round_trip: the difference of the two stages' differences, in seconds.
        idle: the shorter time that a receiver stood idle before its pass, and waited for nothing it
            had sent.
        overlapped: stages receive while they run other passes.
    """
    if not (abs(round_trip) <= MOST_SECONDS and abs(idle) <= MOST_SECONDS):
        return None
    if overlapped and idle < round_trip / 2:
        return None
    return max(0.0, min(round_trip / 2, idle))


def exposed(dims: ParallelDims) -> float:
    """Transfers for each row of a stage that no pass hides, nearly.

    Under 1F1B a stage waits for both of a row with each neighbour, for one that goes out and one
    that comes in at a time: for 2, the first and the last stage for 1. The interleaved schedule
    waits in each chunk for what it sends forward. Where rows or schedules leave stages idle, idle
    time hides some; equal rows on many stages pay up to a third more.
    """
    stages, chunks = dims.pipeline_parallel, dims.virtual_pipeline
    return float(chunks) if chunks > 1 else 2.0 * (stages - 1) / stages


def with_transfers(
    model: CostModel, transfers: Sequence[Transfer], seconds_per_unit: float, dims: ParallelDims
) -> CostModel:
    """A cost model whose passes take longer by the transfers that a stage waits for.

    Args:
        model: of passes alone.
        transfers: between neighbours [links].
        seconds_per_unit: of the model.
        dims: gives the schedule.
    """
    share = exposed(dims) / (seconds_per_unit * (1.0 + model.backward_ratio))
    fixed = _slowest([each.seconds for each in transfers])
    per_token = _slowest([each.seconds_per_token for each in transfers])
    return replace(
        model,
        linear=model.linear + share * per_token,
        per_micro_batch=model.per_micro_batch + share * fixed,
    )


def _slowest(of_links: Sequence[float]) -> float:
    """Of the stages, which exchange with one neighbour after the other: they hold up the others."""
    of_stages = [(one + other) / 2 for one, other in itertools.pairwise(of_links)]
    return max(of_stages or of_links, default=0.0)


def learnt_transfers(
    before: Sequence[Transfer],
    steps: Sequence[Sequence[TimedTransfer]],
    links: int,
    model: CostModel,
    seconds_per_unit: float,
) -> tuple[Transfer, ...]:
    """Transfers of each link after another step; those before if none was timed.

    Args:
        before: of each link; empty: nothing was learnt.
        steps: transfers of the last steps, the newest step last.
        links: of the pipeline.
        model: what passes cost.
        seconds_per_unit: of the model.
    """
    all_timed = [each for step in steps for each in step]
    if not all_timed:
        return tuple(before)
    per_unit = seconds_per_unit * (1.0 + model.backward_ratio)

    def passes(tokens: float) -> float:
        return per_unit * (model.per_micro_batch + model.linear * tokens)

    def of(chosen: Sequence[int]) -> list[list[TimedTransfer]]:
        return [[each for each in step if each.link in chosen] for step in steps]

    # One that nobody timed takes after the others.
    usual = _refitted(None, of(range(links)), passes)
    made = []
    for link in range(links):
        known, timed = before[link] if before else None, of([link])
        made.append(_refitted(known, timed, passes) if any(timed) else usual)
    return tuple(made)


def _refitted(
    before: Transfer | None,
    steps: Sequence[Sequence[TimedTransfer]],
    passes: Callable[[float], float],
) -> Transfer:
    """A transfer after another step.

    Args:
        before: the transfer before; None: nothing was known.
        steps: times of transfers, at least one.
        passes: time of both passes of a row with so many tokens.
    """

    def compared(known: Transfer) -> list[list[tuple[TimedTransfer, float, float]]]:
        return [[_compared(each, known, passes(each.tokens)) for each in step] for step in steps]

    if before is None or has_changed(compared(before)):
        # Nobody knows what is slow among them: the median does not mind.
        steps = last_two(steps)
        before = _scaled(before or Transfer(), [each for step in steps for each in step])
    return _fitted(before, damped(compared(before)))


def _compared(
    timed: TimedTransfer, known: Transfer, passes: float
) -> tuple[TimedTransfer, float, float]:
    """A transfer, what it is off by in proportion to, and how far it is off."""
    expected = known.time(timed.tokens)
    scale = max(expected, _NO_OUTLIER * passes)
    return timed, scale, 1.0 + (timed.seconds - expected) / scale


def _scaled(before: Transfer, timed: Sequence[TimedTransfer]) -> Transfer:
    """A transfer times the factor that suits half of these."""
    shape = _shape(before)
    factor = statistics.median_low(each.seconds / shape.time(each.tokens) for each in timed)
    return Transfer(
        seconds=factor * shape.seconds, seconds_per_token=factor * shape.seconds_per_token
    )


def _shape(of: Transfer) -> Transfer:
    """A transfer by its proportions; one that is nothing has none, and goes by tokens."""
    return of if of.seconds or of.seconds_per_token else Transfer(seconds_per_token=1.0)


def _fitted(
    before: Transfer, timed: Sequence[tuple[float, TimedTransfer, float, float]]
) -> Transfer:
    """The transfer that suits its link's times; what they cannot tell apart stays."""
    matrix, right = [[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0]
    for weight, each, scale, _ in timed:
        x = (1.0 / scale, each.tokens / scale)
        for i in range(2):
            right[i] += weight * x[i] * each.seconds / scale
            for j in range(2):
                matrix[i][j] += weight * x[i] * x[j]
    # Only the proportion is held on to.
    shape = [_shape(before).seconds, _shape(before).seconds_per_token]
    scale = best_scale(matrix, right, shape)
    guess = [scale * each for each in shape]
    seconds, per_token = anchored_solution(matrix, right, guess, ANCHOR)
    return Transfer(seconds=seconds, seconds_per_token=per_token)
