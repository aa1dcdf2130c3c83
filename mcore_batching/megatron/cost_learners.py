"""The learners of a job, one for each of its models, and the training steps that they time."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from mcore_batching.megatron.arguments import learns_cost_model
from mcore_batching.megatron.cost_learning import CostLearner
from mcore_batching.megatron.prepared_step import PreparedStep
from mcore_batching.megatron.topology import model_chunks


class _Learners:
    """The learners of the models of a job, each with costs of its own, as an actor and a critic."""

    def __init__(self, groups: Any) -> None:
        self.groups = groups
        self._first = CostLearner()
        # Of models that are there no more, nothing is kept; none gets what another has learnt, as
        # ranks would not agree on when that one was collected.
        self._of_models: weakref.WeakKeyDictionary[Any, CostLearner] = weakref.WeakKeyDictionary()
        self._is_taken = False

    def of(self, model: Any) -> CostLearner:
        if model is None:
            return self._first
        chunk = unwrap_model(model_chunks(model)[0])
        if chunk not in self._of_models:
            self._of_models[chunk] = CostLearner() if self._is_taken else self._first
            self._is_taken = True
        return self._of_models[chunk]

    def has(self, model: Any) -> bool:
        return unwrap_model(model_chunks(model)[0]) in self._of_models


_current: _Learners | None = None


def cost_learner(model: Any = None) -> CostLearner:
    """The learner of a model, on Megatron's present process groups.

    It learns where `learns_cost_model` is true. Not a collective.

    Args:
        model: this rank's model chunks; None: the first model of the job whose training is planned,
            also before there is one.
    """
    return _learners().of(model)


def has_cost_learner(model: Any) -> bool:
    """True if the training of a model was planned; one that only runs forward learns nothing.

    Args:
        model: this rank's model chunks.
    """
    return _learners().has(model)


def _learners() -> _Learners:
    global _current
    groups = parallel_state.get_data_parallel_group()
    if _current is None or _current.groups is not groups:
        _current = _Learners(groups)
    return _current


@contextlib.contextmanager
def timed(args: Any, model: Any, prepared: PreparedStep) -> Iterator[None]:
    """Time the passes of a training step, where costs are learnt.

    Args:
        args: Megatron's arguments.
        model: this rank's model chunks.
        prepared: the step whose forward and backward passes run inside.
    """
    if not learns_cost_model(args):
        yield
        return
    with cost_learner(model).timing(prepared):
        yield
