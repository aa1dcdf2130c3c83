"""Learnt costs, kept with a stock script's checkpoints as one of Megatron's arguments."""

from __future__ import annotations

from typing import Any

from mcore_batching.integrations.megatron_lm.arguments import is_on
from mcore_batching.megatron.job.job import Job, job_of
from mcore_batching.megatron.job.options import Options
from mcore_batching.megatron.learning.cost_learning import cost_learner, learners_of
from mcore_batching.planning import ConfigError

# In Megatron's arguments: these are saved in every checkpoint, and passed to one function when it
# is loaded.
_NAME = "dynamic_batch_learnt_costs"


def keep_learnt_costs(args: Any, job: Job, predicted: float) -> dict[str, float]:
    """Store learnt costs where the next checkpoint saves them; the figures to log, if any.

    ``predicted`` are the seconds of the last step, 0 if not known.
    """
    learner = learners_of(job).of(None)
    if not job.options.learns_cost_model or learner.learnt is None:
        return {}
    setattr(args, _NAME, learner.state_dict())
    return learner.statistics() | ({"predicted step seconds": predicted} if predicted else {})


def take_over_learnt_costs(args: Any, checkpoint_args: Any) -> None:
    """Continue with a checkpoint's learnt costs, if this job learns; call it on every rank.

    Costs that cannot be read, say of another version, are learnt anew, in a few steps.
    """
    if not (is_on(args) and Options.of(args).learns_cost_model):
        return
    try:
        cost_learner().load_state_dict(getattr(checkpoint_args, _NAME, {}))
    except ConfigError as error:
        job_of(args).say_once("learnt anew", f"costs are learnt anew: {error}")
        cost_learner().load_state_dict({})
