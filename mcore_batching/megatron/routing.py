"""Experts that the inference engine routed tokens to, replayed in training.

An engine with kernels that round otherwise routes some tokens of a rollout to other experts than
training does. Megatron replays recorded routing in models built with ``moe_enable_routing_replay``:
each router then takes the given experts. Here they are those of a packed row's tokens:

    a sample's field    ``[tokens - 1, layers, top_k]``, no experts for the last token
    a row               ``[1, T_local, layers, top_k]``, packed and cut like its tokens
    a router            ``[its tokens, top_k]``: its layer; under sequence parallelism its part

A layer that is recomputed runs its router once more in the backward pass. Backward passes of a
model chunk take turns as its forward passes did, for which Megatron keeps the experts in a queue.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron.core.utils import get_model_config
from torch import Tensor

from mcore_batching.batch import Kind, PackedMicroBatch, SchemaError
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.row import spread_experts
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.schedule import MicroBatchSchedule


def is_replayed(model: Sequence[Any]) -> bool:
    """True if the model's routers can replay recorded experts."""
    config = get_model_config(model[0])
    return bool(config.num_moe_experts and getattr(config, "moe_enable_routing_replay", False))


def check_replay(model: Sequence[Any], schedule: MicroBatchSchedule, step: int) -> None:
    """Check the routed experts of this rank's samples of a step, where the model replays them.

    Raises:
        SchemaError: for layers or experts that the model does not have.
        DynamicBatchArgumentError: the model's routers do not ask for what is replayed, or several
            fields hold routed experts.
    """
    name = _field_of(schedule.rollout_data) if is_replayed(model) else None
    if name is None:
        return
    config, values = get_model_config(model[0]), schedule.rollout_data[name]
    top_k, experts = config.moe_router_topk, config.num_moe_experts
    depths = sorted({len(each) for each in _columns(config)}, reverse=True)
    # The fused kernel chooses experts itself, and would train on without a word.
    if getattr(config, "moe_router_fusion", False):
        raise DynamicBatchArgumentError(
            "fused routers do not replay; unset --moe-router-fusion or --moe-enable-routing-replay"
        )
    for index in (i for row in schedule.steps[step] for i in row):
        value = values[index]
        if tuple(value.shape[1:]) not in [(depth, top_k) for depth in depths]:
            raise SchemaError(
                name,
                expected=f"experts of {' or '.join(map(str, depths))} layers, {top_k} for each "
                "token (--moe-router-topk)",
                found=f"shape {list(value.shape)} of {schedule.names_of([index])}",
            )
        # On a GPU an expert that is not there is a failed kernel, without the sample's name.
        if value.numel() and not 0 <= int(value.min()) <= int(value.max()) < experts:
            raise SchemaError(
                name,
                expected=f"experts from 0 to {experts - 1} (--num-experts)",
                found=f"{int(value.min())} to {int(value.max())} of {schedule.names_of([index])}",
            )


def _columns(config: Any) -> list[dict[int, int]]:
    """From a layer's number, from 1, to its place in the field: of all layers, and of those with
    experts alone."""
    # Megatron's option is a period, or a list with a 1 for each layer that has experts.
    every = config.moe_layer_freq
    layers = range(config.num_layers)
    routed = [n for n in layers if (every[n] if isinstance(every, list) else n % every == 0)]
    return [{n + 1: n for n in layers}, {n + 1: place for place, n in enumerate(routed)}]


def _field_of(fields: Columns) -> str | None:
    names = [name for name in fields if fields.schema[name].kind is Kind.ROUTED_EXPERTS]
    if len(names) > 1:
        raise DynamicBatchArgumentError(
            f"fields {' and '.join(names)} all hold routed experts; declare the one to replay as "
            "Kind.ROUTED_EXPERTS, the other ones as Kind.METADATA"
        )
    return names[0] if names else None


@contextlib.contextmanager
def replayed_step(model: Sequence[Any]) -> Iterator[None]:
    """Clear the routers of a pipeline's recorded experts when it ends."""
    try:
        yield
    finally:
        # Also after a failure: the next forward pass, perhaps of an evaluation, routes by itself.
        for chunk in model if is_replayed(model) else ():
            for router in _routers(chunk):
                router.router_replay.clear_router_replay_action()
                router.router_replay.clear_indices()


@contextlib.contextmanager
def replayed(chunk: Any, row: PackedMicroBatch) -> Iterator[None]:
    """Let a chunk's routers take the experts of a row on the device in its forward pass, and when
    it is recomputed."""
    name = _field_of(row.fields) if is_replayed([chunk]) else None
    if name is None:
        yield
        return
    config = get_model_config(chunk)
    # Engines record in few bytes; Megatron gathers by these numbers, which takes int64.
    recorded = _experts(row, name, config)
    if config.sequence_parallel:
        # Each tensor-parallel rank routes its part of the tokens.
        size = parallel_state.get_tensor_model_parallel_world_size()
        recorded = recorded.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
    # Engines record all layers, or those with experts alone; `_check` let in nothing else.
    column = next(each for each in _columns(config) if len(each) == recorded.shape[1])
    routers = _routers(chunk)
    for router in routers:
        router.router_replay.set_target_indices(recorded[:, column[router.layer_number]])
        router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    yield
    # A router that runs from now on recomputes its layer, and takes the oldest row of its queue.
    for router in routers:
        router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)


def _experts(row: PackedMicroBatch, name: str, config: Any) -> Tensor:
    """int64 ``[T_local, layers, top_k]``"""
    if not row.is_placeholder:
        return row.packed(name)[0].long()
    # A rank that has never had a sample does not have the number of layers from any.
    positions = torch.arange(row.tokens.shape[1], device=row.tokens.device)
    slots = spread_experts(positions, config.moe_router_topk, config.num_moe_experts)
    return slots[:, None].expand(-1, config.num_layers, -1)


def _routers(chunk: Any) -> list[Any]:
    # Those of multi-token prediction route by themselves: no engine records them.
    return [
        module
        for name, module in chunk.named_modules()
        if getattr(module, "router_replay", None) is not None and "mtp" not in name.split(".")
    ]
