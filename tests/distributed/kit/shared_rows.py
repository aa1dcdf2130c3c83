"""Jobs under dynamic CP, whose rows have context-parallel sizes of their own."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.attention import SelfAttention
from megatron.core.utils import unwrap_model

from kit import exactness
from kit.calls import my_samples, small_model
from kit.cpu_kernels import stand_in_for_kernels
from kit.model import adam
from kit.objective import packed_objective
from kit.stand_ins import stood_in
from mcore_batching.batch import (
    DEFAULT_SCHEMA,
    Kind,
    PackedMicroBatch,
    StepTotals,
    token_mean,
)
from mcore_batching.megatron import (
    DynamicBatchArgumentError,
    add_fields,
    check_settings,
    forward_only,
    get_data_iterator,
    response_log_probs,
    schedule_of,
    train_step,
)
from mcore_batching.megatron.iterator import plan_forward_passes, rollout_of
from mcore_batching.megatron.job import job_of
from mcore_batching.megatron.options import Options
from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.megatron.topology import is_last_stage
from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    StepPlan,
    tree_planner,
    worker,
)
from mcore_batching.planning.prefix_trees import Forest

SIZES = {
    2: ((2, 2), (1, 1), (2, 2), (1, 1)),
    4: ((4, 4, 4, 4), (1, 1, 2, 2), (2, 2, 1, 1), (1, 1, 1, 1)),
}
"""Ranks to the context-parallel size of each rank's row, slot by slot: sizes change from slot to
slot, and differ within one. As many slots as PP2 x VPP2 takes."""


def there_and_back(
    dims: dict[str, Any], reference: str, spread: str, planner: dict[str, Any]
) -> dict[str, Any]:
    """Values that go with samples to the ranks that run them, and come back as outputs.

    Returns:
        ``equal``: by name, True if all came back to their places; ``trained``: samples of each of
        three steps; ``moved``: samples that this rank runs and did not bring; ``saved``: tokens
        that it does not compute, as samples share them; ``last_stage``; ``forward_rows``:
        micro-batches of forward passes that hold samples.
    """
    model = small_model(dims, reference)
    args = exactness.arguments(ParallelDims(**dims), global_batch_size=5, **planner)
    data = my_samples(dims, spread)
    rank, count = parallel_state.get_data_parallel_rank(), len(data["tokens"])
    data["source"] = [float(100 * rank + i) for i in range(count)]
    data["image"] = [{"pixels": torch.full((i, 2), float(rank))} for i in range(count)]
    schema = DEFAULT_SCHEMA.declare("image", Kind.METADATA)
    iterators, counts = get_data_iterator(args, model, data, schema=schema)

    def f(logits: torch.Tensor, *, micro_batch: PackedMicroBatch) -> dict[str, Any]:
        numbers = range(len(micro_batch.total_lengths))
        images = [micro_batch["image"][i] or {"pixels": torch.zeros(0, 2)} for i in numbers]
        return {
            "tokens": list(micro_batch["tokens"]),
            "source": [torch.tensor(each, dtype=torch.float64) for each in micro_batch["source"]],
            "long": [torch.as_tensor(tokens) > 30 for tokens in micro_batch["tokens"]],
            "pixels": [each["pixels"].bfloat16() for each in images],
            "weight": [torch.as_tensor(each) for each in micro_batch["weight"]],
            # As the log-prob of a response of one token lies beside its entropy.
            "beside": [torch.tensor([[each, 0.0]])[:, 0] for each in micro_batch["source"]],
        }

    weights = [torch.rand(length) for length in data["response_lengths"]]
    add_fields(iterators, {"weight": weights})
    outputs = forward_only(f, args, model, iterators, counts)
    # As a frozen reference model is run, which nothing was planned with.
    scored = [
        forward_only(exactness.log_probs_of, args, each, iterators, counts).get("log_probs", [])
        for each in (model, small_model(dims, reference))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*scored, strict=True))
    expected = {
        "tokens": data["tokens"],
        "source": [torch.tensor(each, dtype=torch.float64) for each in data["source"]],
        "long": [tokens > 30 for tokens in data["tokens"]],
        "pixels": [each["pixels"].bfloat16() for each in data["image"]],
        "weight": weights,
        "beside": [torch.tensor([each]) for each in data["source"]],
    }
    optimizer = adam(model, distributed=False)
    trained = [
        train_step(packed_objective, args, model, iterators, counts, optimizer, step=step)
        for step in range(len(counts))
    ]
    held = iterators[0].rollout_data["source"]
    forward = plan_forward_passes(rollout_of(iterators), job_of(args), model)
    return {
        "last_stage": is_last_stage(),
        "equal": {
            name: len(values) == count
            and all(
                a.dtype == b.dtype and torch.equal(a, b)
                for a, b in zip(values, expected[name], strict=True)
            )
            for name, values in outputs.items()
        },
        "trained": [result.totals.num_samples for result in trained],
        "forward_rows": sum(bool(row) for row in forward.micro_batches),
        "moved": len(set(held) - set(data["source"])),
        "saved": _saved(schedule_of(iterators)),
    }


def _saved(schedule: MicroBatchSchedule) -> int:
    """Tokens that this rank does not compute, as samples share them."""
    forest = schedule.forest
    return 0 if forest is None else sum(schedule.own_lengths) - forest.tokens


def silent_placeholders(dims: dict[str, Any], reference: str) -> list[Any]:
    """The metrics of a step of one short sample, whose loss asks for nothing in placeholders, and
    the samples of each of this rank's rows."""
    model = small_model(dims, reference)
    args = exactness.arguments(ParallelDims(**dims), dynamic_batch_context_parallel=2)
    data = {name: values[:1] for name, values in my_samples(dims).items()}
    iterators, counts = get_data_iterator(args, model, data)

    def loss(logits: torch.Tensor, row: PackedMicroBatch, totals: StepTotals) -> Any:
        if row.is_placeholder:
            return logits.new_zeros(()), {"policy": logits.new_zeros(())}
        share = token_mean(response_log_probs(logits, row), row, totals)
        return share, {"policy": share}

    done = train_step(loss, args, model, iterators, counts, adam(model, distributed=False))
    return [done.metrics, [len(row) for row in schedule_of(iterators).steps[0]]]


def refused_models(dims: dict[str, Any], reference: str) -> None:
    """Models whose layers do not follow a row's own group are refused, each by what it has."""

    class OwnAttention(SelfAttention):  # type: ignore[misc]
        pass

    def other_positions(bare: Any) -> str:
        bare.position_embedding_type = "mrope"
        return "position embeddings mrope slice by a fixed"

    def other_core(bare: Any) -> str:
        bare.decoder.layers[1].self_attention.core_attention = torch.nn.Identity()
        return "layers.1.self_attention, a SelfAttention with Identity, is not"

    def other_layer(bare: Any) -> str:
        bare.decoder.layers[2].self_attention.__class__ = OwnAttention
        return "layers.2.self_attention, a OwnAttention with PackedAttention"

    def state_space(bare: Any) -> str:
        with stood_in("triton"):
            from megatron.core.ssm.mamba_mixer import MambaMixer
        stand_in_for_kernels()
        mixer = object.__new__(MambaMixer)
        torch.nn.Module.__init__(mixer)
        bare.decoder.layers[3].mixer = mixer
        return "layers.3.mixer is a state-space layer"

    args = exactness.arguments(ParallelDims(**dims), dynamic_batch_context_parallel=1)
    for change in (other_positions, other_core, other_layer, state_space):
        model = small_model(dims, reference)
        check_settings(args, model)
        text = change(unwrap_model(model[0]))
        with pytest.raises(DynamicBatchArgumentError) as refused:
            check_settings(args, model)
        assert text in str(refused.value)
        assert "unset --dynamic-batch-context-parallel" in str(refused.value)


@contextlib.contextmanager
def mixed_sizes() -> Iterator[None]:
    """Plan as `SIZES` says, whatever the samples, under a cap at which that is legal."""
    planner_config = Options.planner_config

    def with_larger_cap(options: Options, dims: ParallelDims) -> PlannerConfig:
        config = planner_config(options, dims)
        return dataclasses.replace(config, max_tokens_per_gpu=1000, fill="placeholder")

    with (
        mock.patch.object(worker, "plan_step", _mixed_plan),
        mock.patch.object(worker, "plan_forest", _mixed_forest),
        mock.patch.object(Options, "planner_config", with_larger_cap),
    ):
        yield


def _mixed_forest(
    forest: Forest, dims: ParallelDims, config: PlannerConfig, *unused: Any, **named: Any
) -> StepPlan:
    """The same of whole prefix trees."""
    trees, *_ = tree_planner._candidates(forest, dims, config, CostModel())
    plan = _mixed_plan([tree.size for tree in trees], dims, config)
    return tree_planner._of_samples(plan, trees)


def _mixed_plan(
    lengths: Sequence[int], dims: ParallelDims, config: PlannerConfig, *unused: Any, **named: Any
) -> StepPlan:
    del unused, named
    slots = SIZES[dims.data_context_parallel]
    rows = [
        (size, slot, rank)
        for slot, sizes in enumerate(slots)
        for rank, size in enumerate(sizes)
        if rank % size == 0
    ]
    # The longest samples share ranks; one rank has a placeholder.
    rows.sort(key=lambda row: -row[0])
    rows.remove((1, 1, 0))
    longest = sorted(range(len(lengths)), key=lambda sample: -lengths[sample])
    micro_batches: list[list[tuple[int, ...]]] = [[()] * len(slots) for _ in slots[0]]
    for number, (size, slot, first) in enumerate(rows):
        for rank in range(first, first + size):
            micro_batches[rank][slot] = tuple(sorted(longest[number :: len(rows)]))
    sizes_by_rank = tuple(
        tuple(sizes[rank] if micro_batches[rank][slot] else 1 for slot, sizes in enumerate(slots))
        for rank in range(dims.data_context_parallel)
    )
    return StepPlan(
        micro_batches=tuple(map(tuple, micro_batches)),
        num_microbatches=len(slots),
        sample_indices=tuple(range(len(lengths))),
        dims=dims,
        config=config,
        context_parallel=sizes_by_rank,
    )
