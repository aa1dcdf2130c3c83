"""Plans as frozen data.

A plan knows nothing of its readers: checking it (`planning.validation`), measuring it
(`planning.statistics`), explaining and drawing it (`tools`) are functions elsewhere, and its JSON
form is that of `planning.plan_document`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from mcore_batching.planning import plan_document
from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.cost import CostModel
from mcore_batching.planning.errors import LengthError, PlanFormatError
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.problem import check_lengths

Scope = Literal["global", "local"]
MicroBatches = tuple[tuple[int, ...], ...]
"""One rank's micro-batches in slot order: sample indices each, `()` for a placeholder."""

_SHOWN = 16


class Row(NamedTuple):
    """One micro-batch of a step."""

    rank: int
    """Rank that has it; of several that share it the first."""
    slot: int
    """Its number on that rank."""
    size: int
    """Context-parallel size."""
    samples: tuple[int, ...]
    """None for a placeholder."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The samples of one optimizer step by rank and micro-batch, in the order in which they run.

    A plan that was read from a file may be broken; `validate_plan` tells.
    """

    micro_batches: tuple[MicroBatches, ...]
    """`micro_batches[rank][slot]` is a tuple of sample indices; `()` is a placeholder. Ranks are
    data-parallel; under dynamic CP data- and context-parallel, the latter fastest, and those that
    share a row list the same samples."""
    num_microbatches: int
    """Micro-batches per rank."""
    sample_indices: tuple[int, ...]
    """The samples this step must cover, ascending: positions in the batch's lengths."""
    dims: ParallelDims
    """Sizes of the parallel groups it was made for."""
    config: PlannerConfig
    """The options it was made with."""
    context_parallel: tuple[tuple[int, ...], ...] | None = None
    """Context-parallel size of each micro-batch [ranks][num_microbatches], under dynamic CP alone.
    Ranks r // c * c to r // c * c + c - 1 share a row of size c of rank r."""
    scope: Scope = "global"
    """"global": samples may go to any rank; "local": each stays on the rank that held it."""
    cost_model: CostModel = field(default_factory=CostModel, compare=False)
    """The costs it was made by. Not part of its identity: neither in the digest nor the JSON."""
    forward_only: bool = field(default=False, compare=False)
    """Made for forward passes alone. Not part of its identity, like `cost_model`."""

    @property
    def num_samples(self) -> int:
        """Samples this step must cover."""
        return len(self.sample_indices)

    def row_size(self, rank: int, slot: int) -> int:
        """Context-parallel size of a micro-batch: ranks that share it."""
        if self.context_parallel is None:
            return self.dims.context_parallel
        return self.context_parallel[rank][slot]

    def rows(self) -> Iterator[Row]:
        """Every micro-batch once, rank after rank: a shared one where its first rank has it."""
        for rank, micro_batches in enumerate(self.micro_batches):
            for slot, samples in enumerate(micro_batches):
                size = self.row_size(rank, slot)
                if self.context_parallel is None or rank % size == 0:
                    yield Row(rank, slot, size, samples)

    def digest(self) -> str:
        """SHA-256 in hex of the plan's content; equal on two ranks exactly if the plans are."""
        return plan_document.digest(_document([self], self.num_samples, with_samples=True))

    def to_json(self) -> str:
        """The plan as a `mcore-batching/plan` document of one step."""
        return plan_document.dump(_document([self], self.num_samples, with_samples=True))

    @classmethod
    def from_json(cls, text: str, *, verify_digest: bool = True) -> StepPlan:
        """The plan that `to_json` wrote; also reads a one-step document of `Plan.to_json`.

        Raises:
            PlanFormatError: not a plan, another format or version, more than one step, dropped
                samples, or (unless `verify_digest` is False) content that the digest does not
                match.
        """
        raw = plan_document.load(text)
        if len(raw["steps"]) != 1:
            raise PlanFormatError(
                f"expected a plan of one step, got {len(raw['steps'])}; read it with Plan.from_json"
            )
        if raw["dropped"]:
            raise PlanFormatError(
                f"expected a plan of all of its samples, got one that drops "
                f"{len(raw['dropped'])}; read it with Plan.from_json"
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

    def _size_mark(self, rank: int, slot: int) -> str:
        size = 1 if self.context_parallel is None else self.context_parallel[rank][slot]
        return f"×{size}" if size > 1 else ""

    def __str__(self) -> str:
        """The plan for people: a line per rank, long ones cut short."""
        lines = [
            f"StepPlan: {_counted(self.num_samples, 'sample')} on "
            f"{_counted(len(self.micro_batches), self._rank_noun)}, "
            f"{self.num_microbatches} micro-batches per rank, {self.scope} scope, digest "
            f"{self.digest()[:12]}"
        ]
        for rank, micro_batches in enumerate(self.micro_batches[:_SHOWN]):
            shown = " ".join(
                f"[{_abbreviated(samples)}]{self._size_mark(rank, slot)}"
                for slot, samples in enumerate(micro_batches[:_SHOWN])
            )
            lines.append(f"  rank {rank}: {shown}{_more(len(micro_batches))}")
        if len(self.micro_batches) > _SHOWN:
            lines.append(f"  {_more(len(self.micro_batches)).strip()} ranks")
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
            raise LengthError("a plan needs at least one step, got none; pass steps=(step, ...)")
        first = self.steps[0]
        for index, step in enumerate(self.steps):
            if (step.dims, step.config, step.scope) != (first.dims, first.config, first.scope):
                raise LengthError(
                    f"all steps of a plan must share dims, config and scope; step {index} "
                    "differs from step 0; make one Plan for each",
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
        """SHA-256 in hex of the plan's content; that of its step if there is one step and nothing
        is dropped."""
        return plan_document.digest(_document(self.steps, self.num_samples, dropped=self.dropped))

    def to_json(self, lengths: Sequence[int] | None = None) -> str:
        """The plan as a `mcore-batching/plan` document.

        Args:
            lengths: total length of each sample of the batch [samples], in tokens, of which the
                document then carries the digest.
        """
        document = _document(self.steps, self.num_samples, dropped=self.dropped)
        return plan_document.dump(
            document, {} if lengths is None else {"lengths_digest": lengths_digest(lengths)}
        )

    @classmethod
    def from_json(cls, text: str, *, verify_digest: bool = True) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            PlanFormatError: not a plan, another format or version, or (unless `verify_digest` is
                False) content that the digest does not match.
        """
        raw = plan_document.load(text)
        steps = []
        for step in raw["steps"]:
            if step["sample_indices"] is not None:
                raise PlanFormatError(
                    "expected a whole batch's plan, got one step out of a batch; read it with "
                    "StepPlan.from_json"
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
        if len(self.steps) > _SHOWN:
            lines.append(f"  {_more(len(self.steps)).strip()} steps")
        if self.dropped:
            lines.append(
                f"  dropped with the groups left over: {_counted(len(self.dropped), 'sample')}: "
                f"{_abbreviated(self.dropped)}"
            )
        return "\n".join(lines)


def lengths_digest(lengths: Sequence[int]) -> str:
    """SHA-256 in hex of the lengths [samples] that a plan is made from."""
    return hashlib.sha256(",".join(map(str, check_lengths(lengths))).encode("ascii")).hexdigest()


def recorded_digests(text: str) -> tuple[str | None, str | None]:
    """The digests of the plan and of its lengths that a document carries; None for one it lacks.

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


def _abbreviated(samples: Sequence[int]) -> str:
    return " ".join(map(str, samples[:_SHOWN])) + _more(len(samples))


def _more(count: int) -> str:
    return f" … {count - _SHOWN} more" if count > _SHOWN else ""
