"""Plans as frozen data.

Guarantees: a plan never changes once made; its digest depends on what it says and not on the
platform, the Python version or the hash seed; `from_json(plan.to_json()) == plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from mcore_batching.planning import explanation, serialization, validation
from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.cost import CostModel
from mcore_batching.planning.errors import LengthError, PlanFormatError
from mcore_batching.planning.layout import Layout

Scope = Literal["global", "local"]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Which samples, in which micro-batch, on which rank, in which order, for one optimizer step.

    A plan that was read from a file may be broken; `validate` tells.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    """`micro_batches[rank][slot]` is a tuple of sample indices; `()` is a placeholder."""
    num_microbatches: int
    """Micro-batches of each data-parallel rank."""
    sample_indices: tuple[int, ...]
    """The samples this step must cover, ascending: positions in the batch's lengths."""
    layout: Layout
    """The layout it was made for."""
    config: PlannerConfig
    """The options it was made with."""
    scope: Scope = "global"
    """"global": samples may go to any rank; "local": each stays on the rank that held it."""
    cost_model: CostModel = field(default_factory=CostModel, compare=False)
    """What `explain` weighs by. Not part of the plan's identity: neither in the digest nor the
    JSON."""
    forward_only: bool = field(default=False, compare=False)
    """Whether it was made for forward passes alone, and is explained as such; like `cost_model` not
    part of its identity."""

    @property
    def num_samples(self) -> int:
        """Samples this step must cover."""
        return len(self.sample_indices)

    def validate(self, lengths: Sequence[int]) -> None:
        """Check every invariant that a plan can be checked for.

        Args:
            lengths: total length of each sample of the whole batch [samples], in tokens.

        Raises:
            InvariantError: names the broken invariant, the place and the samples.
        """
        validation.validate_step(self, lengths)

    def digest(self) -> str:
        """SHA-256 in hex of the plan's content; equal on two ranks exactly if the plans are
        equal."""
        return serialization.digest(self._payload())

    def to_json(self) -> str:
        """The plan as JSON, one step in a `mcore-batching/plan` document."""
        return serialization.dump(self._payload())

    @classmethod
    def from_json(cls, text: str, *, verify_digest: bool = True) -> StepPlan:
        """The plan that `to_json` wrote; also reads a one-step document of `Plan.to_json`.

        Raises:
            PlanFormatError: not a plan, another format or version, more than one step, dropped
                samples, or (unless `verify_digest` is False) content that the digest does not
                match.
        """
        document = serialization.load(text)
        if len(document.steps) != 1:
            raise PlanFormatError(
                f"expected a plan of one step, got {len(document.steps)}; read it with "
                "Plan.from_json"
            )
        if document.dropped:
            raise PlanFormatError(
                f"expected a plan of all of its samples, got one that drops "
                f"{len(document.dropped)}; read it with Plan.from_json"
            )
        (step,) = document.steps
        samples = step.sample_indices
        plan = _step_from_document(
            document, step, range(document.num_samples) if samples is None else samples
        )
        if verify_digest:
            serialization.check_digest(document.digest, plan.digest())
        return plan

    def explain(self, lengths: Sequence[int]) -> str:
        """Why this many micro-batches, and which rank, micro-batch and sample hold the step up.

        Args:
            lengths: total length of each sample of the whole batch [samples], in tokens.

        Raises:
            InvariantError: the plan is broken.
        """
        return explanation.explain_step(self, lengths)

    def __str__(self) -> str:
        """The plan for people: a line a rank, long ones cut short."""
        return explanation.describe_step(self)

    def _payload(self) -> serialization.Payload:
        return serialization.payload(
            self.layout, self.config, self.scope, self.num_samples, [self], with_samples=True
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The steps of one batch, in order. Sample indices are positions in the batch's lengths."""

    steps: tuple[StepPlan, ...]
    """One or more, all of one layout, configuration and scope."""
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
            if (step.layout, step.config, step.scope) != (first.layout, first.config, first.scope):
                raise LengthError(
                    f"all steps of a plan must share layout, config and scope; step {index} "
                    "differs from step 0; make one Plan for each",
                    index=index,
                )

    @property
    def layout(self) -> Layout:
        """The layout it was made for."""
        return self.steps[0].layout

    @property
    def config(self) -> PlannerConfig:
        """The options it was made with."""
        return self.steps[0].config

    @property
    def scope(self) -> Scope:
        """As in `StepPlan.scope`."""
        return self.steps[0].scope

    def validate(self, lengths: Sequence[int]) -> None:
        """Check every invariant of every step, and that each sample is in one step or dropped.

        Args:
            lengths: total length of each sample [num_samples], in tokens.

        Raises:
            InvariantError: names the broken invariant, the place and the samples.
        """
        validation.validate_plan(self, lengths)

    def digest(self) -> str:
        """SHA-256 in hex of the plan's content; that of its step if there is one step and nothing
        is dropped."""
        return serialization.digest(self._payload())

    def to_json(self) -> str:
        """The plan as JSON, a `mcore-batching/plan` document."""
        return serialization.dump(self._payload())

    @classmethod
    def from_json(cls, text: str, *, verify_digest: bool = True) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            PlanFormatError: not a plan, another format or version, or (unless `verify_digest` is
                False) content that the digest does not match.
        """
        document = serialization.load(text)
        steps = []
        for step in document.steps:
            if step.sample_indices is not None:
                raise PlanFormatError(
                    "expected a whole batch's plan, got one step out of a batch; read it with "
                    "StepPlan.from_json"
                )
            found = {sample for rank in step.ranks for samples in rank for sample in samples}
            steps.append(_step_from_document(document, step, sorted(found)))
        plan = cls(steps=tuple(steps), num_samples=document.num_samples, dropped=document.dropped)
        if verify_digest:
            serialization.check_digest(document.digest, plan.digest())
        return plan

    def explain(self, lengths: Sequence[int]) -> str:
        """`StepPlan.explain` of every step, and which samples are in none."""
        return explanation.explain_plan(self, lengths)

    def __str__(self) -> str:
        """The plan for people: a line a step, long ones cut short."""
        return explanation.describe_plan(self)

    def _payload(self) -> serialization.Payload:
        return serialization.payload(
            self.layout,
            self.config,
            self.scope,
            self.num_samples,
            self.steps,
            with_samples=False,
            dropped=self.dropped,
        )


def _step_from_document(
    document: serialization.Document,
    step: serialization.StepDocument,
    sample_indices: Sequence[int],
) -> StepPlan:
    return StepPlan(
        micro_batches=step.ranks,
        num_microbatches=step.num_microbatches,
        sample_indices=tuple(sample_indices),
        layout=document.layout,
        config=document.config,
        scope=document.scope,
    )
