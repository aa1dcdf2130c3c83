"""The plan of a step as frozen data.

Functions elsewhere check it (`validation`), measure it (`statistics`), explain and draw it
(`tools`); `plan_document` has the JSON form, `batch_plan` the steps of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.costs.cost import CostModel
from mcore_batching.planning.errors import PlanFormatError, shortened
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.pipeline import SplitStage
from mcore_batching.planning.plans import plan_document

Scope = Literal["global", "local"]
MicroBatches = tuple[tuple[int, ...], ...]
"""One rank's micro-batches in slot order: sample indices each, `()` for a placeholder."""

MOST_SHOWN = 16
"""Entries of a list that `str(plan)` prints: a plan of 1024 ranks would fill the screen."""


class Row(NamedTuple):
    """One micro-batch of a step."""

    rank: int
    """The rank that has it; the first of those that share it."""
    slot: int
    """Its place in the rank's order."""
    size: int
    """Context-parallel size."""
    samples: tuple[int, ...]
    """`()` for a placeholder."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The samples of one optimizer step by rank and micro-batch, in the order in which they run.

    A plan that was read from a file may be broken; `validate_plan` tells.
    """

    micro_batches: tuple[MicroBatches, ...]
    """`micro_batches[rank][slot]` is a tuple of sample indices; `()` is a placeholder. Ranks are
    data-parallel; under dynamic CP data- and context-parallel, context-parallel fastest, and ranks
    that share a row list the same samples."""
    num_microbatches: int
    """Micro-batches per rank."""
    sample_indices: tuple[int, ...]
    """The samples this step must cover, ascending: positions in the batch's lengths."""
    dims: ParallelDims
    """Sizes of the parallel groups it was made for."""
    config: PlannerConfig
    """The options it was made with."""
    context_parallel: tuple[tuple[int, ...], ...] | None = None
    """Context-parallel size of each micro-batch [ranks][num_microbatches]; None without dynamic CP.
    Ranks 4 to 7 share a row of size 4 of rank 6."""
    split_backward: tuple[tuple[SplitStage, ...], ...] = ()
    """Split backward passes, and when their W runs [ranks][stages], equal on tensor-parallel ranks;
    empty: none are split."""
    scope: Scope = "global"
    """"global": samples may go to any rank; "local": each stays on the rank that held it."""
    cost_model: CostModel = field(default_factory=CostModel, compare=False)
    """The costs it was made by; in neither the digest nor the JSON."""
    forward_only: bool = field(default=False, compare=False)
    """Made for forward passes alone; in neither the digest nor the JSON."""
    hosted_lengths: tuple[int, ...] = field(default=(), compare=False)
    """Total length of each further sample, which is computed in the segment of one of these; in
    neither the digest nor the JSON."""

    @property
    def num_samples(self) -> int:
        """Samples this step must cover."""
        return len(self.sample_indices)

    def row_size(self, rank: int, slot: int) -> int:
        """Context-parallel size of a micro-batch."""
        if self.context_parallel is None:
            return self.dims.context_parallel
        return self.context_parallel[rank][slot]

    def rows(self) -> Iterator[Row]:
        """Every micro-batch once, rank after rank; a shared one at its first rank."""
        for rank, micro_batches in enumerate(self.micro_batches):
            for slot, samples in enumerate(micro_batches):
                size = self.row_size(rank, slot)
                # A row of size 4 begins at a rank that 4 divides: the others only repeat it.
                if self.context_parallel is None or rank % size == 0:
                    yield Row(rank, slot, size, samples)

    def digest(self) -> str:
        """SHA-256 of the plan's content, in hex."""
        return plan_document.digest(document_of([self], self.num_samples, with_samples=True))

    def to_json(self) -> str:
        """The plan as a `mcore-batching/plan` document of one step."""
        return plan_document.dump(document_of([self], self.num_samples, with_samples=True))

    @classmethod
    def from_json(cls, text: str, *, verify_digest: bool = True) -> StepPlan:
        """The plan that `to_json` wrote; also reads a one-step document of `Plan.to_json`.

        Raises:
            PlanFormatError: not a plan of one step without dropped samples, another version, or
                (unless `verify_digest` is False) a digest that does not match.
        """
        raw = plan_document.load(text)
        if len(raw["steps"]) != 1:
            raise PlanFormatError(
                f"the plan has {len(raw['steps'])} steps; read it with Plan.from_json"
            )
        if raw["dropped"]:
            raise PlanFormatError(
                f"the plan drops {len(raw['dropped'])} samples; read it with Plan.from_json"
            )
        (step,) = raw["steps"]
        samples = step["sample_indices"]
        plan = step_of(raw, step, range(raw["num_samples"]) if samples is None else samples)
        if verify_digest:
            plan_document.check_digest(raw["digest"], plan.digest())
        return plan

    def _shown_slots(self, rank: int) -> list[str]:
        """A rank's micro-batches for people: `[3 17]`, under dynamic CP `[3 17]×2`."""
        sizes = [1] * len(self.micro_batches[rank])
        if self.context_parallel is not None:
            sizes = list(self.context_parallel[rank])
        return [
            f"[{shortened(samples, MOST_SHOWN, ' ')}]{f'×{size}' if size > 1 else ''}"
            # Not strict: a broken plan from a file is printed, too.
            for samples, size in zip(self.micro_batches[rank], sizes, strict=False)
        ]

    def __str__(self) -> str:
        """The plan for people: a line per rank, long ones cut short."""
        lines = [
            f"StepPlan: {counted(self.num_samples, 'sample')} on "
            f"{counted(len(self.micro_batches), rank_noun(self))}, "
            f"{self.num_microbatches} micro-batches per rank, {self.scope} scope, digest "
            f"{self.digest()[:12]}"
        ]
        lines += [
            f"  rank {rank}: {shortened(self._shown_slots(rank), MOST_SHOWN, ' ')}"
            for rank in range(len(self.micro_batches))
        ][:MOST_SHOWN]
        lines += left_out(len(self.micro_batches), "ranks")
        return "\n".join(lines)


def document_of(
    steps: Sequence[StepPlan],
    num_samples: int,
    *,
    with_samples: bool = False,
    dropped: Sequence[int] = (),
) -> dict[str, Any]:
    """A document without its digest."""
    first = steps[0]
    documents = [step_document(step) for step in steps]
    for step, document in zip(steps, documents, strict=True):
        if with_samples and step.sample_indices != tuple(range(num_samples)):
            document["sample_indices"] = list(step.sample_indices)
    return {
        "format": plan_document.FORMAT,
        "version": plan_document.VERSION,
        "layout": plan_document.options_of(first.dims),
        "config": plan_document.options_of(first.config),
        "scope": first.scope,
        "num_samples": num_samples,
        **({"dropped": list(dropped)} if dropped else {}),
        "steps": documents,
    }


def step_document(step: StepPlan) -> dict[str, Any]:
    """A step as its document has it, but for its samples."""
    document: dict[str, Any] = {
        "num_microbatches": step.num_microbatches,
        "ranks": [[list(samples) for samples in rank] for rank in step.micro_batches],
    }
    if step.context_parallel is not None:
        document["context_parallel"] = [list(sizes) for sizes in step.context_parallel]
    if step.split_backward:
        document["split_backward"] = [
            [[list(map(int, split)), list(parts)] for split, parts in stages]
            for stages in step.split_backward
        ]
    return document


def step_of(
    raw: dict[str, Any],
    step: dict[str, Any],
    sample_indices: Iterable[int],
    cost_model: CostModel | None = None,
) -> StepPlan:
    """The plan from a document and one of its steps, as `plan_document.read` gives them."""
    return StepPlan(
        micro_batches=step["ranks"],
        num_microbatches=step["num_microbatches"],
        sample_indices=tuple(sample_indices),
        dims=raw["dims"],
        config=raw["config"],
        context_parallel=step["context_parallel"],
        split_backward=step["split_backward"],
        scope=raw["scope"],
        cost_model=cost_model or CostModel(),
    )


def rank_noun(step: StepPlan) -> str:
    """The kind of rank that `micro_batches` has a list for."""
    return "data-parallel rank" if step.context_parallel is None else "rank"


def counted(count: int, noun: str) -> str:
    """A count with its noun in the singular or the plural: `1 sample`, `2 micro-batches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def left_out(count: int, noun: str) -> list[str]:
    """A line about entries beyond `MOST_SHOWN`; none if there are no more."""
    return [f"  and {count - MOST_SHOWN} more {noun}"] if count > MOST_SHOWN else []
