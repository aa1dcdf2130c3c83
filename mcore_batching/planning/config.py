"""`PlannerConfig`, and the padded tokens of samples and micro-batches under it.

With `context_parallel=2` (samples padded to multiples of 4) and `pad_total_to=16`, samples of 3, 5
and 0 tokens take 4 + 8 + 4 = 16 tokens, a row of 16. A sample of no tokens takes one alignment
unit, since an empty row segment breaks attention kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args, get_origin

from mcore_batching.planning.errors import ConfigError, named
from mcore_batching.planning.integers import check_options, round_up, types_of

if TYPE_CHECKING:
    from mcore_batching.planning.parallel_dims import ParallelDims


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerConfig:
    """Options of the planner.

    Raises:
        ConfigError: a number below 1 or an unknown choice.
    """

    max_tokens_per_gpu: int
    """Most padded tokens of a micro-batch on one GPU. The cap is this times the context-parallel
    size."""
    packing: Literal["auto", "first-fit", "first-fit-decreasing"] = "auto"
    """How samples are packed; "auto" tries both rules and keeps the fewer micro-batches."""
    balance: Literal["auto", "cost", "tokens", "none"] = "auto"
    """"auto": a search for the shortest makespan, or "cost" where `packing` or `fill` is set.
    "cost", "tokens": packed micro-batches, spread evenly by cost or padded tokens. "none": packed
    micro-batches in the order of packing."""
    fill: Literal["split", "placeholder"] = "split"
    """How a rank with too few micro-batches reaches the common count: "split" splits the costliest,
    with placeholders only once all hold one sample; "placeholder" never splits."""
    on_oversize: Literal["own-bin", "error"] = "own-bin"
    """A sample over the cap runs alone in its micro-batch ("own-bin") or is refused ("error")."""
    pad_each_to: int | None = None
    """Samples are padded to a multiple of this as well, in tokens."""
    pad_total_to: int | None = None
    """Micro-batches are padded to a multiple of this as well, in tokens."""
    plan_effort: int = 1500
    """Length of the search: simulated passes per sample of the step. Under dynamic CP this counts
    for each context-parallel size that may be best, and four times for steps of mixed sizes."""
    max_samples_per_row: int | None = None
    """Most samples of a micro-batch; None: no bound but the cap. Samples of one prefix tree count
    as one: the beginning that they share is computed once in any case."""
    max_context_parallel: int | None = None
    """Largest context-parallel size of a micro-batch under dynamic CP: a power of two, or all data-
    and context-parallel ranks. None: no dynamic CP, all have the size of the dims."""

    def __post_init__(self) -> None:
        """Check ranges and choices."""
        check_options(self, ConfigError)

    @property
    def searches(self) -> bool:
        """True if micro-batches are made for the pipeline by a search."""
        # Where the way to pack or to fill is set, nothing is left to search for.
        return self.balance == self.packing == "auto" and self.fill == "split"

    def cap_tokens(self, dims: ParallelDims) -> int:
        """Most padded tokens of a micro-batch, over its context-parallel ranks."""
        # Each of them holds an equal part of every sample.
        return self.max_tokens_per_gpu * dims.context_parallel

    def num_ranks(self, dims: ParallelDims) -> int:
        """Ranks that a plan has a list for: data-parallel; under dynamic CP data- times
        context-parallel."""
        # Under dynamic CP a context-parallel rank may have rows that its neighbours do not share.
        dynamic = self.max_context_parallel is not None
        return dims.data_context_parallel if dynamic else dims.data_parallel

    def check_max_context_parallel(self, dims: ParallelDims) -> None:
        """Check `max_context_parallel` against the ranks that there are.

        Raises:
            ConfigError: it is no power of two up to their number, nor their number.
        """
        most, ranks = self.max_context_parallel, dims.data_context_parallel
        if most not in (None, ranks) and (most > ranks or most & (most - 1)):  # no power of two
            raise ConfigError(
                f"{named('max_context_parallel')} must be a power of two or all {ranks} ranks, got "
                f"{most}; set {named('max_context_parallel')} to "
                f"{1 << min(most, ranks).bit_length() - 1}"
            )


CHOICES: dict[str, tuple[str, ...]] = {
    name: get_args(kind)
    for name, kind in types_of(PlannerConfig).items()
    if get_origin(kind) is Literal
}
"""The values of each option that has a choice of them."""


def sample_multiple_tokens(dims: ParallelDims, config: PlannerConfig) -> int:
    """Every padded sample is a multiple of this: the dims' alignment and `pad_each_to`."""
    # lcm, not max: both must divide it.
    return math.lcm(dims.sample_alignment_tokens, config.pad_each_to or 1)


def row_multiple_tokens(dims: ParallelDims, config: PlannerConfig) -> int:
    """Every padded micro-batch is a multiple of this: the dims' alignment and `pad_total_to`."""
    return math.lcm(dims.sample_alignment_tokens, config.pad_total_to or 1)


def padded_sample_tokens(length: int, dims: ParallelDims, config: PlannerConfig) -> int:
    """Tokens that a sample of `length` tokens occupies; one alignment unit if it has none."""
    return round_up(max(length, 1), sample_multiple_tokens(dims, config))


def padded_row_tokens(sum_of_padded_tokens: int, dims: ParallelDims, config: PlannerConfig) -> int:
    """Tokens of a micro-batch, given the sum of its padded samples' tokens."""
    return round_up(sum_of_padded_tokens, row_multiple_tokens(dims, config))


def placeholder_tokens(dims: ParallelDims, config: PlannerConfig) -> int:
    """Tokens of a placeholder micro-batch: one real token and the padding around it."""
    return padded_row_tokens(padded_sample_tokens(1, dims, config), dims, config)


def needed_max_tokens_per_gpu(length: int, dims: ParallelDims, config: PlannerConfig) -> int:
    """The least `max_tokens_per_gpu` under which a sample of `length` tokens fits the cap."""
    row = padded_row_tokens(padded_sample_tokens(length, dims, config), dims, config)
    return -(-row // dims.context_parallel)  # the cap counts over the row's ranks


def row_capacity_tokens(dims: ParallelDims, config: PlannerConfig) -> int:
    """The largest padded micro-batch within the cap; a `ConfigError` if not even a placeholder
    fits."""
    cap = config.cap_tokens(dims)
    placeholder = placeholder_tokens(dims, config)
    if placeholder > cap:
        raise ConfigError(
            f"the least micro-batch takes {placeholder} tokens, the cap is {cap}; set "
            f"{named('max_tokens_per_gpu')} to {needed_max_tokens_per_gpu(1, dims, config)} or "
            f"more, or lower {named('pad_each_to')} and {named('pad_total_to')}"
        )
    # Rows are padded to the multiple: the cap's rest beyond the last one can hold nothing.
    multiple = row_multiple_tokens(dims, config)
    return cap // multiple * multiple
