"""Costs that slime's or miles' rollout manager plans with, learnt from the trainer's passes.

    trainer, each rank: forward passes timed -> evidence ┐
    trainer, each rank: forward passes timed -> evidence ┴ TrainersCosts, a Ray actor -> manager

Under ``dynamic_batch_cost_model: auto``. No rank waits for it: evidence that comes late is in the
plan after the next one. Bad: backward passes are taken to be proportional to forward passes.

Needs neither PyTorch nor Megatron: it runs in the rollout manager's process and in Ray's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Sequence
from typing import Any

from mcore_batching.flags import FIXED, LEARNT
from mcore_batching.planning import ConfigError, CostModel
from mcore_batching.planning.costs.layers_of import first_guess
from mcore_batching.planning.files import read_document
from mcore_batching.planning.learn import LearntCosts


class TrainersCosts:
    """Evidence of all trainer ranks added up, and the costs that follow from it."""

    def __init__(self, shape: CostModel) -> None:
        self._learnt = LearntCosts(shape=shape, cost_model=shape)
        self._evidence = [0.0] * len(self._learnt.sums)

    def add(self, evidence: Sequence[float]) -> None:
        """Take a rank's `LearntCosts.evidence` since its last."""
        self._evidence = [a + b for a, b in zip(self._evidence, evidence, strict=True)]

    def cost_model(self) -> CostModel:
        """The costs after all evidence so far, for the next plan."""
        self._learnt = self._learnt.after(self._evidence)
        self._evidence = [0.0] * len(self._evidence)
        return self._learnt.cost_model


def shape_costs(args: Any) -> CostModel:
    """The costs of the model's shape by Megatron's arguments; else the default ones."""
    with contextlib.suppress(ConfigError, TypeError):  # no transformer's sizes
        return first_guess(vars(args))
    return CostModel()


def chosen_costs(args: Any) -> CostModel:
    """Costs by ``dynamic_batch_cost_model``; learnt ones come from the actor, as of now.

    A `ConfigError` if it names a file that cannot be read, or holds no cost model.
    """
    chosen = getattr(args, "dynamic_batch_cost_model", None)
    if chosen in (None, FIXED):
        return shape_costs(args)
    if chosen != LEARNT:
        return _read_costs(chosen)
    ray = importlib.import_module("ray")
    model: CostModel = ray.get(trainers_costs(shape_costs(args)).cost_model.remote())
    return model


def _read_costs(path: str) -> CostModel:
    try:
        return CostModel.from_json(read_document(path))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(
            f"dynamic_batch_cost_model {path}: {error}; set it to a file of CostModel.to_json, to "
            f"{LEARNT} or to {FIXED}"
        ) from error


@functools.cache
def trainers_costs(shape: CostModel) -> Any:
    """The job's one `TrainersCosts`, as a Ray actor, made by the process that comes first."""
    ray = importlib.import_module("ray")
    # Named in the job's own namespace; the handle that is cached here keeps it alive.
    options = {"name": "mcore_batching learnt costs", "get_if_exists": True, "num_cpus": 0}
    return ray.remote(TrainersCosts).options(**options).remote(shape)
