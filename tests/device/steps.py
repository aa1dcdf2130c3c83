"""Jobs on the twin: whole steps, and calls that make the host wait."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import twin as twins
from bootstrap import build_model, pipeline_config
from kit.model import CLIP_GRAD, arguments, transformer_config
from kit.samples import rollout_of
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.utils import unwrap_model
from torch import Tensor

from mcore_batching.batch import token_mean
from mcore_batching.megatron import (
    add_fields,
    forward_only,
    get_data_iterator,
    response_log_probs,
    response_log_probs_and_entropy,
    schedule_of,
    train_step,
)
from mcore_batching.planning import ParallelDims, step_statistics
from mcore_batching.planning.plans.memory import ModelShape, predicted_memory

TWIN = twins.install()
LENGTHS = [37, 80, 64, 11, 90, 45, 23]
"""Of three micro-batches, or more, under a cap of 128 tokens."""


def whole_step(
    dims: ParallelDims,
    dtype: str = "bfloat16",
    vocabulary: int = 512,
    lengths: list[int] = LENGTHS,
    cap_tokens: int = 128,
    *,
    on_device: bool = False,
    distributed_optimizer: bool = False,
    model: dict[str, Any] | None = None,
    **flags: Any,
) -> dict[str, Any]:
    """What happens in all calls of a step, of this rank's `lengths`; samples begin alike."""
    kind = getattr(torch, dtype)
    half = {"bf16": dtype == "bfloat16", "fp16": dtype == "float16", "params_dtype": kind}
    settings = {"hidden_size": 64, "use_cpu_initialization": False, "pipeline_dtype": kind}
    settings["num_layers"] = max(2, dims.pipeline_parallel * dims.virtual_pipeline)
    config = transformer_config("dense", **pipeline_config(dims), **settings | half | (model or {}))
    chunks = build_model(
        config,
        vocab_size=vocabulary,
        max_sequence_length=max(lengths),
        ddp=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=distributed_optimizer,
            overlap_grad_reduce=distributed_optimizer,
        ),
    )
    options = OptimizerConfig(
        **half, use_distributed_optimizer=distributed_optimizer, clip_grad=CLIP_GRAD, lr=1e-3
    )
    optimizer = get_megatron_optimizer(options, chunks)
    names = ("tokens", "total_lengths", "response_lengths", "advantages")
    rollout = rollout_of([(n, n // 2) for n in lengths], vocabulary)
    data: dict[str, Any] = {name: rollout[name] for name in names}
    longest = max(data["tokens"], key=len)
    for tokens in data["tokens"]:  # prompts begin alike, and go on as their own samples
        tokens[: len(tokens) // 2] = longest[: len(tokens) // 2].clone()
    if on_device:
        for name in ("tokens", "advantages"):
            data[name] = [each.cuda() for each in data[name]]
    flags = {f"dynamic_batch_{name}": value for name, value in flags.items()}
    args = arguments(dims, max_tokens_per_gpu=cap_tokens, **flags)
    types: set[str] = set()

    def loss(logits: Any, row: Any, totals: Any) -> Any:
        types.add(str(logits.dtype))
        new = response_log_probs(logits, row)
        terms = zip(new, row["log_probs"], row["advantages"], strict=True)
        share = token_mean([-(n - old).exp() * a for n, old, a in terms], row, totals)
        types.update({str(each.dtype) for each in (*new, share)})
        return share, {"policy": share}

    def log_probs_of(logits: Tensor, *, micro_batch: Any) -> dict[str, Any]:
        # Entropies come of the same pass; as a field they would only be copied once more.
        return {"log_probs": response_log_probs_and_entropy(logits, micro_batch)[0]}

    for counted in (TWIN.waits, TWIN.calls, TWIN.peaks):
        counted.clear()
    with TWIN.within("get_data_iterator"):
        iterators, counts = get_data_iterator(args, chunks, data)
    with TWIN.within("forward_only"):
        old = forward_only(log_probs_of, args, chunks, iterators, counts)
    with TWIN.within("add_fields"):
        add_fields(iterators, old)
    with TWIN.within("train_step"):
        done = train_step(loss, args, chunks, iterators, counts, optimizer)
    attention = [name for name in TWIN.calls if "atten" in name or "attn" in name]
    return {
        "waits": sorted(TWIN.waits.items()),
        "attention": {name: TWIN.calls[name] for name in attention},
        "layers": sum(len(each.decoder.layers) for each in map(unwrap_model, chunks)),
        "micro_batches": counts[0],
        "updated": done.update_successful,
        "outputs": sorted({str((each.dtype, each.device)) for v in old.values() for each in v}),
        "types": sorted(types),
        "peaks": TWIN.peaks,
        "predicted": _predicted(schedule_of(iterators), config, vocabulary, args),
    }


def _predicted(schedule: Any, config: Any, vocabulary: int, args: Any) -> dict[str, float]:
    """The plan's figures of memory for this rank's stage."""
    step, lengths = schedule.step_plan(0)
    shape = dataclasses.replace(
        ModelShape.of(vars(config) | {"vocab_size": vocabulary}),
        fused_output=getattr(args, "dynamic_batch_fuse_output_layer", False),
        bytes_per_logit=2 if getattr(args, "dynamic_batch_logits_in_model_dtype", False) else 6,
    )
    made = predicted_memory(step_statistics(step, lengths), step, shape)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return {"train_step pipeline": made.last_stage_bytes if last else made.first_stage_bytes}


def deliberate_waits() -> list[tuple[str, str]]:
    """For each of `ACTS`, the kind of wait that it makes ("": none) and what is counted."""
    x, host, found = torch.arange(4, device="cuda"), torch.arange(4), []
    for kind, act in ACTS:
        TWIN.waits.clear()
        with TWIN.within("train_step"), TWIN.within("pipeline"):
            act(x, host)
        expected = f"train_step pipeline: {kind}, steps:<lambda>" if kind else ""
        found.append((expected, ", ".join(TWIN.waits.elements())))
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu"):
        x + host
    return found


ACTS: list[tuple[str, Callable[[Tensor, Tensor], Any]]] = [
    ("item", lambda x, host: x[0].item()),
    ("item", lambda x, host: bool(x[1] > 0)),
    ("item", lambda x, host: host[x[1]]),
    ("copy to the host", lambda x, host: x.tolist()),
    ("copy to the host", lambda x, host: x.cpu()),
    ("copy to the host", lambda x, host: x.to("cpu")),
    ("copy to the host", lambda x, host: host.clone().copy_(x)),
    ("nonzero", lambda x, host: x.nonzero()),
    ("index by a mask", lambda x, host: x[x > 1]),
    ("index by a mask", lambda x, host: x.clone().__setitem__(x > 1, x[:2])),
    ("masked_select", lambda x, host: x.masked_select(x > 1)),
    ("repeat_interleave", lambda x, host: x.repeat_interleave(x)),
    ("_unique2", lambda x, host: x.unique()),
    ("equal", lambda x, host: torch.equal(x, x)),
    ("copy to the device", lambda x, host: host.to("cuda")),
    ("copy to the device", lambda x, host: host.to(x.device, non_blocking=True)),
    ("copy to the device", lambda x, host: host.pin_memory().to("cuda")),
    ("copy to the device", lambda x, host: host.cuda()),
    ("copy to the device", lambda x, host: torch.tensor(3, device=x.device)),
    ("copy to the device", lambda x, host: torch.as_tensor([1, 2], device="cuda")),
    ("copy to the device", lambda x, host: x.clone().copy_(host)),
    ("a tensor of the host's in index", lambda x, host: x[[0, 1]]),
    ("synchronize", lambda x, host: torch.cuda.synchronize()),
    ("synchronize", lambda x, host: torch.cuda.current_stream().synchronize()),
    ("", lambda x, host: torch.full((), 3, device=x.device) + x),
    ("", lambda x, host: torch.where(x > 1, x, 0) * 2 + torch.arange(4, device="cuda")),
    ("", lambda x, host: host.pin_memory().to(x.device, non_blocking=True) + x),
    ("", lambda x, host: x[1:3].sum() + host[0]),
    ("", lambda x, host: host[host > 1].tolist()),
    ("", lambda x, host: x.index_select(0, x)),
    ("", lambda x, host: x.clone().__setitem__(x > 1, 0)),
    ("", lambda x, host: x.float().requires_grad_().sum().backward()),
    ("", lambda x, host: x.repeat_interleave(x, output_size=6)),
]


def waits_of_stock_training(script: str, words: list[str]) -> list[str]:
    """The waits inside the pipelines of a training script's steps and evaluations."""
    from kit.stock import train

    TWIN.waits.clear()
    record = train(script, words)
    assert "error" not in record, record
    return sorted(wait for wait in TWIN.waits if wait.startswith("pipeline"))
