"""A forward pass over listed micro-batches, as slime's and miles' trainers run it: without
placeholders, and with outputs put into the samples' order by what it finds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mcore_batching.batch import DEFAULT_SCHEMA
from mcore_batching.integrations.slime import trainer
from mcore_batching.megatron import compat

LENGTHS = ("total_lengths", "response_lengths")


class Listed:
    """As slime's own iterator."""

    def __init__(self, rollout_data: dict[str, Any], micro_batch_indices: Any) -> None:
        self.rollout_data, self.offset = rollout_data, 0
        self.micro_batch_indices = micro_batch_indices

    def get_next(self, keys: Sequence[str]) -> dict[str, Any]:
        indices = self.micro_batch_indices[self.offset]
        self.offset += 1
        found = {key: self.rollout_data.get(key) for key in keys}
        return {key: values and [values[i] for i in indices] for key, values in found.items()}

    def reset(self) -> None:
        self.offset = 0


def iterators_of(rollout_data: dict[str, Any]) -> Any:
    """With placeholders."""
    return trainer.listed_iterators(
        DEFAULT_SCHEMA, lambda data: [Listed(data, data["micro_batch_indices"])], rollout_data
    )


def _own_forward_only(
    f: Any, args: Any, model: list[Any], data_iterator: Sequence[Any], num_microbatches: Any
) -> dict[str, list[Tensor]]:
    for iterator in data_iterator:
        iterator.reset()

    def forward_step(iterator: Any, chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        batch = iterator.get_next(["tokens", *LENGTHS])
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
        lengths = {name: batch[name] for name in LENGTHS}
        return output, functools.partial(f, unconcat_tokens=batch["tokens"], **lengths)

    store: list[dict[str, list[Tensor]]] = get_forward_backward_func()(
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


forward_only = functools.partial(trainer.forward_only, _own_forward_only)
"""The same with `mcore_batching.hook`."""
