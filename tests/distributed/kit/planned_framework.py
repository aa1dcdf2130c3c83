"""A framework whose rollout data come with their micro-batches, for `mcore_batching.hook`.

Its functions stay under the hook: the batching is as plain as in the field, and `forward_only` puts
outputs into the samples' order by what it finds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mcore_batching.megatron import compat


class _Iterator:
    def __init__(self, rollout_data: dict[str, Any]) -> None:
        self.rollout_data = rollout_data
        self.micro_batch_indices = rollout_data["micro_batch_indices"]
        self.offset = 0

    def get_next(self, keys: Sequence[str]) -> dict[str, Any]:
        indices = self.micro_batch_indices[self.offset]
        self.offset += 1
        return {key: [self.rollout_data[key][i] for i in indices] for key in keys}

    def reset(self) -> None:
        self.offset = 0


def get_data_iterator(rollout_data: dict[str, Any]) -> list[_Iterator]:
    return [_Iterator(rollout_data)]


def get_batch(data_iterator: Any, keys: Sequence[str]) -> dict[str, Any]:
    batch: dict[str, Any] = data_iterator.get_next(keys)
    row = torch.cat([tokens.to(torch.cuda.current_device()) for tokens in batch["tokens"]])
    multiple = parallel_state.get_tensor_model_parallel_world_size()
    row = torch.nn.functional.pad(row, (0, -len(row) % multiple))
    ends = [0, *torch.tensor(batch["total_lengths"]).cumsum(0).tolist()]
    ends[-1] = len(row)
    places = torch.tensor(ends, dtype=torch.int32, device=row.device)
    batch["packed_seq_params"] = compat.packed_rows.packed_seq_params(places, len(row), ends)
    return batch | {"row": row[None]}


def forward_only(
    f: Callable[..., Any],
    args: Any,
    model: list[Any],
    data_iterator: Sequence[Any],
    num_microbatches: Sequence[int],
    store_prefix: str = "",
) -> dict[str, list[Tensor]]:
    for iterator in data_iterator:
        iterator.reset()

    def forward_step(iterator: Any, chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        batch = get_batch(iterator, ["tokens", "total_lengths", "response_lengths"])
        output = chunk(
            input_ids=batch["row"],
            position_ids=None,
            attention_mask=None,
            packed_seq_params=batch["packed_seq_params"],
        )
        of_batch = functools.partial(
            f,
            args=args,
            unconcat_tokens=batch["tokens"],
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
        )
        return output, of_batch

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
        ordered: list[Any] = [None] * len(values)
        for sample, value in zip(samples, values, strict=False):
            ordered[sample] = value
        made[store_prefix + name] = ordered
    return made
