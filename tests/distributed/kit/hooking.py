"""Jobs with what is put in place of slime's batching, called as slime calls it; and of frameworks
that hold a model.

`kit.slime` and `kit.verl_engine` run the frameworks themselves, from checkouts.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from kit import listed_batches
from kit.calls import Calls, small_model
from kit.exactness import arguments, difference, log_probs_by_lengths
from kit.guarantees import error_of, is_last_rank, on_all_ranks
from kit.samples import make_samples, take
from mcore_batching.batch import DEFAULT_SCHEMA, Kind, SchemaError
from mcore_batching.integrations import skyrl
from mcore_batching.integrations.slime import trainer
from mcore_batching.integrations.slime.trainer import planned_iterators
from mcore_batching.integrations.verl import micro_batches
from mcore_batching.planning import ParallelDims, PlannerConfig, Problem
from mcore_batching.planning.integers import round_up
from mcore_batching.planning.local import fill_local, least_count, pack_local

PAD_MULTIPLIER = 4
LOG_PROBS = 2e-6
"""Both sides compute in float32 over rows that are padded differently, as in `test_exactness`."""


def slime_plans_where_it_trains(dims: dict[str, Any], spread: str = "uneven") -> None:
    """Each rank's own samples under the cap, as many micro-batches on all, drawn as they are by
    then; log-probs are the engine's."""
    calls = Calls(dims, spread)
    shape, data = calls.dims, dict(calls.data) | {"dynamic_global_batch_size": 13}
    args = arguments(
        shape,
        use_dynamic_batch_size=True,
        data_pad_size_multiplier=PAD_MULTIPLIER,
        dynamic_batch_fill="placeholder",
        collects_outputs=False,
    )
    schema = DEFAULT_SCHEMA.declare("bonus", Kind.PER_TOKEN)
    iterators, (count,) = planned_iterators(
        schema, listed_batches.Listed, error_of, args, calls.model, data
    )
    [first, *_], lengths = iterators, data["total_lengths"]
    assert on_all_ranks(count) == [count] * dist.get_world_size()
    indices = first.micro_batch_indices
    assert sorted(i for each in indices for i in each) == list(range(len(lengths)))
    ranks, cut = shape.context_parallel * shape.tensor_parallel, 2 * shape.context_parallel
    for samples in indices:
        row = sum(round_up(lengths[i], cut if cut > 2 else 1) for i in samples)
        cap = args.max_tokens_per_gpu * shape.context_parallel
        assert round_up(row, PAD_MULTIPLIER * ranks) <= cap or len(samples) == 1
    if parallel_state.get_data_parallel_rank() == 1:
        assert [] in indices  # a placeholder
    data["bonus"] = [torch.ones(length) for length in lengths]  # since planning
    for samples in indices:
        drawn = first.get_next(["bonus", "total_lengths", "values"])
        assert [len(each) for each in drawn["bonus"]] == drawn["total_lengths"]
        assert drawn["total_lengths"] == ([lengths[i] for i in samples] or [1])
        assert drawn["values"] is None
    with pytest.raises(IndexError, match="call reset"):
        first.get_next(["bonus"])
    data["secret"] = [1.0] * len(lengths)
    with pytest.raises(SchemaError, match=r'schema = schema.declare\("secret"'):
        first.reset().get_next(["secret"])  # whether or not this rank has samples
    if shape.context_parallel > 1:
        return
    listed = listed_batches.iterators_of({**calls.data, "micro_batch_indices": indices})
    expected = calls.forward().get("log_probs", [])
    for each in (iterators, listed):
        passed = log_probs_by_lengths, args, calls.model, each, [count]
        found = listed_batches.forward_only(*passed).get("log_probs", [])
        for ours, theirs in zip(found, expected, strict=True):
            assert difference(ours, theirs) < LOG_PROBS


def framework_shows_model(dims: dict[str, Any]) -> None:
    """A model that a framework shows on one stage, and that overlaps communication on the last, is
    refused on all; a right one is its own matter, with its own plan and the manager's."""
    args = arguments(ParallelDims(**dims), use_dynamic_batch_size=True)
    its_own = mock.Mock(return_value=([], []))
    hooked = functools.partial(trainer.miles_iterators, DEFAULT_SCHEMA, its_own)
    model = small_model(dims)
    own, managers = {"rollout_data": {}}, {"rollout_data": {"micro_batch_indices": []}}
    assert hooked(args, model, **own) == hooked(args, model, **managers) == ([], [])
    model = _overlapping_on_the_last(dims)
    assert hooked(args, model, **own) == ([], [])
    rollout = take(make_samples(), [0, 1]) | {"micro_batch_indices": [[0], [1]]}
    passed = log_probs_by_lengths, args, model, listed_batches.iterators_of(rollout), [2]
    for call in (
        functools.partial(hooked, args, model, **managers),
        functools.partial(listed_batches.forward_only, *passed),
    ):
        said = error_of(call)
        assert said.startswith("PlanningFailedError")
        assert "rank 1" in said
        assert "unset --tp-comm-overlap" in said


def _overlapping_on_the_last(dims: dict[str, Any]) -> list[Any]:
    model = small_model(dims)
    get_model_config(model[0]).tp_comm_overlap = is_last_rank()
    return model


_LENGTHS, _CAP = [494, 876, 530, 141, 365, 623, 597, 514, 410], 1000
"""Planned otherwise by the default costs."""


class _Framework:
    """Holds a model as verl's engine and SkyRL's Megatron worker do, and calls what is hooked."""

    def __init__(self, chunks: list[Any]) -> None:
        self.module = self.actor_module = chunks
        self.tf_config = get_model_config(chunks[0])
        self.engine_config = SimpleNamespace(use_remove_padding=True)
        self.model = SimpleNamespace(remove_microbatch_padding=True)

    def verl(self) -> Any:
        mask = torch.arange(max(_LENGTHS)) < torch.tensor(_LENGTHS)[:, None]
        batch = {"input_ids": mask.long(), "attention_mask": mask}
        group = parallel_state.get_data_parallel_group()
        # verl's, which is not here.
        with mock.patch.object(micro_batches, "_select", lambda batch, samples: samples):
            return micro_batches.rearrange_micro_batches(None, batch, _CAP, group)[1]

    def skyrl(self) -> Any:
        data = SimpleNamespace(
            _token_counts=_LENGTHS, _max_tokens_per_microbatch=_CAP, _alignment=[1, 1]
        )
        skyrl._sync_num_microbatches(None, data)
        return data._microbatches


def framework_holds_model(dims: dict[str, Any]) -> None:
    """The model of verl and SkyRL is packed by the rule, or refused on all stages."""
    problem = Problem.of(_LENGTHS, ParallelDims(**dims), PlannerConfig(max_tokens_per_gpu=_CAP))
    packed = pack_local(problem)
    plan = [list(row) for row in fill_local(problem, packed, least_count(problem, packed))]
    for call in (_Framework.verl, _Framework.skyrl):
        assert call(_Framework(small_model(dims))) == plan
        wrong = _Framework(_overlapping_on_the_last(dims))
        said = error_of(lambda call=call, wrong=wrong: call(wrong))
        assert said.startswith("RankFailedError")
        assert "rank 1" in said
        assert "unset --tp-comm-overlap" in said
