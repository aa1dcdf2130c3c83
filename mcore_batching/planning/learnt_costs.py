"""What a job has learnt of what passes cost, and steps as they were predicted by it.

`mcore_batching.planning.cost_learning` learns it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mcore_batching.planning.cost import CostModel, ordered_sum
from mcore_batching.planning.errors import ConfigError
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.pipeline import pipeline_time
from mcore_batching.planning.plan import StepPlan
from mcore_batching.planning.statistics import predicted_step_time
from mcore_batching.planning.transfers import Transfer, with_transfers

TOLD_FROM = 0.1
"""Share by which a step's measured time differs from its prediction where a log is to say so."""

_MOST = 1e18
"""Of a time, a cost, a factor or a number of steps that was learnt, and of 1 over one but steps."""


@dataclass(frozen=True, kw_only=True)
class LearntCosts:
    """Knowledge of what passes cost; the same on every rank.

    Raises:
        ConfigError: a time or a factor is not finite and positive.
    """

    cost_model: CostModel
    """Of a whole stage, in units of one token's forward work outside attention."""
    seconds_per_unit: float | None = None
    """Of a mean stage; None before anything was learnt."""
    stage_factors: tuple[float, ...] = ()
    """Time of each pipeline stage over that of the mean one [stages]; empty: all equal."""
    transfers: tuple[Transfer, ...] = ()
    """From each pipeline stage to the next, or back [stages - 1]; empty: none was timed."""
    num_steps: int = field(default=0)
    """Times that the model was learnt anew."""

    def __post_init__(self) -> None:
        """Check that times and factors are positive."""
        seconds = () if self.seconds_per_unit is None else (self.seconds_per_unit,)
        for value in (*seconds, *self.stage_factors):
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ConfigError(
                    f"learnt times and factors must be finite and positive, got {value!r}; start "
                    "without what was learnt"
                )
        if self.num_steps < 0:
            raise ConfigError(
                f"num_steps of learnt costs must be 0 or more, got {self.num_steps}; start without "
                "what was learnt"
            )

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> LearntCosts:
        """Learnt costs from the dict of `to_data`.

        Raises:
            ConfigError: something else.
        """
        try:
            made = cls(
                cost_model=CostModel(**data["cost_model"]),
                seconds_per_unit=data["seconds_per_unit"],
                stage_factors=tuple(data["stage_factors"]),
                # What was saved before transfers were learnt has none.
                transfers=tuple(Transfer(**each) for each in data.get("transfers", ())),
                num_steps=int(data["num_steps"]),
            )
            made._check_plausible()
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"expected learnt costs as state_dict gave them, got {data!r:.80} ({error})"
            ) from None
        return made

    def _check_plausible(self) -> None:
        """Refuse numbers that nobody learnt: some, squared, are none."""
        model = self.cost_model
        numbers = [self.seconds_per_unit, model.linear, model.quadratic, model.per_micro_batch]
        numbers += [model.backward_ratio, model.context_parallel_overhead]
        numbers += [model.context_parallel_fixed, *self.stage_factors]
        for each in self.transfers:
            numbers += [each.seconds, each.seconds_per_token]
        beyond = [each for each in numbers if each and not 1 / _MOST <= each <= _MOST]
        if beyond or not model.linear or self.num_steps > _MOST:
            raise ValueError(
                f"numbers must be from {1 / _MOST:g} to {_MOST:g} or 0, and linear above 0, got "
                f"{beyond or self.num_steps}"
            )

    def to_data(self) -> dict[str, Any]:
        """Itself as a dict of numbers, for JSON or a checkpoint."""
        return asdict(self) | {
            "stage_factors": list(self.stage_factors),
            "transfers": [asdict(each) for each in self.transfers],
        }

    def factor(self, stage: int) -> float:
        """Time of a stage over that of the mean one."""
        return self.stage_factors[stage] if self.stage_factors else 1.0

    def units(self, lengths: Iterable[int], context_parallel: int = 1) -> float:
        """Cost of both passes, on each rank of a row, of one that holds samples of these
        lengths."""
        model = (
            self.cost_model if context_parallel == 1 else self.cost_model.on_ranks(context_parallel)
        )
        return model.micro_batch(lengths) * (1.0 + model.backward_ratio)

    def planning_model(self, dims: ParallelDims) -> CostModel:
        """The cost model to plan with: its passes take longer by transfers that nothing hides."""
        if self.seconds_per_unit is None:
            return self.cost_model
        return with_transfers(self.cost_model, self.transfers, self.seconds_per_unit, dims)

    def predicted_seconds(self, rows: Sequence[Sequence[int]], dims: ParallelDims) -> float | None:
        """Predicted time of one data-parallel rank's step; None before anything was learnt.

        The simulated stages are equal. A slow one holds up all rows but the first to arrive.

        Args:
            rows: lengths of the samples of each micro-batch, slot after slot.
            dims: gives stages and chunks.
        """
        if self.seconds_per_unit is None:
            return None
        model = self.planning_model(dims)
        costs = [model.micro_batch(lengths) for lengths in rows]
        units = pipeline_time(costs, dims, backward_ratio=model.backward_ratio)
        return self.seconds_per_unit * (units + self._held_up([self.units(row) for row in rows]))

    def predicted_seconds_of_plan(self, plan: StepPlan, lengths: Sequence[int]) -> float | None:
        """Predicted time of the slowest rank's step, ranks that share a row waiting for each other.

        Args:
            plan: of all ranks.
            lengths: total length of each sample of the step [samples], in tokens.
        """
        if self.seconds_per_unit is None:
            return None
        held_up = max(
            self._held_up(
                [
                    self.units([lengths[i] for i in samples], plan.row_size(rank, slot))
                    for slot, samples in enumerate(of_rank)
                ]
            )
            for rank, of_rank in enumerate(plan.micro_batches)
        )
        units = predicted_step_time(plan, lengths, self.planning_model(plan.dims))
        return self.seconds_per_unit * (units + held_up)

    def _held_up(self, units: Sequence[float]) -> float:
        """By how much the slowest stage makes a rank's rows later, given their units."""
        slower = max(self.stage_factors, default=1.0) - 1.0
        return slower * ordered_sum(units) * (1.0 - 1.0 / len(units))

    def on_stages(self, num_stages: int) -> LearntCosts:
        """Itself for a pipeline of so many stages, equal ones if it was learnt on another."""
        factors = self.stage_factors if len(self.stage_factors) == num_stages else ()
        transfers = self.transfers if len(self.transfers) == num_stages - 1 else ()
        return replace(self, stage_factors=factors, transfers=transfers)


@dataclass(frozen=True, kw_only=True)
class StepReview:
    """A step as it was predicted and as it went, over all ranks."""

    predicted_seconds: float
    """Of all forward and backward passes, from the first to the end of the last."""
    measured_seconds: float
    """Likewise, on the slowest rank."""
    passes_over_predicted: float
    """Time of all ranks' passes over its prediction."""
    slowest_rank: int
    """The rank whose passes took the longest, against their prediction."""
    slowest_over_predicted: float
    """Time of its passes over their prediction; 0 where ranks shared all rows."""

    @property
    def measured_over_predicted(self) -> float:
        """Time of the step over its prediction."""
        return self.measured_seconds / self.predicted_seconds

    @property
    def reason(self) -> str:
        """Why the step was off by more than `TOLD_FROM`; empty if it was not."""
        if abs(self.measured_over_predicted - 1) <= TOLD_FROM:
            return ""
        if self.slowest_over_predicted > (1 + TOLD_FROM) * max(self.passes_over_predicted, 1.0):
            return "a rank is slower than the others"
        if abs(self.passes_over_predicted - 1) > TOLD_FROM / 2:
            return "costs have changed, or are not learnt yet"
        return "time between passes: the host, or transfers that have changed"

    def __str__(self) -> str:
        """One line for a log."""
        text = (
            f"a step took {self.measured_seconds:.3g} s, {self.measured_over_predicted:.2f} times "
            f"the predicted {self.predicted_seconds:.3g} s; its passes took "
            f"{self.passes_over_predicted:.2f} times what was predicted"
        )
        if self.slowest_over_predicted:
            text += f", on rank {self.slowest_rank}, the slowest, "
            text += f"{self.slowest_over_predicted:.2f} times"
        return f"{text}: {self.reason}" if self.reason else text
