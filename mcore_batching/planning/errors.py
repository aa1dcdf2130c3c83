"""The root of this package's errors, and the planner's.

An error names the argument to set by `named`: as Python has it, and the flag that sets it.

    raise ConfigError(f"the cap is too small; set {named('on_oversize', 'own-bin')}")
    # ... set on_oversize='own-bin' (--dynamic-batch-on-oversize own-bin)
"""

from __future__ import annotations

import copyreg
from collections.abc import Collection
from dataclasses import KW_ONLY, InitVar, dataclass
from itertools import islice
from typing import Any

FLAG_OF = {
    "data_parallel": "--dp",
    "pipeline_parallel": "--pp",
    "virtual_pipeline": "--vpp",
    "context_parallel": "--cp",
    "tensor_parallel": "--tp",
    "expert_parallel": "--ep",
    "microbatch_group_size": "--microbatch-group-size",
    "samples_per_step": "--samples-per-step",
    "max_tokens_per_gpu": "--max-tokens-per-gpu",
    "max_context_parallel": "--dynamic-batch-context-parallel",
    **{
        name: f"--dynamic-batch-{name.replace('_', '-')}"
        for name in (
            "on_oversize",
            "packing",
            "max_samples_per_row",
            "pad_each_to",
            "pad_total_to",
            "balance",
            "fill",
            "plan_effort",
            "forward_only_max_tokens_per_gpu",
            "record",
        )
    },
}
"""The flag of each argument that errors name: of the command line, of training jobs, or of both."""


def named(name: str, value: object = None) -> str:
    """An argument, and a value to set it to, as errors name it.

    named("pad_each_to")         "pad_each_to (--dynamic-batch-pad-each-to)"
    named("pad_each_to", 8)      "pad_each_to=8 (--dynamic-batch-pad-each-to 8)"
    named("lengths")             "lengths", which no flag sets
    """
    flag = FLAG_OF.get(name)
    if value is None:
        return f"{name} ({flag})" if flag else name
    return f"{name}={value!r} ({flag} {value})" if flag else f"{name}={value!r}"


def printable(text: str) -> str:
    """The text with every character escaped that a terminal acts on, except line ends."""
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )


def shortened(entries: Collection[object], limit: int = 10, separator: str = ", ") -> str:
    """The first entries of a collection for a message, and how many more: `3, 17 and 1 more`."""
    shown = separator.join(map(str, islice(entries, limit)))
    return f"{shown} and {len(entries) - limit} more" if len(entries) > limit else shown


class MCoreBatchingError(Exception):
    """Root of every error that this package raises on purpose; each class below it is also a
    built-in one."""

    def __init__(self, message: str) -> None:
        # It may hold file names or samples of strangers, and goes to a terminal or a log.
        super().__init__(printable(message))

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from message and attributes: constructors take other arguments (see PEP 307)."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class PlanningError(MCoreBatchingError, ValueError):
    """Base of every error that the planner raises on purpose."""


class ParallelDimsError(PlanningError):
    """A `ParallelDims` that no Megatron job can have."""


class ConfigError(PlanningError):
    """A `PlannerConfig` or `CostModel` out of range, or one that leaves no room for any token."""


class LengthError(PlanningError):
    """Lengths, groups or counts that describe no batch.

    Attributes: `index`, the position of the offending entry, or None if the whole is at fault.
    """

    def __init__(self, message: str, *, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


@dataclass(kw_only=True, eq=False, repr=False)
class OversizeSampleError(PlanningError):
    """A sample longer than the cap, under `on_oversize="error"`."""

    index: int
    length: int
    """Its tokens."""
    padded_length: int
    cap: int
    """Most padded tokens."""
    needed_max_tokens_per_gpu: int
    """The least value under which it fits."""
    num_oversize: int
    """Samples over the cap, this one among them."""

    def __post_init__(self) -> None:
        """Make the message."""
        others = f" (and {self.num_oversize - 1} more samples)" if self.num_oversize > 1 else ""
        super().__init__(
            f"sample {self.index} has {self.length} tokens, {self.padded_length} after padding, "
            f"the cap is {self.cap}{others}; set {named('max_tokens_per_gpu')} to "
            f"{self.needed_max_tokens_per_gpu} or more, or {named('on_oversize', 'own-bin')}"
        )


@dataclass(eq=False, repr=False)
class InvariantError(PlanningError):
    """A plan that breaks one of the invariants."""

    invariant: str
    """"exact cover", "cap", "equal count", "split before placeholder", "prefix trees" or, under
    dynamic CP, "blocks"."""
    message: InitVar[str]
    _: KW_ONLY
    indices: tuple[int, ...] = ()
    """The samples concerned."""
    step: int | None = None
    """This, `rank` and `slot` are None where the fault is not in one place."""
    rank: int | None = None
    slot: int | None = None

    def __post_init__(self, message: str) -> None:
        """Make the message: for people what the attributes are for programs."""
        found = {"step": self.step, "rank": self.rank, "slot": self.slot}
        where = [f"{name} {value}" for name, value in found.items() if value is not None]
        place = f" at {', '.join(where)}" if where else ""
        super().__init__(f"invariant '{self.invariant}' is broken{place}: {message}")


class PlanFormatError(PlanningError):
    """Text that is not a plan, or one of a format, version or digest that does not fit."""
