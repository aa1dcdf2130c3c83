"""Costs that slime's rollout manager takes from its trainer's passes, through a Ray actor."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from slime_package import slime

from mcore_batching.integrations.slime import HookError, init
from mcore_batching.integrations.slime.learning import shape_costs, trainers_costs
from mcore_batching.integrations.slime.rollout_manager import build_dp_schedule
from mcore_batching.megatron import timing

__all__ = ["slime"]

ARGS = SimpleNamespace(
    use_dynamic_batch_size=True,
    max_tokens_per_gpu=40,
    dynamic_batch_cost_model="auto",
    dynamic_batch_plan_effort=100,
    hidden_size=64,
    num_layers=2,
    num_attention_heads=4,
    ffn_hidden_size=256,
)
PLAN: dict[str, int | None] = {"dp_size": 1, "cp_size": 1, "vpp_size": None}
PLAN["microbatch_group_size_per_vp_stage"] = None


class Ray:
    """Actors in this process, by name; calls return what they made."""

    def __init__(self) -> None:
        self.actors: dict[str, Any] = {}

    def get(self, made: Any) -> Any:
        return made

    def remote(self, kind: type) -> Any:
        def options(*, name: str, get_if_exists: bool, num_cpus: int) -> Any:
            assert (get_if_exists, num_cpus) == (True, 0)
            return SimpleNamespace(remote=lambda *given: self._actor(name, kind, *given))

        return SimpleNamespace(options=options)

    def _actor(self, name: str, kind: type, *given: Any) -> Any:
        own = self.actors.setdefault(name, kind(*given))
        methods = ("add", "cost_model")
        return SimpleNamespace(
            **{each: SimpleNamespace(remote=getattr(own, each)) for each in methods}
        )


class Clock:
    """Seconds that a row of so many tokens takes: far more a micro-batch than its shape says."""

    now = 0.0

    def forward_step(self, forward_step_func: Any, data_iterator: Any, *given: Any) -> str:
        del forward_step_func, given
        lengths = data_iterator.get_next(["total_lengths"])["total_lengths"]
        self.now += 50e-3 + 1e-3 * sum(lengths)
        return "made"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setitem(sys.modules, "ray", Ray())
    monkeypatch.setattr(schedules, "forward_step", made.forward_step)
    monkeypatch.setattr(timing, "mark", lambda: made.now)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    trainers_costs.cache_clear()
    yield made
    trainers_costs.cache_clear()


def run(lengths: list[int], micro_batches: list[list[int]]) -> None:
    """Train a rollout as slime does: iterators are drawn from inside the forward step."""
    data = importlib.import_module("slime.backends.megatron_utils.data")
    tokens = [torch.zeros(n, dtype=torch.long) for n in lengths]
    rollout = {"tokens": tokens, "total_lengths": lengths, "micro_batch_indices": micro_batches}
    (iterator,) = data.get_data_iterator(rollout)
    with torch.no_grad():
        for _ in micro_batches:  # log-probs, which teach nothing
            assert schedules.forward_step(None, iterator, "model") == "made"
    iterator.reset()
    for _ in micro_batches:
        assert schedules.forward_step(None, iterator, "model") == "made"


def planned(lengths: list[int], args: Any) -> list[list[int]]:
    """The micro-batches of a step on the only data-parallel rank, as places in ``lengths``."""
    rollouts = list(range(len(lengths)))
    partitions, micro_batches, *_ = build_dp_schedule(
        pytest.fail, args, PLAN, lengths, global_batch_size=len(lengths), rollout_indices=rollouts
    )
    return [[partitions[0][place] for place in samples] for samples in micro_batches[0]]


def test_costs_are_learnt_from_what_the_trainer_times_and_change_the_plan(
    slime: Path, clock: Clock, tmp_path: Path, capfd: Any
) -> None:
    """Ten rollouts, each trained by the manager's own plan: the first by what the model's shape
    costs, then by what passes took, a micro-batch as much as 50 tokens."""
    draw = random.Random(5)
    rollouts = [[draw.choice([5, 10, 20, 40, 80]) for _ in range(12)] for _ in range(10)]
    args = SimpleNamespace(**vars(ARGS) | {"pipeline_model_parallel_size": 4})
    args.max_tokens_per_gpu = 160
    by_shape = SimpleNamespace(**vars(args) | {"dynamic_batch_cost_model": "fixed"})
    init(args)
    assert "schedules.forward_step" in capfd.readouterr().out
    plans = []
    for lengths in rollouts:
        plans.append(planned(lengths, args))
        run(lengths, plans[-1])
    fixed = [planned(lengths, by_shape) for lengths in rollouts]
    shape = shape_costs(args)
    learnt = sys.modules["ray"].actors["mcore_batching learnt costs"].cost_model()
    assert shape.per_micro_batch / shape.linear != pytest.approx(50, rel=0.5)
    assert learnt.per_micro_batch / learnt.linear == pytest.approx(50, rel=0.15)
    assert plans[:2] == fixed[:2]
    assert all(ours != theirs for ours, theirs in zip(plans[5:], fixed[5:], strict=True))
    path = tmp_path / "costs.json"
    path.write_text(learnt.to_json())
    by_file = SimpleNamespace(**vars(args) | {"dynamic_batch_cost_model": str(path)})
    assert planned(rollouts[-1], args) == planned(rollouts[-1], by_file)


def test_expert_parallel_ranks_teach_nothing() -> None:
    with pytest.raises(HookError, match="wait for each other in every one: set dynamic_batch_cost"):
        build_dp_schedule(
            pytest.fail,
            SimpleNamespace(**vars(ARGS) | {"expert_model_parallel_size": 2}),
            PLAN,
            [5],
            global_batch_size=1,
            rollout_indices=[0],
        )
