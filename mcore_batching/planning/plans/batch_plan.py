"""The plan of a batch: the plans of its steps, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.errors import LengthError, PlanFormatError, shortened
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.plans import plan_document
from mcore_batching.planning.plans.plan import (
    MOST_SHOWN,
    Scope,
    StepPlan,
    counted,
    document_of,
    left_out,
    rank_noun,
    step_of,
)


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

    @property
    def scope(self) -> Scope:
        """As in `StepPlan.scope`."""
        return self.steps[0].scope

    def digest(self) -> str:
        """SHA-256 of the plan's content, in hex."""
        # A plan of one step without dropped samples has the digest of the step.
        return plan_document.digest(document_of(self.steps, self.num_samples, dropped=self.dropped))

    def to_json(self, lengths: Sequence[int] | None = None) -> str:
        """The plan as a `mcore-batching/plan` document.

        Args:
            lengths: total length of each sample of the batch [samples], in tokens; their digest is
                written as well.
        """
        document = document_of(self.steps, self.num_samples, dropped=self.dropped)
        return plan_document.dump(
            document,
            {} if lengths is None else {"lengths_digest": plan_document.lengths_digest(lengths)},
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
                raise PlanFormatError("it is one step of a batch; read it with StepPlan.from_json")
            # A batch's steps do not list their samples: what they run is what they must cover, and
            # `validate_plan` finds what is in none.
            found = {sample for rank in step["ranks"] for samples in rank for sample in samples}
            steps.append(step_of(raw, step, sorted(found)))
        plan = cls(steps=tuple(steps), num_samples=raw["num_samples"], dropped=raw["dropped"])
        if verify_digest:
            plan_document.check_digest(raw["digest"], plan.digest())
        return plan

    def __str__(self) -> str:
        """The plan for people: a line per step, long ones cut short."""
        lines = [
            f"Plan: {counted(self.num_samples, 'sample')} in "
            f"{counted(len(self.steps), 'step')} on "
            f"{counted(len(self.steps[0].micro_batches), rank_noun(self.steps[0]))}, "
            f"{self.scope} scope, digest {self.digest()[:12]}"
        ]
        for index, step in enumerate(self.steps[:MOST_SHOWN]):
            placeholders = sum(row.samples == () for row in step.rows())
            lines.append(
                f"  step {index}: {step.num_samples} samples, {step.num_microbatches} "
                f"micro-batches per rank, {placeholders} placeholders"
            )
        lines += left_out(len(self.steps), "steps")
        lines += [f"  {line}" for line in dropped_lines(self)]
        return "\n".join(lines)


def dropped_lines(plan: Plan) -> list[str]:
    """A line about the samples that no step runs, if there are any."""
    if not plan.dropped:
        return []
    samples = f"{counted(len(plan.dropped), 'sample')}: {shortened(plan.dropped)}"
    return [f"dropped with the groups left over: {samples}"]
