"""Plans for expert parallelism, where every slot waits for its slowest rank.

Micro-batches are made slot by slot: the costliest samples left open one slot's micro-batches, one
on each rank, and smaller samples fill the others up to the costliest. What a slot loses is then
the little that no sample fits into.

Guarantees: every sample is in one micro-batch; the cap holds; a sample over the cap is alone; a
rank has a placeholder only if all of its micro-batches hold one sample.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from mcore_batching.planning.candidates import BestStep, Candidate
from mcore_batching.planning.splitting import split_until
from mcore_batching.planning.step_work import Slots, StepWork
from mcore_batching.planning.sums import ordered_sum

LEVELS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.0)
"""How far micro-batches are filled at least, relative to the costliest sample of the step."""


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
        ConfigError: nothing was found that holds no more tokens in flight than may be.
    """
    best = BestStep(work)
    for start in starts:
        ranks = [[list(samples) for samples in slots] for slots in start]
        best.consider(Candidate(ranks, [lockstep_time(ranks, work)]))
    for ranks in _candidates(work):
        best.consider(Candidate(ranks, [lockstep_time(ranks, work)]))
    return best.result().ranks


def lockstep_time(ranks: Sequence[Slots], work: StepWork) -> float:
    """When a step ends in which all ranks run each slot together."""
    costs = [work.slot_costs(slots) for slots in ranks]
    return work.time([max(slot) for slot in zip(*costs, strict=True)])


def _candidates(work: StepWork) -> Iterator[list[Slots]]:
    """Plans of different fill, each in descending and in tapered order of slots."""
    if not work.costs:
        return
    stages = work.layout.pipeline_parallel
    costliest = max(work.costs)
    for level in LEVELS:
        rows = _even_rows(_rows(level * costliest, work), work)
        for number_of_small in sorted(
            {0, min(stages, len(rows) // 3), min(2 * stages, len(rows) // 3)}
        ):
            if work.spent:
                return
            yield _onto_ranks(_tapered(rows, number_of_small), work)


def _rows(limit: float, work: StepWork) -> list[list[list[int]]]:
    """Slots of micro-batches, costliest slot first; the last may have fewer than one a rank."""
    costs, tokens, ranks = work.costs, work.tokens, work.layout.data_parallel
    left = sorted((cost, sample) for sample, cost in enumerate(costs))
    rows = []
    while left:
        seeds = [left.pop() for _ in range(min(ranks, len(left)))]
        level = max(seeds[0][0], limit)
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
    layout, costs = work.layout, work.costs

    def weight(samples: Sequence[int]) -> float:
        return ordered_sum(costs[sample] for sample in samples)

    ranks = layout.data_parallel
    bins = [sorted(samples) for row in rows for samples in row]
    count = layout.round_up_num_microbatches(-(-len(bins) // ranks))
    if len(bins) < count * ranks:
        bins = split_until(bins, count * ranks, weight)
        bins.sort(key=lambda samples: (-weight(samples), samples))
    return [bins[first : first + ranks] for first in range(0, count * ranks, ranks)]


def _tapered(rows: list[list[list[int]]], number_of_small: int) -> list[list[list[int]]]:
    """Cheap slots first and last: `number_of_small` before the costly ones, ascending."""
    if number_of_small == 0:
        return rows
    tail = rows[-2 * number_of_small :]
    return [*reversed(tail[0::2]), *rows[: -2 * number_of_small], *tail[1::2]]


def _onto_ranks(rows: list[list[list[int]]], work: StepWork) -> list[Slots]:
    """Each slot's micro-batches dealt out, the costliest to the rank with the least work so far.

    Slots with too few micro-batches leave placeholders, on the ranks with the most work; a
    placeholder is moved before a rank's last real micro-batch.
    """
    ranks: list[Slots] = [[] for _ in range(work.layout.data_parallel)]
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
