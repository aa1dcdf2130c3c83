"""Other frameworks' packing rules, written from their description, to compare plans with.

A rule takes one step's `Problem` and returns the micro-batches of each rank, equally many on all.
Sizes are padded tokens, which this package's cap counts. A micro-batch over the cap holds one
sample. Where the framework crashes, asserts or hangs, the rule raises `RuleFailureError`. Tests
hold the rules against the frameworks' own functions.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from mcore_batching.planning import (
    Argument,
    CostModel,
    ParallelDims,
    PlannerConfig,
    PlanningError,
    Problem,
    StepPlan,
    first_fit,
)

Bins = list[list[int]]
"""Samples of each micro-batch, as positions in the problem."""
Rule = Callable[[Problem], list[Bins]]
Sets = list[tuple[int, int, list[int]]]
"""Of each set its sum, its number of items, and these in the order in which they came together."""


class RuleFailureError(PlanningError):
    """Another framework's rule crashes, asserts or hangs on this input."""


def rule_plan(
    rule: Rule,
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
) -> StepPlan:
    """One step as another framework's rule plans it.

    Args:
        rule: one of `RULES`.
        lengths: total length of each sample [samples], in tokens.
        dims: sizes of the parallel groups.
        config: gives cap and padding; the rule has policies of its own.
        cost_model: what the plan is weighed by afterwards; the default one if None.

    Raises:
        RuleFailureError: the framework crashes on this input, there are no samples, or the
            interleaved schedule cannot run the rule's count of micro-batches.
        LengthError: a length is out of range.
        ConfigError: the cap leaves no room for a single token.
    """
    problem = Problem.of(lengths, dims, replace(config, on_oversize="own-bin"), cost_model)
    ranks = rule(problem) if problem.num_samples else []
    return StepPlan(
        micro_batches=tuple(tuple(map(tuple, rank)) for rank in ranks),
        num_microbatches=_legal_count(ranks, dims),
        sample_indices=tuple(range(problem.num_samples)),
        dims=dims,
        config=config,
        cost_model=problem.cost_model,
    )


def first_fit_in_order(problem: Problem) -> list[Bins]:
    """First-fit over all samples in order, dealt round-robin; a sample over the cap runs alone."""
    return _deal(_first_fit(problem), problem.num_ranks)


def slime(problem: Problem) -> list[Bins]:
    """slime since its pull request 1926: pack first, then distribute.

    First-fit over all samples; then the fullest micro-batch of several samples is cut in two,
    longest sample first to the half with fewer tokens, until the count is a multiple of ranks ×
    group. Every rank gets equally many by Karmarkar-Karp over work.
    """
    sizes, bins = problem.tokens, _first_fit(problem)
    multiple = problem.num_ranks * problem.dims.slots_per_group
    while len(bins) % multiple:
        tokens = [sum(sizes[i] for i in samples) for samples in bins]
        fullest = max(range(len(bins)), key=lambda k: (len(bins[k]) > 1, tokens[k], k))
        if len(bins[fullest]) == 1:
            raise _too_few(len(sizes), -(-len(bins) // multiple) * multiple)
        halves: Bins = [[], []]
        for sample in _longest_first(bins[fullest], sizes):
            min(halves, key=lambda half: sum(sizes[i] for i in half)).append(sample)
        bins[fullest], other = halves
        bins.append(other)
    work = [sum(verl_work(problem.lengths[i]) for i in samples) for samples in bins]
    ranks = karmarkar_karp(work, problem.num_ranks, equal_count=True)
    return [[bins[index] for index in rank] for rank in ranks]


def verl(problem: Problem) -> list[Bins]:
    """verl 0.9: samples to ranks, then to micro-batches, each by Karmarkar-Karp over work.

    Every rank gets equally many samples and parts them into ⌈tokens / cap⌉ micro-batches, the most
    of any rank; the count grows by a group until none is over the cap. They run with the costliest
    in the middle.
    """
    _refuse_oversize(problem, "verl asserts that max_token_len is at least the longest sample")
    sizes, cap, group = problem.tokens, problem.capacity, problem.dims.slots_per_group
    work = [verl_work(length) for length in problem.lengths]
    shards = []
    for shard in karmarkar_karp(work, problem.num_ranks, equal_count=True):
        ascending = sorted(shard, key=lambda i: (work[i], i))
        shards.append(ascending[::2] + ascending[1::2][::-1])
    needed = [min(len(shard), -(-sum(sizes[i] for i in shard) // cap)) for shard in shards]
    count, heaviest = -(-max(needed) // group) * group, cap + 1
    while heaviest > cap:
        ranks = [
            [[shard[i] for i in part] for part in karmarkar_karp([work[i] for i in shard], count)]
            for shard in shards
        ]
        heaviest = max(sum(sizes[i] for i in part) for rank in ranks for part in rank)
        count += group
    for rank, shard in zip(ranks, shards, strict=True):
        rank.sort(key=lambda part: (sum(work[i] for i in part), shard.index(part[0])), reverse=True)
        rank[:] = rank[::2][::-1] + rank[1::2]
    return ranks


def verl_work(length: int) -> int:
    """verl's work of a sample of `length` tokens, in units of 1/24576 of a token's."""
    return 24576 * length + length * length


def karmarkar_karp(
    values: Sequence[int], parts: int, *, equal_count: bool = False
) -> list[list[int]]:
    """The largest differencing method, with ties broken as verl and slime break them.

    Partial solutions are rows of sets. The two with the widest spread are merged, the heaviest set
    of one with the lightest of the other, until one is left: 8 7 6 5 4 in two parts give 8 + 6 and
    7 + 5 + 4. Empty sets are not stored: with many parts most are empty.

    Args:
        values: weight of each item [items], 0 or more.
        parts: number of parts.
        equal_count: give every part equally many items.

    Returns:
        indices of each part's items, ascending; heaviest part first.

    Raises:
        RuleFailureError: fewer items than parts, or with `equal_count` items that do not divide.
    """
    if len(values) < parts:
        raise _too_few(len(values), parts)
    if equal_count:
        _refuse_uneven(len(values), parts)

    def entry(sets: Sets) -> tuple[int, int, int, int, Sets]:
        """For the heap: widest spread first, then largest first set."""
        sets.sort(reverse=True)
        total, count, items = sets[0]
        least = sets[-1][0] if len(sets) == parts else 0
        return least - total, -total, -count, -items[0], sets

    ascending = sorted(range(len(values)), key=lambda item: (values[item], item))
    width = parts if equal_count else 1
    heap = [
        entry([(values[item], 1, [item]) for item in ascending[first : first + width]])
        for first in range(0, len(ascending), width)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[-1], heapq.heappop(heap)[-1]
        # Set i of one meets set parts - 1 - i of the other, where neither is empty.
        kept = min(len(one), parts - len(other))
        meet = zip(one[kept:], reversed(other[parts - len(one) :]), strict=True)
        merged = [(a + b, m + n, left + right) for (a, m, left), (b, n, right) in meet]
        heapq.heappush(heap, entry(one[:kept] + other[: parts - len(one)] + merged))
    return [sorted(items) for _, _, items in heap[0][-1]]


def nemo_rl(problem: Problem) -> list[Bins]:
    """NeMo-RL: modified first-fit-decreasing (Johnson and Garey, 1985), dealt round-robin.

    Each item over half a bin opens one, and takes one over a third beside it. Bins without such
    take the smallest item over a sixth and the largest beside it, from the last bin back. Then each
    bin takes the largest items that still fit. What is left goes, longest first, to the emptiest of
    further bins. Items move out of the bins that hold most until ranks divide the count.
    """
    _refuse_oversize(problem, "NeMo-RL's packer raises")
    sizes, cap = problem.tokens, problem.capacity
    items = _longest_first(range(len(sizes)), sizes)
    bins = [[i] for i in items if 2 * sizes[i] > cap]
    room = [cap - sizes[i] for (i,) in bins]
    medium = [i for i in items if 2 * sizes[i] <= cap < 3 * sizes[i]]
    # Equal sizes stay in input order whichever way they are sorted.
    ascending = sorted(items, key=lambda i: (sizes[i], i))
    small = [i for i in ascending if 3 * sizes[i] <= cap < 6 * sizes[i]]

    def put_first(kind: list[int], index: int, order: Iterable[int]) -> None:
        item = next((i for i in order if sizes[i] <= room[index]), None)
        if item is not None:
            kind.remove(item)
            bins[index].append(item)
            room[index] -= sizes[item]

    for index in range(len(bins)):
        put_first(medium, index, medium)
    for index in reversed(range(len(bins))):
        alone = len(bins[index]) == 1 and len(small) > 1
        if alone and sizes[small[0]] + sizes[small[1]] <= room[index]:
            put_first(small, index, small)
            put_first(small, index, reversed(small))
    rest = _longest_first([*medium, *small, *(i for i in ascending if 6 * sizes[i] <= cap)], sizes)
    for index in range(len(bins)):
        for item in rest[:]:
            put_first(rest, index, [item])
    further: list[tuple[int, list[int]]] = []
    for item in rest:
        fits = further and sizes[item] <= cap - further[0][0]
        tokens, samples = further.pop(0) if fits else (0, [])
        filled = tokens + sizes[item], [*samples, item]
        further.insert(bisect_right(further, filled[0], key=lambda each: each[0]), filled)
    bins += [samples for _, samples in further]
    by_count = sorted(range(len(bins)), key=lambda i: (-len(bins[i]), -i))
    return _deal(_moved_out(bins, by_count, problem.num_ranks), problem.num_ranks)


def areal(problem: Problem) -> list[Bins]:
    """AReaL: longest sample first to the rank with fewest tokens, equally many samples to each.

    On a rank, longest first, a sample opens a micro-batch until there are a minimum, twice the
    stages in a pipeline. After that it goes, of those with room, to the one with the fewest
    samples, the emptiest on a tie. The minimum is raised to a multiple of the stages, and to the
    most of any rank, until all ranks have the same count.
    """
    _refuse_oversize(problem, "AReaL's packer raises")
    sizes, ranks, stages = problem.tokens, problem.num_ranks, problem.dims.pipeline_parallel
    _refuse_uneven(len(sizes), ranks)
    shards: Bins = [[] for _ in range(ranks)]
    for sample in _longest_first(range(len(sizes)), sizes):
        with_place = [shard for shard in shards if len(shard) < len(sizes) // ranks]
        min(with_place, key=lambda shard: sum(sizes[i] for i in shard)).append(sample)

    def packed(shard: list[int], minimum: int) -> Bins:
        bins: Bins = []
        filled: list[tuple[int, int]] = []
        for sample in shard:
            tokens, index = sizes[sample], len(bins)
            if index >= minimum and filled[0][0] + tokens <= problem.capacity:
                with_room = bisect_right(filled, (problem.capacity - tokens, len(sizes)))
                place = min(range(with_room), key=lambda j: len(bins[filled[j][1]]))
                held, index = filled.pop(place)
                tokens += held
            else:
                bins.append([])
            insort(filled, (tokens, index))
            bins[index].append(sample)
        return sorted(map(sorted, bins))

    minimum, packs = 2 * stages if stages > 1 else 1, list[Bins]()
    while not packs or min(map(len, packs)) < minimum:
        packs = []
        for shard in shards:
            least = minimum
            while len(shard) >= least and len(bins := packed(shard, least)) % stages:
                least += stages - least % stages
            if len(shard) < least:
                raise _too_few(len(shard), least)
            packs.append(bins)
        minimum = max(map(len, packs))
    return packs


def megatron_dp_balanced(problem: Problem) -> list[Bins]:
    """Megatron-Core's `dp_balanced`: close a micro-batch once the next sample does not fit.

    The count is made a multiple of ranks × group by moving samples off the end, then dealt.
    """
    _refuse_oversize(
        problem, "Megatron-Core's scheduler packs it regardless, or an empty row first"
    )
    bins: Bins = []
    room = -1
    for sample, size in enumerate(problem.tokens):
        if size > room:
            bins.append([])
            room = problem.capacity
        bins[-1].append(sample)
        room -= size
    multiple = problem.num_ranks * problem.dims.slots_per_group
    return _deal(_moved_out(bins, range(len(bins))[::-1], multiple), problem.num_ranks)


def trl_best_fit(problem: Problem) -> list[Bins]:
    """TRL's packing: longest first into the fullest micro-batch with room, that which got so full
    first on a tie. Dealt round-robin, with empty ones where TRL's data loader would repeat some.
    """
    _refuse_oversize(problem, "TRL cuts it, losing tokens, or splits it in two samples")
    bins: Bins = []
    # Room of each micro-batch, number of its last sample, samples; ascending.
    open_bins: list[tuple[int, int, list[int]]] = []
    for number, item in enumerate(_longest_first(range(problem.num_samples), problem.tokens)):
        size = problem.tokens[item]
        place = bisect_left(open_bins, (size,))
        if place < len(open_bins):
            room, _, samples = open_bins.pop(place)
        else:
            room, samples = problem.capacity, []
            bins.append(samples)
        samples.append(item)
        insort(open_bins, (room - size, number, samples))
    return _deal(bins, problem.num_ranks)


RULES: dict[str, Rule] = {
    "first-fit in order": first_fit_in_order,
    "slime": slime,
    "verl 0.9": verl,
    "NeMo-RL": nemo_rl,
    "AReaL": areal,
    "Megatron dp_balanced": megatron_dp_balanced,
    "TRL best-fit": trl_best_fit,
}
"""All rules without dynamic CP, in the order in which tables list them."""


@dataclass
class Group:
    """Ranks that share samples in one slot of Megatron's dynamic CP."""

    size: int
    samples: list[int] = field(default_factory=list)
    work: float = 0.0
    """Of each rank: L²/size for each sample."""
    tokens: float = 0.0
    """Of each rank."""

    def add(self, sample: int, length: int) -> None:
        """Put a sample on all ranks of the group."""
        self.samples.append(sample)
        self.work += length * length / self.size
        self.tokens += length / self.size


def megatron_dynamic_slots(lengths: Sequence[int], ranks: int, cap: int) -> list[list[Group]]:
    """Megatron's `default_dynamic_cp` of its dev branch: the groups of each slot.

    One slot after the other is formed of the samples that are left, longest first. While ranks are
    left without samples, the first of the smallest groups takes as many again and moves those
    behind it up; where that cannot be done all ranks form one group, of the samples left in order
    as far as they fit.

    Args:
        lengths: total length of each sample [samples], in tokens.
        ranks: data- and context-parallel ones.
        cap: most tokens of a rank.

    Raises:
        RuleFailureError: a sample needs more ranks than there are, or ranks cannot be filled.
    """
    left, slots = _longest_first(range(len(lengths)), lengths), []
    while left:
        groups = _formed_groups(left, lengths, ranks, cap)
        while (used := sum(group.size for group in groups)) < ranks:
            if not _widened(groups, ranks, used):
                groups = [Group(ranks)]
                for sample in left:
                    if groups[0].tokens + lengths[sample] / ranks <= cap:
                        groups[0].add(sample, lengths[sample])
        slots.append(groups)
        placed = {sample for group in groups for sample in group.samples}
        left = [sample for sample in left if sample not in placed]
    return slots


def _formed_groups(
    left: Sequence[int], lengths: Sequence[int], ranks: int, cap: int
) -> list[Group]:
    """Groups of one slot, before all ranks have samples.

    The longest sample opens a group of as few ranks as it needs, a power of two. Each other one
    joins a group of as many as it needs or more, or opens one: where the costliest rank of the slot
    has least work, smaller groups before larger, and groups that are there before new ones.
    """
    # Work of a rank full of samples as long as the longest, and 5 % more; beyond it samples wait.
    most = lengths[left[0]] * cap * 1.05
    groups: list[Group] = []
    for sample in left:
        length, size = lengths[sample], 1
        while length > size * cap:
            size *= 2
        if size > ranks:
            raise RuleFailureError(
                f"Megatron's dynamic CP raises where a sample of {length} tokens needs more than "
                f"the {ranks} ranks; set max_tokens_per_gpu to {-(-length // ranks)} or more"
            )
        free = ranks - sum(group.size for group in groups)
        best: tuple[float, Group] | None = None
        while size <= ranks:
            shared = [g for g in groups if g.size == size and g.tokens + length / size <= cap]
            for group in [*shared, Group(size)] if size <= free else shared:
                highest = max([group.work + length * length / size, *(g.work for g in groups)])
                allowed = highest <= most or not groups
                if allowed and (best is None or highest < best[0]):
                    best = highest, group
            size = 2 * size if groups else ranks + 1
        if best is not None:
            groups += [] if best[1].samples else [best[1]]
            best[1].add(sample, length)
    return groups


def _widened(groups: list[Group], ranks: int, used: int) -> bool:
    """Give the first of the smallest groups that has room behind it as many ranks again; False if
    none has."""
    smallest = min(group.size for group in groups)
    more = min(smallest, ranks - smallest)
    after = 0
    for group in groups:
        after += group.size
        if group.size == smallest and after + more <= ranks:
            if more > ranks - used and after < used:
                raise RuleFailureError(
                    f"Megatron's dynamic CP moves ranks beyond the last of {ranks}; use 2, 4, 8 …"
                )
            group.size += more
            return True
    return False


def megatron_dynamic_plan(
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
) -> StepPlan:
    """`rule_plan` of Megatron's rule for dynamic CP, which knows no largest size. A slot's larger
    groups come first, so that each begins at a multiple of its size.

    Raises:
        RuleFailureError: a group of a size that rows cannot have on so many ranks, as 2 of 3.
    """
    ranks = dims.data_context_parallel
    lengths = [max(1, length) for length in lengths]
    slots = megatron_dynamic_slots(lengths, ranks, config.max_tokens_per_gpu)
    odd = {group.size for groups in slots for group in groups} - {*dims.row_sizes(ranks)}
    if odd:
        raise RuleFailureError(f"a row on {min(odd)} of {ranks} ranks does not divide them")
    # Samples and size of each rank's micro-batch [slots][ranks].
    rows = [
        [
            (tuple(sorted(group.samples)), group.size)
            for group in sorted(groups, key=lambda group: -group.size)
            for _ in range(group.size)
        ]
        for groups in slots
    ]
    of_ranks = list(zip(*rows, strict=True))
    return StepPlan(
        micro_batches=tuple(tuple(samples for samples, _ in rank) for rank in of_ranks),
        num_microbatches=_legal_count(of_ranks, dims),
        sample_indices=tuple(range(len(lengths))),
        dims=dims,
        config=replace(config, max_context_parallel=ranks),
        context_parallel=tuple(tuple(size for _, size in rank) for rank in of_ranks),
        cost_model=cost_model or CostModel(),
    )


def _first_fit(problem: Problem) -> Bins:
    """In the order of the samples; one over the cap fills a bin by itself."""
    return first_fit([min(size, problem.capacity) for size in problem.tokens], problem.capacity)


def _longest_first(samples: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Equal sizes stay in their order."""
    return sorted(samples, key=lambda i: -sizes[i])


def _moved_out(bins: Bins, order: Sequence[int], multiple: int) -> Bins:
    """Bins made a multiple by moving last samples into bins of their own, as `order` names bins."""
    target = -(-len(bins) // multiple) * multiple
    if sum(map(len, bins)) < target:
        raise _too_few(sum(map(len, bins)), target)
    further: Bins = []
    for index in order:
        while len(bins[index]) > 1 and len(bins) + len(further) < target:
            further.append([bins[index].pop()])
    return bins + further


def _deal(bins: Bins, ranks: int) -> list[Bins]:
    """Micro-batches dealt round-robin to ranks, with empty ones at the end to even out counts."""
    count = -(-len(bins) // ranks)
    return [[*bins[rank::ranks], []][:count] for rank in range(ranks)]


def _legal_count(ranks: Sequence[Sequence[object]], dims: ParallelDims) -> int:
    """Micro-batches of each rank, if the schedule can run so many."""
    if not ranks:
        raise RuleFailureError("no rule plans a step without samples; pass one or more")
    count = len(ranks[0])
    if not dims.is_legal_num_microbatches(count):
        raise RuleFailureError(
            f"the interleaved schedule with groups of {dims.group_size} cannot run {count} "
            f"micro-batches per rank; the next count that it can is "
            f"{dims.round_up_num_microbatches(count)}"
        )
    return count


def _refuse_oversize(problem: Problem, how: str) -> None:
    """Raise for rules that run no sample over the cap; `how` says what the framework does then."""
    if problem.oversize:
        raise RuleFailureError(
            f"a sample of {max(problem.tokens)} tokens is over the cap of {problem.capacity}: "
            f"{how}; set ",
            Argument("max_tokens_per_gpu"),
            " so that every sample fits",
        )


def _refuse_uneven(samples: int, parts: int) -> None:
    if samples % parts:
        raise RuleFailureError(
            f"{samples} samples do not divide by {parts}; pass a multiple of {parts}"
        )


def _too_few(samples: int, rows: int) -> RuleFailureError:
    return RuleFailureError(
        f"{samples} samples cannot fill {rows} micro-batches; pass {rows} or more"
    )
