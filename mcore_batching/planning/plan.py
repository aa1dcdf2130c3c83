"""Plans as frozen data. Functions elsewhere check them (`validation`), measure them (`statistics`),
explain and draw them (`tools`); `plan_document` has the JSON form.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from mcore_batching.planning import plan_document
from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.cost import CostModel
from mcore_batching.planning.errors import LengthError, PlanFormatError, shortened
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.problem import check_lengths

Scope = Literal["global", "local"]
MicroBatches = tuple[tuple[int, ...], ...]
"""One rank's micro-batches in slot order: sample indices each, `()` for a placeholder."""

_SHOWN = 16
"""Entries of a list that `str(plan)` prints."""


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
                if self.context_parallel is None or rank % size == 0:
                    yield Row(rank, slot, size, samples)

    def digest(self) -> str:
        """SHA-256 of the plan's content, in hex."""
        return plan_document.digest(_document([self], self.num_samples, with_samples=True))

    def to_json(self) -> str:
        """The plan as a `mcore-batching/plan` document of one step."""
        return plan_document.dump(_document([self], self.num_samples, with_samples=True))

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
                f"the plan has {len(raw['steps'])} steps, not one; read it with Plan.from_json"
            )
        if raw["dropped"]:
            raise PlanFormatError(
                f"the plan drops {len(raw['dropped'])} samples; read it with Plan.from_json"
            )
        (step,) = raw["steps"]
        samples = step["sample_indices"]
        plan = _step(raw, step, range(raw["num_samples"]) if samples is None else samples)
        if verify_digest:
            plan_document.check_digest(raw["digest"], plan.digest())
        return plan

    @property
    def _rank_noun(self) -> str:
        """The kind of rank that `micro_batches` has a list for."""
        return "data-parallel rank" if self.context_parallel is None else "rank"

    def _shown_slots(self, rank: int) -> list[str]:
        """A rank's micro-batches for people: `[3 17]`, under dynamic CP `[3 17]×2`."""
        sizes = [1] * len(self.micro_batches[rank])
        if self.context_parallel is not None:
            sizes = list(self.context_parallel[rank])
        return [
            f"[{shortened(samples, _SHOWN, ' ')}]{f'×{size}' if size > 1 else ''}"
            for samples, size in zip(self.micro_batches[rank], sizes, strict=False)
        ]

    def __str__(self) -> str:
        """The plan for people: a line per rank, long ones cut short."""
        lines = [
            f"StepPlan: {_counted(self.num_samples, 'sample')} on "
            f"{_counted(len(self.micro_batches), self._rank_noun)}, "
            f"{self.num_microbatches} micro-batches per rank, {self.scope} scope, digest "
            f"{self.digest()[:12]}"
        ]
        lines += [
            f"  rank {rank}: {shortened(self._shown_slots(rank), _SHOWN, ' ')}"
            for rank in range(len(self.micro_batches))
        ][:_SHOWN]
        lines += _left_out(len(self.micro_batches), "ranks")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The steps of one batch, in order. Sample indices are positions in the batch's lengths."""

    steps: tuple[StepPlan, ...]
    """One or more, all of one `ParallelDims`, configuration and scope."""
    num_samples: int
    """Samples of the batch; the steps must cover 0 to `num_samples - 1`, but for `dropped`."""
    dropped: tuple[int, ...] = ()
    """The samples that no step runs, ascending: those of groups left over under `last="drop"`."""

    def __post_init__(self) -> None:
        """Check that the steps belong together."""
        if not self.steps:
            raise LengthError("a plan needs at least one step; pass steps=(step, ...)")
        first = self.steps[0]
        for index, step in enumerate(self.steps):
            if (step.dims, step.config, step.scope) != (first.dims, first.config, first.scope):
                raise LengthError(
                    f"step {index} differs from step 0 in dims, config or scope; make one Plan "
                    "for each",
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

    @property
    def scope(self) -> Scope:
        """As in `StepPlan.scope`."""
        return self.steps[0].scope

    def digest(self) -> str:
        """SHA-256 of the plan's content, in hex; of a plan of one step without dropped samples that
        of the step."""
        return plan_document.digest(_document(self.steps, self.num_samples, dropped=self.dropped))

    def to_json(self, lengths: Sequence[int] | None = None) -> str:
        """The plan as a `mcore-batching/plan` document.

        Args:
            lengths: total length of each sample of the batch [samples], in tokens; given, their
                digest is written as well.
        """
        document = _document(self.steps, self.num_samples, dropped=self.dropped)
        return plan_document.dump(
            document, {} if lengths is None else {"lengths_digest": lengths_digest(lengths)}
        )

    @classmethod
    def from_json(cls, text: str, *, verify_digest: bool = True) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            PlanFormatError: not a plan, another version, or (unless `verify_digest` is False) a
                digest that does not match.
        """
        raw = plan_document.load(text)
        steps = []
        for step in raw["steps"]:
            if step["sample_indices"] is not None:
                raise PlanFormatError(
                    "the plan is one step out of a batch; read it with StepPlan.from_json"
                )
            found = {sample for rank in step["ranks"] for samples in rank for sample in samples}
            steps.append(_step(raw, step, sorted(found)))
        plan = cls(steps=tuple(steps), num_samples=raw["num_samples"], dropped=raw["dropped"])
        if verify_digest:
            plan_document.check_digest(raw["digest"], plan.digest())
        return plan

    def __str__(self) -> str:
        """The plan for people: a line per step, long ones cut short."""
        lines = [
            f"Plan: {_counted(self.num_samples, 'sample')} in "
            f"{_counted(len(self.steps), 'step')} on "
            f"{_counted(len(self.steps[0].micro_batches), self.steps[0]._rank_noun)}, "
            f"{self.scope} scope, digest {self.digest()[:12]}"
        ]
        for index, step in enumerate(self.steps[:_SHOWN]):
            placeholders = sum(row.samples == () for row in step.rows())
            lines.append(
                f"  step {index}: {step.num_samples} samples, {step.num_microbatches} "
                f"micro-batches per rank, {placeholders} placeholders"
            )
        lines += _left_out(len(self.steps), "steps")
        if self.dropped:
            lines.append(
                f"  dropped with the groups left over: {_counted(len(self.dropped), 'sample')}: "
                f"{shortened(self.dropped, _SHOWN, ' ')}"
            )
        return "\n".join(lines)


def lengths_digest(lengths: Sequence[int]) -> str:
    """SHA-256 of lengths [samples], in hex."""
    return hashlib.sha256(",".join(map(str, check_lengths(lengths))).encode("ascii")).hexdigest()


def recorded_digests(text: str) -> tuple[str | None, str | None]:
    """The digests of plan and lengths in a document; None for one that it lacks.

    Raises:
        PlanFormatError: not a plan.
    """
    raw = plan_document.load(text)
    return raw["digest"], raw["lengths_digest"]


def step_from_data(
    *,
    num_samples: int,
    ranks: Any,
    dims: Any,
    config: Any,
    scope: Any,
    cost_model: CostModel,
    context_parallel: Any = None,
) -> StepPlan:
    """A plan of one step from parts of a JSON document that were read elsewhere.

    Args:
        num_samples: samples of the step, numbered from 0.
        ranks: as "ranks" of a document's step.
        dims: as "layout" of a document.
        config: as "config" of a document.
        scope: as "scope" of a document.
        cost_model: the costs it was made by.
        context_parallel: as "context_parallel" of a document's step; None where it is left out.

    Raises:
        PlanFormatError: the parts are not those of a plan.
    """
    count = len(ranks[0]) if isinstance(ranks, list) and ranks else 0
    raw = {"layout": dims, "config": config, "scope": scope, "num_samples": num_samples}
    step = {"num_microbatches": count, "ranks": ranks, "context_parallel": context_parallel}
    raw = plan_document.read(raw | {"steps": [step]})
    return _step(raw, raw["steps"][0], range(num_samples), cost_model)


def _document(
    steps: Sequence[StepPlan],
    num_samples: int,
    *,
    with_samples: bool = False,
    dropped: Sequence[int] = (),
) -> dict[str, Any]:
    """A document without its digest."""
    first = steps[0]
    documents: list[dict[str, Any]] = []
    for step in steps:
        document: dict[str, Any] = {
            "num_microbatches": step.num_microbatches,
            "ranks": [[list(samples) for samples in rank] for rank in step.micro_batches],
        }
        if step.context_parallel is not None:
            document["context_parallel"] = [list(sizes) for sizes in step.context_parallel]
        if with_samples and step.sample_indices != tuple(range(num_samples)):
            document["sample_indices"] = list(step.sample_indices)
        documents.append(document)
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


def _step(
    raw: dict[str, Any],
    step: dict[str, Any],
    sample_indices: Iterable[int],
    cost_model: CostModel | None = None,
) -> StepPlan:
    return StepPlan(
        micro_batches=step["ranks"],
        num_microbatches=step["num_microbatches"],
        sample_indices=tuple(sample_indices),
        dims=raw["dims"],
        config=raw["config"],
        context_parallel=step["context_parallel"],
        scope=raw["scope"],
        cost_model=cost_model or CostModel(),
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun if count == 1 else noun + 's'}"


def _left_out(count: int, noun: str) -> list[str]:
    return [f"  and {count - _SHOWN} more {noun}"] if count > _SHOWN else []
