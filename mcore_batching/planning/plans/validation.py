"""A plan checked against the invariants, by whatever it was made; no check calls the planner.

A plan that passes
- covers every sample exactly once;
- keeps every micro-batch to the cap and to `max_samples_per_row`;
- has the samples of a prefix tree in one micro-batch, of as many tokens as they may share;
- gives every rank the same number of micro-batches, one that the schedule can run;
- has no placeholder on a rank that could split a micro-batch, but under `fill="placeholder"`;
- under dynamic CP: ranks that share a row of size c are a block from a multiple of c on and list
  the same samples; a placeholder has size 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from mcore_batching.planning.config import padded_row_tokens, padded_sample_tokens
from mcore_batching.planning.errors import InvariantError, shortened
from mcore_batching.planning.integers import check_lengths
from mcore_batching.planning.plans.plan import Plan, StepPlan

Broken = Callable[..., InvariantError]
"""Makes the error of a broken invariant, with the number of the step where there are several."""


def validate_plan(plan: Plan | StepPlan, lengths: Sequence[int]) -> None:
    """Check a plan, or one step of it, by whatever it was made.

    Args:
        plan: of a batch, or of a step; not changed.
        lengths: total length of each sample of the whole batch [samples], in tokens, as those that
            the plan was made from.

    Raises:
        InvariantError: the first broken invariant found, with step, rank, slot and samples; also
            where there are other lengths than the plan has samples.
        LengthError: a length is no integer from 0 to `MAX_LENGTH_TOKENS`.
    """
    lengths = check_lengths(lengths)
    if isinstance(plan, StepPlan):
        _validate_step(plan, lengths, InvariantError)
        return
    if len(lengths) != plan.num_samples:
        raise InvariantError(
            "exact cover",
            f"{plan.num_samples} samples, but {len(lengths)} lengths; pass those it was made from",
        )
    # Blocks first: `_placed` counts a shared row at its first rank, where blocks are sound.
    for index, step in enumerate(plan.steps):
        _check_blocks(step, partial(InvariantError, step=index))
    found = [sample for step in plan.steps for sample in _placed(step)]
    _check_cover(found, range(plan.num_samples), "in the plan", InvariantError)
    for index, step in enumerate(plan.steps):
        _validate_step(step, lengths, partial(InvariantError, step=index))


def _validate_step(step: StepPlan, lengths: Sequence[int], broken: Broken) -> None:
    beyond = [sample for sample in step.sample_indices if sample >= len(lengths)]
    if beyond:
        raise broken(
            "exact cover",
            f"samples {shortened(beyond)} have none of the {len(lengths)} lengths; pass those of "
            "the whole batch",
            indices=tuple(beyond),
        )
    if list(step.sample_indices) != sorted(set(step.sample_indices)):
        raise broken("exact cover", "the samples that the step must cover do not ascend")
    _check_blocks(step, broken)
    _check_cover(_placed(step), step.sample_indices, "in the step", broken)
    _check_equal_count(step, broken)
    _check_trees(step, lengths, broken)
    _check_cap(step, lengths, broken)
    if step.config.fill == "split":
        _check_split_before_placeholder(step, broken)


def _placed(step: StepPlan) -> list[int]:
    return [sample for row in step.rows() for sample in row.samples]


def _check_blocks(step: StepPlan, broken: Broken) -> None:
    """Check that all ranks of a block list the same micro-batch, so that it is counted once."""
    sizes, most = step.context_parallel, step.config.max_context_parallel
    if (sizes is None) != (most is None):
        raise broken(
            "blocks",
            f"max_context_parallel={most}, but context-parallel sizes are "
            f"{'left out' if sizes is None else 'given'}",
        )
    if sizes is None or most is None:
        return
    _check_equal_count(step, broken)  # else the indices below may not exist
    if [len(of_rank) for of_rank in sizes] != [step.num_microbatches] * len(step.micro_batches):
        raise broken("blocks", "there must be a size for each micro-batch")
    legal = step.dims.row_sizes(most)
    for rank, of_rank in enumerate(sizes):
        for slot, size in enumerate(of_rank):
            samples = step.micro_batches[rank][slot]
            # The block that the row should be on begins at a multiple of its size.
            first = rank // size * size if size in legal else rank
            if size not in legal:
                fault = f"the context-parallel size {size} is none of {shortened(legal)}"
            elif size > 1 and not samples:
                fault = f"a placeholder has the context-parallel size {size}, expected 1"
            elif sizes[first][slot] != size or step.micro_batches[first][slot] != samples:
                fault = f"it must share what rank {first} has there, {size} ranks in all"
            elif rank == first and any(
                sizes[other][slot] != size for other in range(first, first + size)
            ):
                fault = f"ranks {first} to {first + size - 1} must share its micro-batch"
            else:
                continue
            raise broken("blocks", fault, indices=samples, rank=rank, slot=slot)


def _check_cover(found: Sequence[int], expected: Sequence[int], where: str, broken: Broken) -> None:
    # In the order of what harms most: trained twice, not at all, or taken from elsewhere.
    counts = Counter(found)
    wanted = set(expected)
    doubled = sorted(sample for sample, count in counts.items() if count > 1)
    missing = sorted(wanted - counts.keys())
    extra = sorted(counts.keys() - wanted)
    for samples, fault in (
        (doubled, "more than once"),
        (missing, "not at all"),
        (extra, "though they are not part of it"),
    ):
        if samples:
            raise broken(
                "exact cover",
                f"samples {shortened(samples)} are {where} {fault}",
                indices=tuple(samples),
            )


def _check_equal_count(step: StepPlan, broken: Broken) -> None:
    dims = step.dims
    ranks = step.config.num_ranks(dims)
    if len(step.micro_batches) != ranks:
        is_dynamic = step.config.max_context_parallel is not None
        kind = "data- and context-parallel" if is_dynamic else "data-parallel"
        raise broken(
            "equal count",
            f"the layout has {ranks} {kind} ranks, the plan {len(step.micro_batches)}",
        )
    for rank, micro_batches in enumerate(step.micro_batches):
        if len(micro_batches) != step.num_microbatches:
            raise broken(
                "equal count",
                f"every rank must have {step.num_microbatches} micro-batches, "
                f"this one has {len(micro_batches)}",
                indices=tuple(sample for samples in micro_batches for sample in samples),
                rank=rank,
            )
    if not dims.is_legal_num_microbatches(step.num_microbatches):
        raise broken(
            "equal count",
            f"the interleaved schedule cannot run {step.num_microbatches} micro-batches per rank; "
            f"it can run {dims.round_up_num_microbatches(step.num_microbatches)}",
        )


def _check_trees(step: StepPlan, lengths: Sequence[int], broken: Broken) -> None:
    together = [sample for tree in step.trees for sample in tree.samples]
    if len(set(together)) < len(together):
        raise broken("prefix trees", "a sample is in two trees", indices=tuple(together))
    row_of = {sample: row for row in step.rows() for sample in row.samples}
    for tree in step.trees:
        rows = {row_of.get(sample) for sample in tree.samples}
        own = [lengths[sample] for sample in tree.samples if sample in row_of]
        ends = [end for start, end in tree.nodes if 0 <= start < end]
        if None in rows or len(rows) > 1:
            fault = "share tokens, but not a micro-batch"
        elif len(ends) < len(tree.nodes) or max(ends, default=0) != max(own):
            fault = f"share tokens, but their nodes are {tree.nodes!r:.80}"
        elif not max(own) <= tree.tokens <= sum(own):
            fault = f"have {sum(own)} tokens, {max(own)} the longest, but as a tree {tree.tokens}"
        else:
            continue
        fault = f"samples {shortened(tree.samples)} {fault}"
        raise broken("prefix trees", fault, indices=tree.samples)


def _check_cap(step: StepPlan, lengths: Sequence[int], broken: Broken) -> None:
    # Written out, not taken from `Problem`: the planner must not be checked by its own sums.
    config, largest = step.config, step.config.max_context_parallel
    sizes = (step.dims.context_parallel,) if largest is None else step.dims.row_sizes(largest)
    of_size = {size: step.dims.for_rows_on(size) for size in sizes}

    def row_tokens(samples: Sequence[int], size: int) -> int:
        room = [lengths[i] if isinstance(i, int) else i.size for i in step.units(samples)]
        padded = (padded_sample_tokens(tokens, of_size[size], config) for tokens in room)
        return padded_row_tokens(sum(padded), of_size[size], config)

    for rank, slot, size, samples in step.rows():
        most = config.max_samples_per_row
        tokens, cap = row_tokens(samples, size), config.cap_tokens(of_size[size])
        # A sample over the cap of every size may be alone in its row.
        if tokens > cap and not (
            len(step.units(samples)) == 1
            and config.on_oversize == "own-bin"
            and all(row_tokens(samples, each) > config.cap_tokens(of_size[each]) for each in sizes)
        ):
            fault = f"take {tokens} padded tokens, the cap is {cap}"
        elif most is not None and len(step.units(samples)) > most:
            fault = f"share a row, max_samples_per_row={most}"
        else:
            continue
        fault = f"samples {shortened(samples)} {fault}"
        raise broken("cap", fault, indices=samples, rank=rank, slot=slot)


def _check_split_before_placeholder(step: StepPlan, broken: Broken) -> None:
    for rank, micro_batches in enumerate(step.micro_batches):
        if () not in micro_batches:
            continue
        for slot, samples in enumerate(micro_batches):
            # A row over several ranks cannot be split on one of them alone.
            if len(step.units(samples)) > 1 and (
                step.context_parallel is None or step.row_size(rank, slot) == 1
            ):
                fault = f"slot {micro_batches.index(())} is a placeholder, but samples "
                fault += f"{shortened(samples)} share a micro-batch"
                where = {"indices": samples, "rank": rank, "slot": slot}
                raise broken("split before placeholder", fault, **where)
