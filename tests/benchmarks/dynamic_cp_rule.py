"""Megatron's rule for dynamic CP, `default_dynamic_cp` of its dev branch.

4 ranks, cap 50, samples of 100, 90, 60, 8 and 6 tokens      slot 0   [100]×2  [90]×2
                                                             slot 1   [60]×2   [8]  [6]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from other_rules import longest_first

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, StepPlan
from mcore_batching.planning.errors import named
from mcore_batching.tools.rules import RuleFailureError, legal_count


@dataclass
class Group:
    """Ranks that share samples in one slot."""

    size: int  # number of ranks
    samples: list[int] = field(default_factory=list)
    work: float = 0.0  # of each rank: L²/size, added up over samples
    tokens: float = 0.0  # of each rank

    def add(self, sample: int, length: int) -> None:
        """Put a sample on all ranks of the group."""
        self.samples.append(sample)
        self.work += length * length / self.size
        self.tokens += length / self.size


def megatron_dynamic_slots(lengths: Sequence[int], ranks: int, cap: int) -> list[list[Group]]:
    """The groups of each slot, formed slot after slot of the samples that are left, longest first.

    ``ranks`` are data- and context-parallel ones, of which each holds ``cap`` tokens.
    """
    left, slots = longest_first(range(len(lengths)), lengths), []
    while left:
        groups = _formed_groups(left, lengths, ranks, cap)
        # Megatron leaves no rank idle in a slot: groups grow until they take all ranks.
        while (used := sum(group.size for group in groups)) < ranks:
            _widen(groups, ranks, used)
        slots.append(groups)
        placed = {sample for group in groups for sample in group.samples}
        left = [sample for sample in left if sample not in placed]
    return slots


def _formed_groups(
    left: Sequence[int], lengths: Sequence[int], ranks: int, cap: int
) -> list[Group]:
    """Groups of one slot, before all ranks have samples.

    The longest sample opens a group of as few ranks as it needs, a power of two. Each other one
    goes where the costliest rank of the slot then has least work.
    """
    # Work of a rank full of samples as long as the longest, and 5 % more (Megatron's own factor);
    # a sample that would exceed it waits for a later slot.
    most = lengths[left[0]] * cap * 1.05
    groups: list[Group] = []
    for sample in left:
        length = lengths[sample]
        sizes = [2**n for n in range(ranks.bit_length()) if 2**n <= ranks and length <= cap * 2**n]
        if not sizes:
            raise RuleFailureError(
                f"Megatron's dynamic CP raises: {length} tokens need more than {ranks} ranks; set "
                f"{named('max_tokens_per_gpu')} to {-(-length // ranks)} or more"
            )
        free = ranks - sum(group.size for group in groups)
        places: list[Group] = []
        for size in sizes if groups else sizes[:1]:
            places += [g for g in groups if g.size == size and g.tokens + length / size <= cap]
            places += [Group(size)] if size <= free else []
        # The first of equals, so smaller groups win over larger, and those that are there over new.
        works = [
            max([g.work + length * length / g.size, *(h.work for h in groups)]) for g in places
        ]
        if works and (not groups or min(works) <= most):
            group = places[works.index(min(works))]
            groups += [] if group.samples else [group]
            group.add(sample, length)
    return groups


def _widen(groups: list[Group], ranks: int, used: int) -> None:
    """Double the first of the smallest groups that has room behind it."""
    smallest = min(group.size for group in groups)
    more = min(smallest, ranks - smallest)
    after = 0
    for group in groups:
        after += group.size
        if group.size == smallest and after + more <= ranks:
            # Megatron moves the groups behind it up by `more`, past the last rank if need be.
            if more <= ranks - used or after == used:
                group.size += more
                return
            break
    raise RuleFailureError(
        f"groups of Megatron's dynamic CP do not fill {ranks} ranks; use 2, 4, 8 …"
    )


def megatron_dynamic_plan(
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
) -> StepPlan:
    """One step as Megatron's rule plans it; arguments as for `rule_plan`."""
    # The rule knows no largest size: any row may be spread over all ranks.
    ranks = dims.data_context_parallel
    lengths = [max(1, length) for length in lengths]
    slots = megatron_dynamic_slots(lengths, ranks, config.max_tokens_per_gpu)
    odd = {group.size for groups in slots for group in groups} - {*dims.row_sizes(ranks)}
    if odd:
        raise RuleFailureError(f"a row on {min(odd)} of {ranks} ranks does not divide them")
    # Samples and size of each rank's micro-batch [slots][ranks]. A slot's larger groups come first,
    # so that each begins at a multiple of its size, as plans here must.
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
        num_microbatches=legal_count(of_ranks, dims),
        sample_indices=tuple(range(len(lengths))),
        dims=dims,
        config=replace(config, max_context_parallel=ranks),
        context_parallel=tuple(tuple(size for _, size in rank) for rank in of_ranks),
        cost_model=cost_model or CostModel(),
    )
