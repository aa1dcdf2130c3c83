"""Plans of a step and of a batch, as frozen data.

Functions elsewhere check them (`validation`), measure them (`statistics`), explain and draw them
(`tools`); `plan_document` has their JSON form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.costs.cost import CostModel
from mcore_batching.planning.errors import LengthError, PlanFormatError, shortened
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.plans import plan_document
from mcore_batching.planning.prefix_trees import PrefixTree

Scope = Literal["global", "local"]
MicroBatches = tuple[tuple[int, ...], ...]
"""One rank's micro-batches in slot order: sample indices each, `()` for a placeholder."""
Sizes = tuple[tuple[int, ...], ...]
"""Context-parallel size of each micro-batch [ranks][num_microbatches]."""

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

    A plan that was read from a file may be broken: check it by `validate_plan`.
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
    context_parallel: Sizes | None = None
    """Context-parallel size of each micro-batch [ranks][num_microbatches]; None without dynamic CP.
    Ranks 4 to 7 share a row of size 4 of rank 6."""
    scope: Scope = "global"
    """"global": samples may go to any rank; "local": each stays on the rank that held it."""
    cost_model: CostModel = field(default_factory=CostModel, compare=False)
    """The costs it was made by; in neither the digest nor the JSON."""
    forward_only: bool = field(default=False, compare=False)
    """Made for forward passes alone; in neither the digest nor the JSON."""
    trees: tuple[PrefixTree, ...] = ()
    """Samples that are computed together; each tree is in one micro-batch. Further samples are
    computed by themselves."""

    @property
    def num_samples(self) -> int:
        """Samples this step must cover."""
        return len(self.sample_indices)

    @cached_property
    def _tree_of(self) -> dict[int, PrefixTree]:
        return {sample: tree for tree in self.trees for sample in tree.samples}

    def units(self, samples: Sequence[int]) -> list[int | PrefixTree]:
        """Trees and samples that are computed for some samples, whole micro-batches of them."""
        # A tree stands where its first sample does.
        found = ((sample, self._tree_of.get(sample)) for sample in samples)
        return [
            sample if tree is None else tree
            for sample, tree in found
            if tree is None or tree.samples[0] == sample
        ]

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
        return plan_document.digest(self._document())

    def to_json(self) -> str:
        """The plan as a `mcore-batching/plan` document of one step."""
        return plan_document.dump(self._document())

    def _document(self) -> dict[str, Any]:
        document = document_of([self], self.num_samples)
        # Only of one step out of a batch: a whole batch is numbered from 0.
        if self.sample_indices != tuple(range(self.num_samples)):
            document["steps"][0]["sample_indices"] = list(self.sample_indices)
        return document

    @classmethod
    def from_json(cls, text: str, *, verify_digest: bool = True) -> StepPlan:
        """The plan that `to_json` wrote; also reads a one-step document of `Plan.to_json`.

        Raises:
            PlanFormatError: not a plan of one step, another version, or (unless `verify_digest`
                is False) a digest that does not match.
        """
        return cls.of_parts(plan_document.load(text), verify_digest=verify_digest)

    @classmethod
    def of_parts(cls, parts: dict[str, Any], *, verify_digest: bool = True) -> StepPlan:
        """The plan in the parts of a document, as `plan_document.read` gives them; errors as of
        `from_json`."""
        if len(parts["steps"]) != 1:
            raise PlanFormatError(
                f"the plan has {len(parts['steps'])} steps; read it with Plan.from_json"
            )
        (step,) = parts["steps"]
        if step["sample_indices"] is None:
            step["sample_indices"] = tuple(range(parts["num_samples"]))
        plan = cls(**step)
        if verify_digest:
            plan_document.check_digest(parts["digest"], plan.digest())
        return plan

    def _shown_slots(self, rank: int) -> list[str]:
        """A rank's micro-batches for people: `[3 17]`, under dynamic CP `[3 17]×2`."""
        micro_batches = self.micro_batches[rank]
        sizes = self.context_parallel[rank] if self.context_parallel else [1] * len(micro_batches)
        return [
            f"[{shortened(samples, MOST_SHOWN, ' ')}]{f'×{size}' if size > 1 else ''}"
            # Not strict: a broken plan is printed, too.
            for samples, size in zip(micro_batches, sizes, strict=False)
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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The steps of one batch, in order. Sample indices are positions in the batch's lengths."""

    steps: tuple[StepPlan, ...]
    """One or more, all of one `ParallelDims`, configuration and scope."""
    num_samples: int
    """Samples of the batch; the steps must cover 0 to `num_samples - 1`."""

    def __post_init__(self) -> None:
        """Check that the steps belong together."""
        if not self.steps:
            raise LengthError("a plan needs one step or more; pass steps=(step, ...)")
        first = self.steps[0]  # the JSON form has these once for all steps
        for index, step in enumerate(self.steps):
            if (step.dims, step.config, step.scope) != (first.dims, first.config, first.scope):
                raise LengthError(
                    f"step {index} has other dims, config or scope; make a plan for each",
                    index=index,
                )

    @property
    def dims(self) -> ParallelDims:
        """Sizes of the parallel groups it was made for."""
        return self.steps[0].dims

    @property
    def config(self) -> PlannerConfig:
        """The options it was made with."""
        return self.steps[0].config

    def digest(self) -> str:
        """SHA-256 of the plan's content, in hex; of one step, that of the step."""
        return plan_document.digest(document_of(self.steps, self.num_samples))

    def to_json(self, lengths: Sequence[int] | None = None) -> str:
        """The plan as a `mcore-batching/plan` document.

        Args:
            lengths: total length of each sample of the batch [samples], in tokens; their digest is
                written as well.
        """
        digests = (
            {} if lengths is None else {"lengths_digest": plan_document.lengths_digest(lengths)}
        )
        return plan_document.dump(document_of(self.steps, self.num_samples), digests)

    @classmethod
    def from_json(cls, text: str, *, verify_digest: bool = True) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            PlanFormatError: not a plan, another version, or (unless `verify_digest` is False) a
                digest that does not match.
        """
        return cls.of_parts(plan_document.load(text), verify_digest=verify_digest)

    @classmethod
    def of_parts(cls, parts: dict[str, Any], *, verify_digest: bool = True) -> Plan:
        """The plan in the parts of a document, as `plan_document.read` gives them; errors as of
        `from_json`."""
        for step in parts["steps"]:
            if step["sample_indices"] is not None:
                raise PlanFormatError("it is one step of a batch; read it with StepPlan.from_json")
            # A batch's steps do not list their samples: what they run is what they must cover, and
            # `validate_plan` finds what is in none.
            ranks = step["micro_batches"]
            found = {sample for rank in ranks for samples in rank for sample in samples}
            step["sample_indices"] = tuple(sorted(found))
        steps = tuple(StepPlan(**step) for step in parts["steps"])
        plan = cls(steps=steps, num_samples=parts["num_samples"])
        if verify_digest:
            plan_document.check_digest(parts["digest"], plan.digest())
        return plan

    def __str__(self) -> str:
        """The plan for people: a line per step, long ones cut short."""
        lines = [
            f"Plan: {counted(self.num_samples, 'sample')} in "
            f"{counted(len(self.steps), 'step')} on "
            f"{counted(len(self.steps[0].micro_batches), rank_noun(self.steps[0]))}, "
            f"{self.steps[0].scope} scope, digest {self.digest()[:12]}"
        ]
        for index, step in enumerate(self.steps[:MOST_SHOWN]):
            placeholders = sum(row.samples == () for row in step.rows())
            lines.append(
                f"  step {index}: {step.num_samples} samples, {step.num_microbatches} "
                f"micro-batches per rank, {placeholders} placeholders"
            )
        return "\n".join(lines + left_out(len(self.steps), "steps"))


def document_of(steps: Sequence[StepPlan], num_samples: int) -> dict[str, Any]:
    """The document of steps, without its digest and the samples that steps cover."""
    first, documents = steps[0], list[dict[str, Any]]()
    for step in steps:
        ranks = [[list(samples) for samples in rank] for rank in step.micro_batches]
        documents.append({"num_microbatches": step.num_microbatches, "ranks": ranks})
        if step.context_parallel is not None:
            documents[-1]["context_parallel"] = [list(sizes) for sizes in step.context_parallel]
        if step.trees:
            documents[-1]["trees"] = [
                [list(tree.samples), [place for node in tree.nodes for place in node]]
                for tree in step.trees
            ]
    return {
        "format": plan_document.FORMAT,
        "version": plan_document.VERSION,
        "layout": plan_document.options_of(first.dims),
        "config": plan_document.options_of(first.config),
        "scope": first.scope,
        "num_samples": num_samples,
        "steps": documents,
    }


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
