"""Settings and models whose backward passes cannot be split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.utils import get_model_config

from mcore_batching.flags import FLAGS
from mcore_batching.megatron import compat
from mcore_batching.megatron.errors import fields_to_unset, one_of_each_problem, refuse
from mcore_batching.megatron.job.options import Options
from mcore_batching.planning import ParallelDims

_FLAG = FLAGS["split_backward"]
_DELAYED = "Megatron would delay weight gradients itself"
_REFUSED = {
    "delay_wgrad_compute": _DELAYED,
    "overlap_dispatch_backward_with_experts_wgrad": _DELAYED,
    "moe_shared_expert_overlap": "weight gradients of shared experts hide their communication",
    "use_ring_exchange_p2p": "ring exchanges are waited for where they are posted",
}
_REFUSED_SHARDS = {
    "gtp_weight_remat_size": "--tensor-parallel-num-weight-shards",
    "expert_gtp_weight_remat_size": "--expert-tensor-parallel-num-weight-shards",
}
"""Fields of generalized tensor parallelism, with flags."""
_REFUSED_WRAPPERS = dict.fromkeys(
    ("use_megatron_fsdp", "use_custom_fsdp"), "sharded gradients have no buffer of their own"
)


def check_split_backward(options: Options, chunks: list[Any], dims: ParallelDims) -> None:
    """Refuse what ``--dynamic-batch-split-backward`` cannot run with, where it has an effect."""
    if options.splits_backward and dims.pipeline_parallel > 1:
        refuse(_FLAG, _problems(options, chunks))


def _problems(options: Options, chunks: list[Any]) -> Iterator[str]:
    config, either = get_model_config(chunks[0]), f", or {_FLAG}"
    yield from fields_to_unset(config, _REFUSED, either)
    for name, flag in _REFUSED_SHARDS.items():
        if getattr(config, name, 1) > 1:
            yield f"weights are gathered in every backward pass: unset {flag}{either}"
    if options.no_planned_shapes:
        yield (
            "stages that exchange shapes wait for each other before they post what weight "
            f"gradients would hide: unset {FLAGS['no_planned_shapes']}{either}"
        )
    for chunk in chunks:
        yield from fields_to_unset(getattr(chunk, "ddp_config", None), _REFUSED_WRAPPERS, either)
        if not hasattr(chunk, "bucket_groups"):
            yield (
                f"{type(chunk).__name__} is not Megatron's DistributedDataParallel, which gathers "
                f"gradients in buffers: wrap the model in it, or unset {_FLAG}"
            )
            continue
        unknown = list(compat.schedules.unknown_to_split_backward(chunk))
        if unknown:
            yield (
                f"this Megatron-LM has no {', '.join(unknown)} as known here: install "
                f"megatron-core 0.16 to 0.19, or unset {_FLAG}"
            )
        engine = compat.layers.engine_linears(chunk)
        yield from one_of_each_problem(
            (name, f"of Transformer Engine {problem}, or unset {_FLAG}")
            for name, module in engine.items()
            for problem in _problems_of_engine(module)
        )
        if engine and compat.layers.debugs_engine():
            yield (
                "Transformer Engine is debugged, which needs whole backward passes: start without "
                f"nvdlfw_inspect, or unset {_FLAG}"
            )


def _problems_of_engine(module: Any) -> Iterator[str]:
    if getattr(module, "wgrad_store", None) is None:
        yield "keeps no weight gradients for later: install 2.3 or later"
    if not module.fuse_wgrad_accumulation:
        yield "adds up gradients outside of its kernels: unset --no-gradient-accumulation-fusion"
    if module.use_bias:
        yield "makes the gradient of a bias with the weight's: set --disable-bias-linear"
