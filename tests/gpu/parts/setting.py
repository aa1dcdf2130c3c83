"""What the parts share: processes, sizes, models, samples, and the rows of the report."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from bootstrap import (
    build_model,
    initialize_model_parallel,
    initialize_process_group,
    pipeline_config,
)
from kit import exactness
from kit.model import transformer_config
from kit.samples import rollout_of
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.utils import unwrap_model

from mcore_batching.batch import token_mean
from mcore_batching.megatron import (
    get_data_iterator,
    packed_layer_spec,
    response_log_probs,
    schedule_of,
    train_step,
    use_packed_attention,
)
from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.megatron.specs import uses_transformer_engine
from mcore_batching.planning import ParallelDims


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a model and its rows: large enough to fill a GPU, or small enough for a CPU."""

    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    vocabulary: int
    cap_tokens: int


REPEATS = 5
"""Timed steps, of which the median counts."""
GPU = Sizes(layers=4, hidden=1024, heads=16, key_value_heads=4, vocabulary=32768, cap_tokens=16384)
CPU = Sizes(layers=2, hidden=64, heads=4, key_value_heads=2, vocabulary=512, cap_tokens=256)


def on_gpu() -> bool:
    """True on a GPU, False in the CPU twin."""
    return os.environ.get("MCORE_BATCHING_CPU", "") in ("", "0")


def start(description: str | None) -> tuple[argparse.Namespace, ParallelDims]:
    """The flags of a part, and its dims; joins the process group, of this process alone where
    torchrun started none."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--attention", choices=("te", "pytorch"), default="pytorch")
    parser.add_argument("--lengths", help="file with one length a line")
    parser.add_argument("--context-parallel", type=int, default=1)
    options = parser.parse_args()
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 0}.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    initialize_process_group()
    dims = ParallelDims(context_parallel=options.context_parallel)
    initialize_model_parallel(dims)
    return options, dims


def bare_model(
    dims: ParallelDims, sizes: Sizes, attention: str, dtype: torch.dtype = torch.bfloat16
) -> list[Any]:
    """A model in Megatron's wrappers, with attention of Transformer Engine ("te") or "pytorch"."""
    if attention == "te" and on_gpu() and not uses_transformer_engine():
        raise RuntimeError("Transformer Engine is not installed")
    config = transformer_config(
        "dense",
        **pipeline_config(dims),
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        ffn_hidden_size=4 * sizes.hidden,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.key_value_heads,
        init_method_std=sizes.hidden**-0.5,  # logits of order 1, or errors would not show
        use_cpu_initialization=False,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        apply_rope_fusion=attention == "te" and uses_transformer_engine(),
    )
    return build_model(
        config,
        vocab_size=sizes.vocabulary,
        max_sequence_length=1 << 17,
        spec=packed_layer_spec if attention == "te" else _local_spec,
    )


def _local_spec(config: Any) -> Any:
    return use_packed_attention(
        get_gpt_layer_local_spec(normalization=config.normalization), config
    )


def named_parameters(model: Sequence[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters under the names that they have without Transformer Engine's fused norms."""
    for chunk in model:
        for name, parameter in unwrap_model(chunk).named_parameters():
            plain = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
            yield re.sub(r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm.", plain), parameter


def arguments(cap_tokens: int, **changes: Any) -> SimpleNamespace:
    """Megatron's arguments, as far as the engine reads them."""
    # Costs by the shape of the model.
    usual = {"dynamic_batch_logits_in_model_dtype": True, "dynamic_batch_cost_model": None}
    return exactness.arguments(ParallelDims(), max_tokens_per_gpu=cap_tokens, **usual | changes)


def samples(lengths: Sequence[int], vocabulary: int) -> dict[str, list[Any]]:
    """Random tokens, three quarters of each sample a response; the same on every rank."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    return rollout_of([(n, n * 3 // 4) for n in lengths], vocabulary, generator)


def real_lengths(path: str | None, count: int, longest: int) -> list[int]:
    """Lengths drawn from a file, or log-normal ones without it, none above the longest."""
    generator = random.Random(0)
    if path:
        with open(path) as file:
            known = [min(int(line), longest) for line in file if line.strip()]
        return generator.sample(known, count)
    drawn = (round(longest / 12 * generator.lognormvariate(0, 1)) for _ in range(count))
    return [max(2, min(longest, length)) for length in drawn]


def loss(logits: Any, row: Any, totals: Any) -> Any:
    """Policy gradient of the response tokens."""
    log_probs = response_log_probs(logits, row)
    terms = [-(new * a) for new, a in zip(log_probs, row["advantages"], strict=True)]
    share = token_mean(terms, row, totals)
    return share, {"policy": share}


def step(args: Any, model: list[Any], planned: tuple[Any, Any], loss_function: Any = loss) -> None:
    """Forward and backward of a step, without an update."""
    train_step(loss_function, args, model, *planned, exactness.no_optimizer())


def timed_steps(
    args: Any, model: list[Any], data: dict[str, list[Any]]
) -> tuple[float, MicroBatchSchedule]:
    """Median seconds of a step without the first, and the schedule of the last."""
    took = []
    for _ in range(REPEATS + 1):
        planned = get_data_iterator(args, model, dict(data))
        torch.cuda.synchronize()
        started = time.perf_counter()
        step(args, model, planned)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - started)
    return statistics.median(took[1:]), schedule_of(planned[0])


def report(what: str, found: object, wanted: str, ok: bool) -> None:
    """A row of the table, from rank 0."""
    if dist.get_rank() == 0:
        row = {"what": what, "found": str(found), "wanted": wanted, "ok": ok}
        print("ROW " + json.dumps(row), flush=True)
