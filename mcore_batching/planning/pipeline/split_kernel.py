"""The passes of `SplitClock`, played one after the other: the loop that takes its time."""

from __future__ import annotations

from mcore_batching.planning.pipeline.compiled import Integers, Numbers, kernel
from mcore_batching.planning.pipeline.passes import PARTS


@kernel
def play(
    program_waits: tuple[Integers, Integers],
    of_passes: tuple[Integers, Integers, Integers, Numbers],
    of_places: tuple[Integers, Numbers, Numbers, Integers, Integers],
    factors: tuple[float, float],
    limit: int,
    plan: tuple[Integers, Integers],
    times: tuple[Numbers, Numbers, Numbers],
    links: tuple[Integers, Integers],
    free: Numbers,
    last: Integers,
) -> None:
    """Starts and ends of all passes, how long a part of W takes and what each pass waits for last;
    the ends of stages, and the last pass of each [ranks * stages]. Parts of -1 in `plan` are
    chosen, and what a split pass would leave then fits, or it is not split. All else that is filled
    is 0 at first."""
    # One function of more than 60 lines: with the queue of W in one of its own, which this calls
    # for each pass, a simulation takes 9 % longer, compiled or not.
    (waits, waits_too), (slots, stage_of, signs, shares) = program_waits, of_passes
    afters, costs, weights, tokens, deferred = of_places
    (weight_share, growth), (split, parts) = factors, plan
    (starts, ends, part), (late, following) = times, links
    ranks = len(split) // len(slots)
    stages = len(free) // ranks
    held = [0 for _ in free]  # tokens of each stage
    first = [0 for _ in free]  # ends of its queue; 0: it is empty
    newest = [0 for _ in free]
    left = [PARTS for _ in free]  # parts of its first entry
    for number in range(1, len(slots)):
        stage, share, place = stage_of[number], shares[number], slots[number] * ranks
        stop = 0
        while stop < ranks:
            rank, stop = stop, afters[place + stop]
            ready, cause = -1.0, 0
            for each in range(rank, stop):
                for before in (waits[number] * ranks + each, waits_too[number] * ranks + each):
                    if ends[before] > ready:
                        ready, cause = ends[before], before
            if stage < 0:
                ends[number * ranks + rank], late[number * ranks + rank] = ready, cause
                continue
            start, longest = ready, 0.0
            for each in range(rank, stop):
                at, own, mine = number * ranks + each, each * stages + stage, place + each
                took = alone = costs[mine] * share
                # Tokens that the stage holds more once this pass is over.
                more = signs[number] * tokens[mine]
                if signs[number] < 0:
                    weight = min(weights[mine] * weight_share, took)  # at most the whole pass
                    alone, part[at] = (took - weight) * growth, weight * (1.0 / PARTS)
                if split[at]:
                    more += deferred[mine]
                given, made = parts[at], 0
                while first[own]:
                    oldest = first[own]
                    if given >= 0:
                        if made >= given:
                            break
                    # One more part would delay the pass, and what this holds fits already.
                    elif free[own] + part[oldest] > ready and (
                        more <= 0 or held[own] + more <= limit
                    ):
                        break
                    free[own] += part[oldest]
                    made += 1
                    left[own] -= 1
                    if left[own] == 0:
                        held[own] -= deferred[slots[oldest // ranks] * ranks + each]
                        first[own] = following[oldest]
                        left[own] = PARTS
                parts[at] = made
                if given < 0 and split[at] and more > 0 and held[own] + more > limit:
                    split[at] = 0
                    more -= deferred[mine]
                held[own] += more
                if free[own] > start:
                    start, cause = free[own], last[own]
                if split[at]:
                    if first[own]:
                        following[newest[own]] = at
                    else:
                        first[own] = at
                    newest[own] = at
                longest = max(longest, alone if split[at] else took)
            for each in range(rank, stop):
                at, own = number * ranks + each, each * stages + stage
                starts[at], late[at] = start, cause
                ends[at] = free[own] = start + longest
                last[own] = at
    for own in range(len(free)):
        while first[own]:
            free[own] += part[first[own]]
            left[own] -= 1
            if left[own] == 0:
                first[own] = following[first[own]]
                left[own] = PARTS
