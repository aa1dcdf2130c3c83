"""Jobs with hooked frameworks: one that batches by functions of its own, beside the engine itself;
and those that hold a model.

Both sides compute in float32 over rows that are padded differently; tolerances as in
`test_exactness`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

import mcore_batching
from kit import framework
from kit.calls import small_model
from kit.exactness import arguments, difference, log_probs_of
from kit.guarantees import error_of, is_last_rank, on_all_ranks
from kit.model import adam, named_parameters
from kit.samples import make_samples, share, take
from mcore_batching.batch import (
    DEFAULT_SCHEMA,
    Kind,
    PackedMicroBatch,
    SchemaError,
    StepTotals,
    sample_mean,
    token_mean,
)
from mcore_batching.integrations.skyrl import iterator
from mcore_batching.integrations.slime.trainer import checking_model
from mcore_batching.integrations.verl import micro_batches
from mcore_batching.megatron import (
    forward_only,
    get_data_iterator,
    response_log_probs,
    train_step,
)
from mcore_batching.megatron.topology import is_last_stage
from mcore_batching.planning import ParallelDims, PlannerConfig, Problem
from mcore_batching.planning.local import fill_local, least_count, pack_local

PAD_MULTIPLIER = 4
LOG_PROBS = 2e-6
GRADIENTS = 2e-5


def equals_the_engine(
    dims: dict[str, Any],
    reference: str,
    spread: str = "uneven",
    per_token_loss: bool = True,
    **planner: Any,
) -> None:
    """One step of the hooked framework is one of the engine.

    The framework knows nothing of placeholders and counts at least one token a sample.
    """
    shape = ParallelDims(**dims)
    samples = make_samples()
    # A response that is the whole sample has a first token that nothing predicts; functions that
    # find tokens by lengths do not provide for it.
    lengths = zip(samples["total_lengths"], samples["response_lengths"], strict=True)
    usual = [i for i, (total, response) in enumerate(lengths) if response < total]
    samples = take(samples, usual)
    replica = parallel_state.get_data_parallel_rank()
    mine = take(samples, share(samples, spread, replica, shape.data_parallel))
    args = arguments(
        shape,
        global_batch_size=len(usual),
        data_pad_size_multiplier=PAD_MULTIPLIER,
        qkv_format="thd",
        calculate_per_token_loss=per_token_loss,
        dynamic_batch_fill="placeholder",
        **planner,
    )
    model = small_model(dims, reference, calculate_per_token_loss=per_token_loss)
    reports, log_probs = _framework_step(args, model, dict(mine))
    gradients = [parameter.main_grad.clone() for _, parameter in named_parameters(model)]
    model = small_model(dims, reference, calculate_per_token_loss=per_token_loss)
    expected, expected_gradients = _engine_step(args, model, per_token_loss, dict(mine))
    scale = 1.0
    if per_token_loss:
        tokens, clamped = _counted_tokens(samples)
        scale = tokens / clamped
        # A sample without a trainable token counts as one in this framework, a placeholder not.
        counted = sum(int(report["loss"][-1]) for report in reports)
        assert counted == (_counted_tokens(mine)[1] if is_last_stage() else 0)
    for ours, theirs in zip(log_probs, expected, strict=True):
        assert difference(ours, theirs) < LOG_PROBS
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert difference(ours, theirs * scale) < GRADIENTS


def _counted_tokens(samples: dict[str, Any]) -> tuple[int, int]:
    """Trainable tokens, and as the framework counts them."""
    counts = [int(mask.sum()) for mask in samples["loss_masks"]]
    return sum(counts), sum(max(1, count) for count in counts)


def _framework_step(
    args: Any, model: list[Any], data: dict[str, Any]
) -> tuple[list[Any], list[Tensor]]:
    """Reports of all micro-batches, and log-probs of the whole responses."""
    with mcore_batching.hook(framework):
        iterators, counts = framework.get_data_iterator(args, model, data)
        (count,) = counts
        assert on_all_ranks(count) == [count] * torch.distributed.get_world_size()
        if parallel_state.get_data_parallel_rank() == 1:
            assert [] in iterators[0].micro_batch_indices  # a placeholder
        iterators[0].get_next(["tokens"])  # forward_only begins at the beginning
        made = framework.forward_only(framework.log_probs, args, model, iterators, counts)
        assert iterators[0].offset == 0
        # What frameworks do: fields on the last stage alone, this rank's part of the tokens.
        lengths = data["total_lengths"], data["response_lengths"]
        assert made.keys() == ({"log_probs"} if is_last_stage() else set())
        if is_last_stage():
            data |= made
            pairs = zip(data["advantages"], *lengths, strict=True)
            data["advantages"] = [framework.own_part(*each) for each in pairs]
        reports = framework.train_one_step(args, iterators, model, count)
        assert [iterator.offset for iterator in iterators] == [count] * len(iterators)
    parts = zip(data.get("log_probs", []), *lengths, strict=is_last_stage())
    return reports, [_whole(*each) for each in parts]


def _engine_step(
    args: Any, model: list[Any], per_token_loss: bool, data: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs and gradients."""
    optimizer = adam(model, distributed=False)
    iterators, counts = get_data_iterator(args, model, data)
    made = forward_only(log_probs_of, args, model, iterators, counts)
    mcore_batching.megatron.add_fields(iterators, made)
    mean = token_mean if per_token_loss else sample_mean

    def loss(
        logits: Tensor, row: PackedMicroBatch, totals: StepTotals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        values = zip(
            response_log_probs(logits, row), row["log_probs"], row["advantages"], strict=True
        )
        return mean([-(n - old).exp() * advantage for n, old, advantage in values], row, totals), {}

    # The update clips gradients in place; what it clips is compared.
    captured: list[Tensor] = []
    update = optimizer.step

    def step() -> Any:
        captured.extend(parameter.main_grad.clone() for _, parameter in named_parameters(model))
        return update()

    optimizer.step = step
    train_step(loss, args, model, iterators, counts, optimizer)
    return made.get("log_probs", []), captured


def _whole(part: Tensor, total_length: int, response_length: int) -> Tensor:
    """One value a response token from the parts of all context-parallel ranks."""
    (pieces,) = framework.predicted([total_length], [response_length])
    whole = part.new_zeros(response_length)
    begin, first = 0, total_length - response_length - 1
    for _, start, end in pieces:
        whole[start - first : end - first] = part[begin : begin + end - start]
        begin += end - start
    assert begin == len(part)
    torch.distributed.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    return whole


def batches(dims: dict[str, Any], reference: str) -> None:
    """What the hooked ``get_batch`` returns: two ranks, the second without a sample."""
    shape = ParallelDims(**dims)
    args = arguments(shape, data_pad_size_multiplier=PAD_MULTIPLIER)
    args.max_tokens_per_gpu = 24
    empty = parallel_state.get_data_parallel_rank() == 1
    names = ["tokens", "total_lengths", "response_lengths", "loss_masks"]
    data: dict[str, Any] = {name: make_samples()[name][8:12] for name in names}
    data["multimodal_train_inputs"] = [None, {"pixels": torch.ones(2, 3)}, {}, None]
    data["multimodal_train_inputs"][2] = {"pixels": torch.zeros(1, 3)}
    data = {name: values[: 0 if empty else None] for name, values in data.items()}
    data["dynamic_global_batch_size"] = 4
    keys = [*names, "multimodal_train_inputs", "bonus", "values"]
    schema = DEFAULT_SCHEMA.declare("bonus", Kind.PER_TOKEN)
    with mcore_batching.hook(framework, schema=schema):
        iterators, (count,) = framework.get_data_iterator(args, small_model(dims, reference), data)
        data["bonus"] = [torch.ones(n) for n in data["total_lengths"]]  # since planning
        # As they are when drawn: all ones, which they were not when planned.
        data["loss_masks"] = [torch.ones_like(mask) for mask in data["loss_masks"]]
        made = [framework.get_batch(iterators[0], keys, PAD_MULTIPLIER) for _ in range(count)]
        with pytest.raises(IndexError):
            framework.get_batch(iterators[0], keys)
        iterators[0].reset()
        row = framework.get_batch(iterators[0], keys, 3 * PAD_MULTIPLIER)["tokens"]
        assert row.shape[1] % (3 * PAD_MULTIPLIER) == 0
        data["secret"] = [1.0] * len(data["tokens"])
        with pytest.raises(SchemaError, match=r'schema = schema.declare\("secret"'):
            framework.get_batch(iterators[0], [*keys, "secret"])  # whoever has samples
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
        assert row[: sum(lengths)].tolist() == torch.cat(tokens).tolist()
        assert len(row) == batch["packed_seq_params"].cu_seqlens_q[-1]
        assert len(row) % PAD_MULTIPLIER == 0
        assert len(row) <= args.max_tokens_per_gpu or len(of_row) == 1
        assert (masks.shape, masks.dtype) == ((1, len(row)), torch.int32)
        sums = [mask.sum() for mask in batch["loss_masks"]]
        assert masks.sum() == sum(sums)
        # A placeholder's mask counts no token, also where each sample counts at least one.
        assert bool(sum(torch.clamp_min(each, 1) for each in sums)) == bool(of_row)
        assert batch["values"] is None
        assert batch["dynamic_global_batch_size"] == 4
        assert [len(each) for each in batch["bonus"]] == lengths
        trainable += int(sum(sums))
        pixels += batch["multimodal_train_inputs"].get("pixels", torch.zeros(0)).tolist()
    assert trainable == sum(data["response_lengths"])
    assert sorted(pixels) == ([] if empty else [[0.0] * 3, [1.0] * 3, [1.0] * 3])


def positions(dims: dict[str, Any], reference: str) -> None:
    """Models that see images find positions themselves; others are given them."""
    model = small_model(dims, reference)
    args = arguments(ParallelDims(**dims))
    seen: list[bool] = []
    forward = model[0].module.forward

    def spy(*arguments: Any, position_ids: Any = None, **keywords: Any) -> Any:
        seen.append(position_ids is not None)
        return forward(*arguments, position_ids=position_ids, **keywords)

    model[0].module.forward = spy
    for images in (False, True, False):
        data = take(make_samples(), [0, 5])
        if images:
            data["multimodal_train_inputs"] = [None, None]
        with mcore_batching.hook(framework):
            iterators, counts = framework.get_data_iterator(args, model, data)
            framework.forward_only(framework.log_probs, args, model, iterators, counts)
        assert {*seen} == {not images}
        seen.clear()


def framework_shows_model(dims: dict[str, Any], reference: str) -> None:
    """A model that a framework shows on one stage, and that overlaps communication on the last, is
    refused on all; a right one is its own matter, with its own plan and the manager's."""
    args = arguments(ParallelDims(**dims), use_dynamic_batch_size=True)

    def its_own(args: Any, model: Any, rollout_data: Any) -> str:
        return "its own"

    hooked, model = checking_model(its_own, its_own), small_model(dims, reference)
    own, managers = {"rollout_data": {}}, {"rollout_data": {"micro_batch_indices": []}}
    assert hooked(args, model, **own) == hooked(args, model, **managers) == "its own"
    model = _overlapping_on_the_last(dims, reference)
    assert hooked(args, model, **own) == "its own"
    said = error_of(lambda: hooked(args, model, **managers))
    assert said.startswith("PlanningFailedError")
    assert "rank 1" in said
    assert "unset --tp-comm-overlap" in said


def _overlapping_on_the_last(dims: dict[str, Any], reference: str) -> list[Any]:
    model = small_model(dims, reference)
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
        return micro_batches.rearrange_micro_batches(None, batch, _CAP, group)[1]

    def skyrl(self) -> Any:
        data = SimpleNamespace(_token_counts=_LENGTHS, _max_tokens_per_microbatch=_CAP)
        iterator._sync_num_microbatches(None, data)
        return data._microbatches


def framework_holds_model(dims: dict[str, Any], reference: str) -> None:
    """The model of verl and SkyRL is packed by the rule, or refused on all stages."""
    micro_batches._select = lambda batch, samples: samples  # verl's, which is not here
    problem = Problem.of(_LENGTHS, ParallelDims(**dims), PlannerConfig(max_tokens_per_gpu=_CAP))
    packed = pack_local(problem)
    plan = [list(row) for row in fill_local(problem, packed, least_count(problem, packed))]
    for call in (_Framework.verl, _Framework.skyrl):
        assert call(_Framework(small_model(dims, reference))) == plan
        wrong = _Framework(_overlapping_on_the_last(dims, reference))
        said = error_of(lambda call=call, wrong=wrong: call(wrong))
        assert said.startswith("RankFailedError")
        assert "rank 1" in said
        assert "unset --tp-comm-overlap" in said
