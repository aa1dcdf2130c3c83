"""The planner's options: cap, padding, policies and effort."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from mcore_batching.planning.errors import ConfigError, named
from mcore_batching.planning.integers import require_choice, set_at_least_one

if TYPE_CHECKING:
    from mcore_batching.planning.parallel_dims import ParallelDims

Packing = Literal["auto", "first-fit", "first-fit-decreasing"]
Balance = Literal["auto", "pipeline", "cost", "tokens", "none"]
Fill = Literal["split", "placeholder"]
OnOversize = Literal["own-bin", "error"]

CHOICES: dict[str, tuple[str, ...]] = {
    "packing": get_args(Packing),
    "balance": get_args(Balance),
    "fill": get_args(Fill),
    "on_oversize": get_args(OnOversize),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerConfig:
    """Options of the planner.

    Raises:
        ConfigError: a number below 1 or an unknown choice.
    """

    max_tokens_per_gpu: int
    """Most padded tokens of a micro-batch on one GPU. The cap is this times the context-parallel
    size."""
    packing: Packing = "auto"
    """How samples are packed; "auto" tries both rules and keeps the fewer micro-batches."""
    balance: Balance = "auto"
    """"pipeline": a search for the shortest makespan. "cost", "tokens": packed micro-batches,
    spread evenly by cost or padded tokens. "none": packed micro-batches in the order of packing.
    "auto": "pipeline", but "cost" where `packing` or `fill` is set."""
    fill: Fill = "split"
    """How a rank with too few micro-batches reaches the common count: "split" splits the costliest,
    with placeholders only once all hold one sample; "placeholder" never splits."""
    on_oversize: OnOversize = "own-bin"
    """A sample over the cap runs alone in its micro-batch ("own-bin") or is refused ("error")."""
    pad_each_to: int | None = None
    """Samples are padded to a multiple of this as well, in tokens."""
    pad_total_to: int | None = None
    """Micro-batches are padded to a multiple of this as well, in tokens."""
    plan_effort: int = 1500
    """Length of the search: simulated passes per sample of the step. Under dynamic CP this counts
    for each context-parallel size that may be best, and four times for steps of mixed sizes."""
    max_samples_per_row: int | None = None
    """Most samples of a micro-batch; None: no bound but the cap."""
    max_context_parallel: int | None = None
    """Largest context-parallel size of a micro-batch under dynamic CP: a power of two, or all data-
    and context-parallel ranks. None: no dynamic CP, all have the size of the dims."""

    def __post_init__(self) -> None:
        """Check ranges and choices."""
        counts = (
            *("max_tokens_per_gpu", "pad_each_to", "pad_total_to", "plan_effort"),
            *("max_samples_per_row", "max_context_parallel"),
        )
        set_at_least_one(self, counts, ConfigError)
        for name, choices in CHOICES.items():
            require_choice(name, getattr(self, name), choices, ConfigError)
        # "auto" gives way to `packing` or `fill`; "pipeline" was asked for, as they were.
        if self.balance == "pipeline" and (self.packing != "auto" or self.fill != "split"):
            raise ConfigError(
                f"{named('balance', 'pipeline')} packs by itself; set {named('packing', 'auto')} "
                f"and {named('fill', 'split')}, or {named('balance', 'cost')}"
            )

    @property
    def searches(self) -> bool:
        """True if micro-batches are made for the pipeline by a search."""
        # Whoever sets how samples are packed or filled has left nothing to search for.
        return (
            self.balance in ("auto", "pipeline") and self.packing == "auto" and self.fill == "split"
        )

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
