"""Settings and models whose backward passes cannot be split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.utils import get_model_config

from mcore_batching.flags import FLAGS
from mcore_batching.megatron import compat
from mcore_batching.megatron.errors import refuse
from mcore_batching.megatron.job.options import Options
from mcore_batching.planning import ParallelDims

_FLAG = FLAGS["split_backward"]
_REFUSED = {
    "delay_wgrad_compute": "Megatron would delay weight gradients itself",
    "overlap_dispatch_backward_with_experts_wgrad": "Megatron would delay weight gradients itself",
    "moe_shared_expert_overlap": "weight gradients of shared experts hide their communication",
    "use_ring_exchange_p2p": "ring exchanges are waited for where they are posted",
}
"""Fields of the model's configuration, flags of the same names, and what is wrong with each."""
_REFUSED_SHARDS = {
    "gtp_weight_remat_size": "--tensor-parallel-num-weight-shards",
    "expert_gtp_weight_remat_size": "--expert-tensor-parallel-num-weight-shards",
}
"""Fields of generalized tensor parallelism, with flags."""
_REFUSED_WRAPPERS = {
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "use_custom_fsdp": "--use-custom-fsdp",
}
"""Fields of the wrapper's configuration, whose gradients are nowhere as a whole, with flags."""


def check_split_backward(options: Options, chunks: list[Any], dims: ParallelDims) -> None:
    """Refuse what ``--dynamic-batch-split-backward`` cannot run with. Does nothing without it, and
    without pipeline stages, where it has no effect.

    Raises:
        DynamicBatchArgumentError: listing every problem with what to set instead.
    """
    if options.splits_backward and dims.pipeline_parallel > 1:
        refuse(_FLAG, split_problems(options, chunks))


def split_problems(options: Options, chunks: list[Any]) -> Iterator[str]:
    """Reasons why a model's backward passes cannot be split, each with what to set instead."""
    config = get_model_config(chunks[0])
    for name, reason in _REFUSED.items():
        if getattr(config, name, False):
            yield f"{reason}: unset --{name.replace('_', '-')}, or {_FLAG}"
    for name, flag in _REFUSED_SHARDS.items():
        if getattr(config, name, 1) > 1:
            yield f"weights are gathered in every backward pass: unset {flag}, or {_FLAG}"
    if options.no_planned_shapes:
        yield (
            "stages that exchange shapes wait for each other before they post what weight "
            f"gradients would hide: unset {FLAGS['no_planned_shapes']}, or {_FLAG}"
        )
    for chunk in chunks:
        yield from _problems_of_chunk(chunk)


def _problems_of_chunk(chunk: Any) -> Iterator[str]:
    wrapper = getattr(chunk, "ddp_config", None)
    for name, flag in _REFUSED_WRAPPERS.items():
        if getattr(wrapper, name, False):
            yield f"sharded gradients have no buffer of their own: unset {flag}, or {_FLAG}"
    if not hasattr(chunk, "bucket_groups"):
        yield (
            f"{type(chunk).__name__} is not Megatron's DistributedDataParallel, which gathers "
            f"gradients in buffers: wrap the model in it, or unset {_FLAG}"
        )
        return
    unknown = list(compat.schedules.unknown_to_split_backward(chunk))
    if unknown:
        yield (
            f"this Megatron-LM has no {', '.join(unknown)} as known here: install megatron-core "
            f"0.16 to 0.19, or unset {_FLAG}"
        )
    for name, module in compat.layers.engine_linears(chunk).items():
        yield from _problems_of_engine(name, module)


def _problems_of_engine(name: str, module: Any) -> Iterator[str]:
    if getattr(module, "wgrad_store", None) is None:
        yield (
            f"{name} of Transformer Engine keeps no weight gradients for later: install 2.3 or "
            f"later, or unset {_FLAG}"
        )
    if not module.fuse_wgrad_accumulation:
        yield (
            f"{name} of Transformer Engine adds up gradients outside of its kernels: unset "
            f"--no-gradient-accumulation-fusion, or {_FLAG}"
        )
    if module.use_bias:
        yield (
            f"{name} of Transformer Engine has a bias, whose gradient it makes with the weight's: "
            f"set --disable-bias-linear, or unset {_FLAG}"
        )
    if compat.layers.debugs_engine():
        yield (
            "Transformer Engine looks at whole backward passes while it is debugged: start "
            f"without nvdlfw_inspect, or unset {_FLAG}"
        )
