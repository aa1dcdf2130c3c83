"""The root of this package's errors, and the planner's.

An error names the argument to set as an `Argument` among the parts of its message, which each face
spells in its own way:

    error = ConfigError("the cap is too small; set ", Argument("on_oversize", "own-bin"))
    str(error)                                              # ... set on_oversize='own-bin'
    error.text(lambda argument: f"--{argument.name}")       # ... set --on_oversize
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice
from typing import Any


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument that a message speaks of, and the value that it says to give, if any."""

    name: str
    """As the library spells it."""
    value: object = None
    """The value to set it to; None: the message says it in words."""

    def __str__(self) -> str:
        """`name`, or `name=value`."""
        return self.name if self.value is None else f"{self.name}={self.value!r}"


def printable(text: str) -> str:
    """A text whose characters are seen, not acted on: others but line ends are escaped."""
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
    built-in one. `parts` of the message are texts, and the arguments that it speaks of."""

    def __init__(self, *parts: str | Argument) -> None:
        # Texts may hold file names or samples of strangers, which go to a terminal or a log.
        self.parts = tuple(printable(part) if isinstance(part, str) else part for part in parts)
        super().__init__("".join(map(str, self.parts)))

    def text(self, spell: Callable[[Argument], str]) -> str:
        """The message with its arguments spelled by `spell`."""
        # Parts are kept, not the text: which face shows the error is known only when it is shown.
        return "".join(spell(part) if isinstance(part, Argument) else part for part in self.parts)

    def rename(self, name: str, other: str) -> None:
        """Speak of the argument `other` where the message speaks of `name`."""
        self.parts = tuple(
            Argument(other, part.value)
            if isinstance(part, Argument) and part.name == name
            else part
            for part in self.parts
        )
        self.args = ("".join(map(str, self.parts)),)  # what str() and pickle read

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

    def __init__(self, *parts: str | Argument, index: int | None = None) -> None:
        super().__init__(*parts)
        self.index = index


class OversizeSampleError(PlanningError):
    """A sample longer than the cap, under `on_oversize="error"`.

    Attributes: `index`, `length` and `padded_length` and `cap` in tokens,
    `needed_max_tokens_per_gpu` the least value under which it fits.
    """

    def __init__(
        self,
        *,
        index: int,
        length: int,
        padded_length: int,
        cap: int,
        needed_max_tokens_per_gpu: int,
        num_oversize: int,
    ) -> None:
        others = f" (and {num_oversize - 1} more samples)" if num_oversize > 1 else ""
        super().__init__(
            f"sample {index} has {length} tokens, {padded_length} after padding, the cap is "
            f"{cap}{others}; set ",
            Argument("max_tokens_per_gpu"),
            f" to {needed_max_tokens_per_gpu} or more, or ",
            Argument("on_oversize", "own-bin"),
        )
        self.index = index
        self.length = length
        self.padded_length = padded_length
        self.cap = cap
        self.needed_max_tokens_per_gpu = needed_max_tokens_per_gpu
        self.num_oversize = num_oversize


class InvariantError(PlanningError):
    """A plan that breaks one of the invariants.

    Attributes: `invariant`, its name ("exact cover", "cap", "equal count", "split before
    placeholder" or, under dynamic CP, "blocks"); `indices` of the samples
    concerned; `step`, `rank` and `slot`, each None where the fault is not in one place.
    """

    def __init__(
        self,
        invariant: str,
        message: str,
        *,
        indices: tuple[int, ...] = (),
        step: int | None = None,
        rank: int | None = None,
        slot: int | None = None,
    ) -> None:
        where = [
            f"{name} {value}"
            for name, value in (("step", step), ("rank", rank), ("slot", slot))
            if value is not None
        ]
        # In the message for people, and as attributes for programs.
        place = f" at {', '.join(where)}" if where else ""
        super().__init__(f"invariant '{invariant}' is broken{place}: {message}")
        self.invariant = invariant
        self.indices = indices
        self.step = step
        self.rank = rank
        self.slot = slot


class PlanFormatError(PlanningError):
    """Text that is not a plan, or one of a format, version or digest that does not fit."""
