"""The learners of a job, one for each of its models."""

from __future__ import annotations

import weakref
from typing import Any

from megatron.core.utils import unwrap_model

from mcore_batching.megatron.job.job import Job, job_of
from mcore_batching.megatron.learning.cost_learning import CostLearner
from mcore_batching.megatron.topology import model_chunks


class CostLearners:
    """The learners of the models of a job, each with costs of its own, as an actor and a critic."""

    def __init__(self) -> None:
        self._first = CostLearner()
        # Of models that are there no more, nothing is kept; none gets what another has learnt, as
        # ranks would not agree on when that one was collected.
        self._of_models: weakref.WeakKeyDictionary[Any, CostLearner] = weakref.WeakKeyDictionary()
        self._is_taken = False

    def of(self, model: Any) -> CostLearner:
        """The learner of a model.

        Args:
            model: this rank's model chunks; None: the first model whose training is planned, also
                before there is one.
        """
        if model is None:
            return self._first
        chunk = unwrap_model(model_chunks(model)[0])
        if chunk not in self._of_models:
            self._of_models[chunk] = CostLearner() if self._is_taken else self._first
            self._is_taken = True
        return self._of_models[chunk]

    def has(self, model: Any) -> bool:
        """True if the training of a model was planned; one that only runs forward learns nothing.

        Args:
            model: this rank's model chunks.
        """
        return unwrap_model(model_chunks(model)[0]) in self._of_models


def learners_of(job: Job) -> CostLearners:
    """Of a job; they learn where `Options.learns_cost_model` is true."""
    return job.memory.only(CostLearners)


def cost_learner(model: Any = None) -> CostLearner:
    """The learner of a model, on Megatron's present process groups. Not a collective.

    Args:
        model: as in `CostLearners.of`.
    """
    return learners_of(job_of()).of(model)
