"""Jobs with what is put in place of slime's batching, called as slime calls it; and of frameworks
that hold a model.

`kit.slime` and `kit.verl_engine` run the frameworks themselves, from checkouts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from kit.calls import Calls, small_model
from kit.exactness import arguments, difference, log_probs_by_lengths, positions_here
from kit.guarantees import error_of, is_last_rank, on_all_ranks
from kit.samples import make_samples, take
from mcore_batching.batch import DEFAULT_SCHEMA, Kind, SchemaError
from mcore_batching.integrations.skyrl import iterator
from mcore_batching.integrations.slime import before_1860
from mcore_batching.integrations.slime.trainer import checking_model
from mcore_batching.integrations.verl import micro_batches
from mcore_batching.planning import ParallelDims, PlannerConfig, Problem
from mcore_batching.planning.local import fill_local, least_count, pack_local

PAD_MULTIPLIER = 4
LOG_PROBS = 2e-6
"""Both sides compute in float32 over rows that are padded differently, as in `test_exactness`."""


def forward_equals_the_engines(
    dims: dict[str, Any], spread: str = "uneven", **planner: Any
) -> None:
    """Log-probs found by lengths are the engine's, with placeholders where a rank has too few."""
    calls = Calls(dims, spread)
    expected = calls.forward().get("log_probs", [])
    planner |= {"data_pad_size_multiplier": PAD_MULTIPLIER, "dynamic_batch_fill": "placeholder"}
    calls.args = arguments(calls.dims, **planner)
    iterators, (count,) = before_1860.get_data_iterator(
        DEFAULT_SCHEMA, calls.args, calls.model, calls.data
    )
    assert on_all_ranks(count) == [count] * dist.get_world_size()
    if parallel_state.get_data_parallel_rank() == 1:
        assert [] in iterators[0].micro_batch_indices  # a placeholder
    iterators[0].get_next(["tokens"])  # forward_only begins at the beginning
    made = before_1860.forward_only(
        log_probs_by_lengths, calls.args, calls.model, iterators, [count], "old_"
    )
    assert iterators[0].offset == 0
    for ours, theirs in zip(made.get("old_log_probs", []), expected, strict=True):
        assert difference(ours, theirs) < LOG_PROBS


def batches(dims: dict[str, Any]) -> None:
    """What ``get_batch`` returns; of two data-parallel ranks the second has no sample."""
    shape = ParallelDims(**dims)
    args = arguments(shape, data_pad_size_multiplier=PAD_MULTIPLIER)
    args.max_tokens_per_gpu = 24 // shape.context_parallel
    ranks = shape.context_parallel * shape.tensor_parallel
    empty = parallel_state.get_data_parallel_rank() == 1
    names = ["tokens", "total_lengths", "response_lengths", "loss_masks"]
    data: dict[str, Any] = {name: make_samples()[name][8:12] for name in names}
    data["multimodal_train_inputs"] = [None, {"pixels": torch.ones(2, 3)}, {}, None]
    data["multimodal_train_inputs"][2] = {"pixels": torch.zeros(1, 3)}
    data = {name: values[: 0 if empty else None] for name, values in data.items()}
    data["dynamic_global_batch_size"] = 4
    keys = [*names, "multimodal_train_inputs", "bonus", "values"]
    schema = DEFAULT_SCHEMA.declare("bonus", Kind.PER_TOKEN)
    model, get_batch = small_model(dims), before_1860.get_batch
    iterators, (count,) = before_1860.get_data_iterator(schema, args, model, data)
    data["bonus"] = [torch.ones(n) for n in data["total_lengths"]]  # since planning
    # As they are when drawn: all ones, which they were not when planned.
    data["loss_masks"] = [torch.ones_like(mask) for mask in data["loss_masks"]]
    made = [get_batch(iterators[0], keys, PAD_MULTIPLIER) for _ in range(count)]
    with pytest.raises(IndexError):
        get_batch(iterators[0], keys)
    iterators[0].reset()
    row = get_batch(iterators[0], keys, 3 * PAD_MULTIPLIER)["packed_seq_params"].cu_seqlens_q[-1]
    assert row % (3 * PAD_MULTIPLIER * ranks) == 0
    data["secret"] = [1.0] * len(data["tokens"])
    with pytest.raises(SchemaError, match=r'schema = schema.declare\("secret"'):
        get_batch(iterators[0], [*keys, "secret"])  # whoever has samples
    data["bonus"] = [torch.ones(1)]
    with pytest.raises(SchemaError, match=r"bonus.* 1"):
        iterators[0].get_next(["bonus"])
    indices = iterators[0].micro_batch_indices
    assert sorted(i for each in indices for i in each) == ([] if empty else [0, 1, 2, 3])
    assert any(len(each) > 1 for each in indices) != empty
    trainable, pixels = 0, []
    for batch, of_row in zip(made, indices, strict=True):
        added = {"dynamic_global_batch_size", "full_loss_masks", "packed_seq_params"}
        assert batch.keys() == {*keys, *added, "unconcat_tokens"}
        lengths = [data["total_lengths"][i] for i in of_row] or [1]
        tokens, masks = batch["unconcat_tokens"], batch["full_loss_masks"]
        assert [len(each) for each in tokens] == batch["total_lengths"] == lengths
        [row] = batch["tokens"]
        here = [positions_here(length) for length in lengths]
        begun = 0
        for sample, places in zip(tokens, here, strict=True):
            known = places < len(sample)
            own = row[begun : begun + len(places)]
            assert own[known].tolist() == sample[places[known]].tolist()
            begun += len(places)
        whole = len(row) * shape.context_parallel
        assert whole == batch["packed_seq_params"].cu_seqlens_q[-1]
        assert whole % (PAD_MULTIPLIER * ranks) == 0
        assert whole <= 24 or len(of_row) == 1
        assert (masks.shape, masks.dtype) == ((1, len(row)), torch.int32)
        sums = [mask.sum() for mask in batch["loss_masks"]]
        masked = masks.sum()
        dist.all_reduce(masked, group=parallel_state.get_context_parallel_group())
        assert masked == sum(sums)
        # A placeholder's mask counts no token, also where each sample counts at least one.
        assert bool(sum(torch.clamp_min(each, 1) for each in sums)) == bool(of_row)
        assert batch["values"] is None
        assert batch["dynamic_global_batch_size"] == 4
        assert [len(each) for each in batch["bonus"]] == lengths
        trainable += int(sum(sums))
        pixels += batch["multimodal_train_inputs"].get("pixels", torch.zeros(0)).tolist()
    assert trainable == sum(data["response_lengths"])
    assert sorted(pixels) == ([] if empty else [[0.0] * 3, [1.0] * 3, [1.0] * 3])


def positions(dims: dict[str, Any]) -> None:
    """Models that see images find positions themselves; others are given them."""
    model = small_model(dims)
    args = arguments(ParallelDims(**dims))
    seen: list[bool] = []
    forward = model[0].module.forward

    def spy(*arguments: Any, position_ids: Any = None, **keywords: Any) -> Any:
        seen.append(position_ids is not None)
        return forward(*arguments, position_ids=position_ids, **keywords)

    model[0].module.forward = spy
    for images in (False, True, False):
        data: dict[str, Any] = take(make_samples(), [0, 5])
        if images:
            data["multimodal_train_inputs"] = [None, None]
        iterators, counts = before_1860.get_data_iterator(DEFAULT_SCHEMA, args, model, data)
        before_1860.forward_only(log_probs_by_lengths, args, model, iterators, counts)
        assert {*seen} == {not images}
        seen.clear()


def framework_shows_model(dims: dict[str, Any]) -> None:
    """A model that a framework shows on one stage, and that overlaps communication on the last, is
    refused on all; a right one is its own matter, with its own plan and the manager's."""
    args = arguments(ParallelDims(**dims), use_dynamic_batch_size=True)

    def its_own(args: Any, model: Any, rollout_data: Any) -> str:
        return "its own"

    hooked, model = checking_model(its_own, its_own), small_model(dims)
    own, managers = {"rollout_data": {}}, {"rollout_data": {"micro_batch_indices": []}}
    assert hooked(args, model, **own) == hooked(args, model, **managers) == "its own"
    model = _overlapping_on_the_last(dims)
    assert hooked(args, model, **own) == "its own"
    said = error_of(lambda: hooked(args, model, **managers))
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
        iterator._sync_num_microbatches(None, data)
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
