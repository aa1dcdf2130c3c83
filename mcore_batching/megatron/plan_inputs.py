"""The planner's input beside the lengths: dims, configuration and costs."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.utils import get_model_config, unwrap_model

from mcore_batching.flags import FLAGS
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.job import Job
from mcore_batching.megatron.options import Options
from mcore_batching.megatron.timing import learners_of
from mcore_batching.megatron.topology import current_dims, first_guess
from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, Problem
from mcore_batching.planning.learn import LearntCosts
from mcore_batching.planning.worker import PlanRequest


@dataclasses.dataclass(frozen=True)
class PlanInputs:
    """The planner's arguments beside the lengths; the same on every rank."""

    dims: ParallelDims
    config: PlannerConfig
    cost_model: CostModel
    # Where costs are learnt: `cost_model` is a part of it.
    learnt: LearntCosts | None = dataclasses.field(default=None, compare=False)

    @classmethod
    def of(
        cls,
        job: Job,
        chunks: list[Any],
        cost_model: CostModel | None = None,
        *,
        training: PlannerConfig | None = None,
        forward_only: bool = False,
    ) -> PlanInputs:
        """The inputs for one of a job's models, given as this rank's chunks.

        Without training's config it is read from the arguments, and so are costs: if these name
        none, they are what was learnt by now, or of the model's shape.
        """
        if cost_model is not None and not isinstance(cost_model, CostModel):
            raise TypeError(
                f"cost_model must be a CostModel or None, got {type(cost_model).__name__}; pass "
                "CostModel.from_json(text), or name its file in --dynamic-batch-cost-model"
            )
        dims = current_dims(chunks)
        config = training or job.options.planner_config(dims)
        if forward_only:
            # Activations of forward passes alone are not kept, so their cap may be larger.
            config = job.options.forward_only_config(config, dims)
        # A file that the user named is never corrected by what is learnt.
        given = cost_model or job.options.given_cost_model()
        if given is not None:
            return cls(dims, config, given)
        model = unwrap_model(chunks[0])
        guess = first_guess(job.options.padded_vocab_size, get_model_config(chunks[0]), model)
        if not job.options.learns_cost_model:
            return cls(dims, config, guess)
        learnt = learners_of(job).of(chunks).begin(guess, dims)
        return cls(dims, config, learnt.cost_model, learnt)

    def request(self, lengths: tuple[int, ...], *, forward_only: bool = False) -> PlanRequest:
        """The planner's whole input."""
        return PlanRequest(lengths, self.dims, self.config, self.cost_model, forward_only)

    def comparable(self) -> dict[str, Any]:
        """Each setting by its own name, so that an error names the one that differs."""
        parts: tuple[Any, ...] = self.dims, self.config, self.cost_model
        return {n: value for part in parts for n, value in dataclasses.asdict(part).items()}


def check_forward_cap(options: Options, config: PlannerConfig) -> None:
    """Refuse a cap of forward passes beside a rollout in which ranks share rows."""
    if config.max_context_parallel is not None and options.has_own_forward_cap:
        raise DynamicBatchArgumentError(
            "forward_only has no plan of its own where ranks share rows; unset "
            f"{FLAGS['forward_only_max_tokens_per_gpu']} or {FLAGS['max_context_parallel']}"
        )


def say_oversize(job: Job, settings: PlanInputs, longest: int) -> None:
    """Print once a job that the longest sample of all ranks is over the cap, if it is."""
    if settings.config.on_oversize == "error":
        return
    problem = Problem.of([longest], settings.dims, settings.config)
    if problem.oversize:
        over = problem.oversize_error()
        job.say_once(
            "oversize",
            f"a sample has {over.length} tokens, {over.padded_length} after padding, over the cap "
            f"of {over.cap} of a micro-batch: it runs alone, as all such samples do, and takes the "
            f"memory of its length; --max-tokens-per-gpu {over.needed_max_tokens_per_gpu} would "
            "hold it",
        )
