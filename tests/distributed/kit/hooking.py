"""What is put in place of frameworks' batching, called as they call it, and jobs about it.

`kit.slime` and `kit.verl_engine` run the frameworks themselves, from checkouts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from kit.calls import Calls, error_of, on_all_ranks
from kit.model import arguments
from kit.objective import difference, log_probs_by_lengths
from mcore_batching.batch import DEFAULT_SCHEMA, Kind
from mcore_batching.integrations.slime import trainer
from mcore_batching.megatron import compat
from mcore_batching.planning import ParallelDims
from mcore_batching.planning.integers import round_up

PAD_MULTIPLIER = 4
LOG_PROBS = 2e-6
"""Both sides compute in float32 over rows that are padded differently, as in `test_exactness`."""


class Listed:
    """As slime's own iterator."""

    def __init__(self, rollout_data: dict[str, Any], micro_batch_indices: Any) -> None:
        self.rollout_data, self.offset = rollout_data, 0
        self.micro_batch_indices = micro_batch_indices

    def get_next(self, keys: Sequence[str]) -> dict[str, Any]:
        indices = self.micro_batch_indices[self.offset]
        self.offset += 1
        data = self.rollout_data
        return {k: None if data.get(k) is None else [data[k][i] for i in indices] for k in keys}

    def reset(self) -> None:
        self.offset = 0


def listed_iterators(rollout_data: dict[str, Any]) -> Any:
    """With placeholders."""
    return trainer.listed_iterators(
        DEFAULT_SCHEMA, lambda data: [Listed(data, data["micro_batch_indices"])], rollout_data
    )


def _own_forward_only(
    f: Any, args: Any, model: list[Any], data_iterator: Sequence[Any], num_microbatches: Any
) -> dict[str, list[torch.Tensor]]:
    """A pass over listed micro-batches, as slime's and miles' trainers run it: without
    placeholders, and with outputs put into the samples' order by what it finds."""
    for iterator in data_iterator:
        iterator.reset()

    def forward_step(iterator: Any, chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        names = ("total_lengths", "response_lengths")
        batch = iterator.get_next(["tokens", *names])
        row = torch.cat([tokens.to(torch.cuda.current_device()) for tokens in batch["tokens"]])
        multiple = parallel_state.get_tensor_model_parallel_world_size()
        row = torch.nn.functional.pad(row, (0, -len(row) % multiple))
        ends = [0, *torch.tensor(batch["total_lengths"]).cumsum(0).tolist()]
        ends[-1] = len(row)
        places = torch.tensor(ends, dtype=torch.int32, device=row.device)
        output = chunk(
            input_ids=row[None],
            position_ids=None,
            attention_mask=None,
            packed_seq_params=compat.packed_seq_params(places, len(row), ends),
        )
        lengths = {name: batch[name] for name in names}
        return output, functools.partial(f, unconcat_tokens=batch["tokens"], **lengths)

    store: list[dict[str, list[torch.Tensor]]] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=list(data_iterator),
        model=model,
        num_microbatches=sum(num_microbatches),
        seq_length=1,
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=args.collects_outputs,  # miles does, slime takes them for losses
    )
    if not parallel_state.is_pipeline_last_stage():
        return {}
    samples = [sample for each in data_iterator[0].micro_batch_indices for sample in each]
    made = {}
    for name in store[0]:
        values = [value for outputs in store for value in outputs[name]]
        made[name] = [None] * len(values)
        for sample, value in zip(samples, values, strict=False):
            made[name][sample] = value
    return made


listed_forward_only = functools.partial(trainer.forward_only, _own_forward_only)
"""The same with `mcore_batching.hook`."""


def slime_plans_where_it_trains(dims: ParallelDims, spread: str = "uneven") -> None:
    """Each rank's own samples under the cap, as many micro-batches on all, drawn as they are by
    then; log-probs are the engine's."""
    calls = Calls(dims, spread)
    data = dict(calls.data) | {"dynamic_global_batch_size": 13}
    args = arguments(
        dims,
        use_dynamic_batch_size=True,
        data_pad_size_multiplier=PAD_MULTIPLIER,
        dynamic_batch_fill="placeholder",
        collects_outputs=False,
    )
    schema = DEFAULT_SCHEMA.declare("bonus", Kind.PER_TOKEN)
    iterators, (count,) = trainer.planned_iterators(
        schema, Listed, error_of, args, calls.model, data
    )
    [first, *_], lengths = iterators, data["total_lengths"]
    assert on_all_ranks(count) == [count] * dist.get_world_size()
    indices = first.micro_batch_indices
    assert sorted(i for each in indices for i in each) == list(range(len(lengths)))
    ranks, cut = dims.context_parallel * dims.tensor_parallel, 2 * dims.context_parallel
    for samples in indices:
        row = sum(round_up(lengths[i], cut if cut > 2 else 1) for i in samples)
        cap = args.max_tokens_per_gpu * dims.context_parallel
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
    if dims.context_parallel > 1:
        return
    listed = listed_iterators({**calls.data, "micro_batch_indices": indices})
    expected = calls.forward().get("log_probs", [])
    for each in (iterators, listed):
        passed = log_probs_by_lengths, args, calls.model, each, [count]
        found = listed_forward_only(*passed).get("log_probs", [])
        for ours, theirs in zip(found, expected, strict=True):
            assert difference(ours, theirs) < LOG_PROBS
