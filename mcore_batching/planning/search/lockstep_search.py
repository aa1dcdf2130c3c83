"""Plans for expert parallelism, where every slot waits for its slowest rank.

Micro-batches are made slot by slot: the costliest samples left open one slot's micro-batches, one
on each rank, and smaller samples fill all of them up to the costliest, or to the slot's share of
the step where that is more. What a slot loses is then the little that no sample fits into.

Guarantees: every sample is in one micro-batch; the cap holds; a sample over the cap is alone; a
rank has a placeholder only if all of its micro-batches hold one sample.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from mcore_batching.planning.search.best_step import BestStep, Candidate
from mcore_batching.planning.search.lockstep_moves import improve_lockstep
from mcore_batching.planning.search.pipeline_search import (
    MOST_SLOTS_A_STAGE,
    folded_ranks,
    steps_of_counts,
)
from mcore_batching.planning.search.profiles import fill_slots, profile
from mcore_batching.planning.splitting import split_until
from mcore_batching.planning.step_work import Slots, StepWork
from mcore_batching.planning.sums import ordered_sum

MARGINS = (1.02, 1.0, 1.05)
"""How far above its share of the step a slot's micro-batches may be filled."""
TAPERS = ((1, 1), (2, 2), (1, 2), (0, 0), (1, 3))
"""Over how many slots for each stage the slots grow and shrink; the first for every count."""
MOST_COUNTS_REFINED = 4
"""Numbers of slots of which all tapers and margins are tried."""
STRIDE_OF_COUNTS = 4
"""One in so many counts is tried before the ones between them, for what little effort finds."""

Shape = tuple[int, int, int, float]
"""Number of slots, over how many they rise, over how many they fall, margin."""


def search_lockstep(
    work: StepWork, starts: Iterable[Sequence[Sequence[Sequence[int]]]]
) -> list[Slots]:
    """Look for the step whose slots, each as slow as its slowest rank, end first.

    Args:
        work: the step; its effort is used up at most.
        starts: legal plans [ranks][slots]; the result ends no later than any of them.

    Returns:
        every rank's slots, the same number for each.

    Raises:
        InflightBoundError: nothing was found that holds no more tokens in flight than may be.
    """
    best = BestStep(work)

    def end(ranks: list[Slots]) -> float:
        candidate = Candidate(ranks, [lockstep_time(ranks, work)])
        best.consider(candidate)
        return candidate.end

    for start in starts:
        end([[list(samples) for samples in slots] for slots in start])
    counts = _counts(work) if work.costs else []
    folded = folded_ranks(work)
    ranked: list[tuple[float, int]] = []
    for first in range(STRIDE_OF_COUNTS):
        for count in counts[first::STRIDE_OF_COUNTS]:
            if work.spent and best.found:
                break
            shape = _shapes(count, work.dims.pipeline_parallel)[0]
            ends = [end(_laid_out(shape, work))]
            ends += [end(ranks) for ranks in _rank_by_rank(folded, shape, work)]
            ranked.append((min(ends), count))
    # Which counts keep to a bound on tokens in flight has little to do with when they end.
    refined = len(ranked) if work.max_inflight_tokens is not None else MOST_COUNTS_REFINED
    for _, count in sorted(ranked)[:refined]:
        for shape in _shapes(count, work.dims.pipeline_parallel)[1:]:
            if work.spent and best.found:
                break
            end(_laid_out(shape, work))
            if shape[-1] == MARGINS[0]:
                for ranks in _rank_by_rank(folded, shape, work):
                    end(ranks)
    found = best.result()
    improve_lockstep(found.ranks, found.end, work)
    return found.ranks


def lockstep_time(ranks: Sequence[Slots], work: StepWork) -> float:
    """When a step ends in which all ranks run each slot together."""
    costs = [work.slot_costs(slots) for slots in ranks]
    return work.time([max(slot) for slot in zip(*costs, strict=True)])


def _counts(work: StepWork) -> list[int]:
    """Numbers of slots to try: from the fewest that can hold the samples, in steps of a seventh."""
    dims = work.dims
    tokens = sum(padded for i, padded in enumerate(work.tokens) if i not in work.alone)
    fewest = -(-tokens // work.capacity) + len(work.alone)
    count = dims.round_up_num_microbatches(-(-fewest // dims.data_parallel))
    samples_a_rank = -(-len(work.costs) // dims.data_parallel)
    useful = min(samples_a_rank, count + 4)
    if dims.pipeline_parallel > 1:
        useful = min(samples_a_rank, MOST_SLOTS_A_STAGE * dims.pipeline_parallel)
    if work.max_inflight_tokens is not None:
        useful = samples_a_rank
    return steps_of_counts(count, max(useful, count), dims)


def _shapes(count: int, stages: int) -> list[Shape]:
    """Shapes of so many slots, the one that judges the count first."""
    return [
        (count, min(rise * stages, count), min(fall * stages, count), margin)
        for rise, fall in (TAPERS if stages > 1 else ((0, 0),))
        for margin in MARGINS
    ]


def _laid_out(shape: Shape, work: StepWork) -> list[Slots]:
    """A step of about this shape; of other than its number of slots if samples fit no better."""
    count, rise, fall, margin = shape
    share = margin * ordered_sum(work.costs) / work.dims.data_parallel
    sizes = profile(count, rise, fall)
    whole = ordered_sum(sizes)
    limits = [share * size / whole for size in sorted(sizes, reverse=True)]
    rows = _even_rows(_rows(limits, work), work)
    return _onto_ranks(_arranged(rows, rise, fall), work)


def _rank_by_rank(
    samples_of: Sequence[Sequence[int]], shape: Shape, work: StepWork
) -> Iterator[list[Slots]]:
    """The step of ranks that fill slots of the same relative sizes by themselves; nothing if the
    samples of some do not fit."""
    count, rise, fall, _ = shape
    ranks = []
    for samples in samples_of:
        slots = fill_slots(samples, profile(count, rise, fall), work)
        if slots is None:
            return
        ranks.append(slots)
    yield ranks


def _rows(limits: Sequence[float], work: StepWork) -> list[list[list[int]]]:
    """Slots of micro-batches, costliest slot first; the last may have fewer than one a rank.

    Args:
        limits: cost up to which a slot's micro-batches are filled, unless its costliest sample
            costs more [slots], descending; the last goes for all further slots.
        work: the step.
    """
    work.effort -= 4 * len(work.costs)
    costs, tokens, ranks = work.costs, work.tokens, work.dims.data_parallel
    left = sorted((cost, sample) for sample, cost in enumerate(costs))
    rows: list[list[list[int]]] = []
    while left:
        seeds = [left.pop() for _ in range(min(ranks, len(left)))]
        level = max(seeds[0][0], limits[min(len(rows), len(limits) - 1)])
        row = [[sample] for _, sample in seeds]
        for samples, (cost, seed) in sorted(zip(row, seeds, strict=True), key=lambda each: each[1]):
            held = tokens[seed]
            while left and seed not in work.alone:
                best = bisect_right(left, (level - cost, len(costs))) - 1
                while best >= 0 and held + tokens[left[best][1]] > work.capacity:
                    best -= 1
                if best < 0:
                    break
                more, sample = left.pop(best)
                samples.append(sample)
                cost += more
                held += tokens[sample]
        rows.append(row)
    return rows


def _even_rows(rows: list[list[list[int]]], work: StepWork) -> list[list[list[int]]]:
    """As many slots as the schedule runs, every one full if there are samples enough."""
    dims, costs = work.dims, work.costs

    def weight(samples: Sequence[int]) -> float:
        return ordered_sum(costs[sample] for sample in samples)

    ranks = dims.data_parallel
    bins = [sorted(samples) for row in rows for samples in row]
    count = dims.round_up_num_microbatches(-(-len(bins) // ranks))
    if len(bins) < count * ranks:
        bins = split_until(bins, count * ranks, weight)
        bins.sort(key=lambda samples: (-weight(samples), samples))
    return [bins[first : first + ranks] for first in range(0, count * ranks, ranks)]


def _arranged(rows: list[list[list[int]]], rise: int, fall: int) -> list[list[list[int]]]:
    """Slots, given costliest first, where a taper has its larger and smaller ones."""
    count = len(rows)
    sizes = profile(count, min(rise, count), min(fall, count))
    arranged = rows[:]
    places = sorted(range(count), key=lambda place: (-sizes[place], place))
    for place, row in zip(places, rows, strict=True):
        arranged[place] = row
    return arranged


def _onto_ranks(rows: list[list[list[int]]], work: StepWork) -> list[Slots]:
    """Each slot's micro-batches dealt out, the costliest to the rank with the least work so far.

    Slots with too few micro-batches leave placeholders, on the ranks with the most work; a
    placeholder is moved before a rank's last real micro-batch.
    """
    ranks: list[Slots] = [[] for _ in range(work.dims.data_parallel)]
    loads = [0.0] * len(ranks)
    for row in rows:
        lightest = sorted(range(len(ranks)), key=lambda rank: (loads[rank], rank))
        weights = [ordered_sum(work.costs[sample] for sample in samples) for samples in row]
        heaviest = sorted(range(len(row)), key=lambda index: (-weights[index], index))
        for place, rank in enumerate(lightest):
            if place < len(row):
                ranks[rank].append(row[heaviest[place]])
                loads[rank] += weights[heaviest[place]]
            else:
                ranks[rank].append([])
    return [_last_is_real(slots) for slots in ranks]


def _last_is_real(slots: Slots) -> Slots:
    if slots[-1] or not any(slots):
        return slots
    last = max(number for number, samples in enumerate(slots) if samples)
    slots[last], slots[-1] = slots[-1], slots[last]
    return slots
