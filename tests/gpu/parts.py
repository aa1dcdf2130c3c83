"""Parts of the acceptance test that are programs: ``parts.py PART``, one process a rank.

- `packed`: packed rows against one sample a row in bfloat16, both against float32, one sample a
  row. Rounding differs between the two, as kernels cut rows of other lengths otherwise. What is
  right: the packed rows are no further from float32 than single samples are. A neighbour's token
  let in is further by orders of magnitude.
- `waits`: where the host waits for the device in a step, by line; none may grow with micro-batches.
  PyTorch reports each wait. Without a GPU `tests/device` counts them on a device that is not there.
- `memory`: peak of a step at a vocabulary of 152064 and 16384 tokens, against what is predicted.
  Over the logits, log-probs may take 0.7 of one float32 copy of them. The whole step is predicted
  from the same layers with a small vocabulary: what they take, and the logits, their chunks, and
  the gradients of the first and the last layer before those are added up.
- `throughput`: packed against padded rows on real lengths; then a step against what was learnt to
  predict. Padded rows hold samples padded to the longest, as many as the cap lets in: what a fixed
  sequence length costs. Layers, kernels, loss and cap are the same.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import re
import statistics
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from bootstrap import (
    build_model,
    initialize_model_parallel,
    initialize_process_group,
    pipeline_config,
)
from kit import model as kit_model
from kit.model import transformer_config
from kit.objective import log_probs_of
from kit.samples import rollout_of
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.utils import unwrap_model

import mcore_batching
from mcore_batching.batch import token_mean
from mcore_batching.megatron import (
    cpu_emulation,
    forward_only,
    get_data_iterator,
    packed_layer_spec,
    response_log_probs,
    schedule_of,
    train_step,
    use_packed_attention,
)
from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.megatron.specs import uses_transformer_engine
from mcore_batching.planning import ParallelDims, predicted_step_time
from mcore_batching.planning.plans.memory import LOG_PROB_CHUNK_TOKENS

ON_GPU = os.environ.get("MCORE_BATCHING_CPU", "") in ("", "0")
"""False in the CPU twin."""
ROOTS = [os.path.dirname(str(package.__file__)) for package in (mcore_batching, megatron.core)]
GB = 1e9


Sizes = dict[str, int]
"""Of a model, by Megatron's names: large enough to fill a GPU, or small enough for a CPU."""
GPU = {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 16, "num_query_groups": 4}
WIDE = {"hidden_size": 2048, "num_attention_heads": 32, "num_query_groups": 8}
CPU = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2}
VOCABULARY = 32768 if ON_GPU else 512


def main() -> None:
    """Join the process group, of this process alone where torchrun started none; run the part."""
    parser = argparse.ArgumentParser(description="A part of the acceptance test on this GPU.")
    parts = {each.__name__: each for each in (packed, waits, memory, throughput)}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--attention", choices=("te", "pytorch"), default="pytorch")
    parser.add_argument("--lengths", help="file with one length a line")
    parser.add_argument("--context-parallel", type=int, default=1)
    options = parser.parse_args()
    if not ON_GPU and options.part in ("waits", "memory"):
        raise SystemExit("on a CPU waits and memory are measured by tests/device/test_device.py")
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 0}.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    initialize_process_group()
    initialize_model_parallel(ParallelDims(context_parallel=options.context_parallel))
    parts[options.part](options)


def packed(options: argparse.Namespace) -> None:
    """Compare, and report three rows."""
    sizes, cap = (GPU, 1024) if ON_GPU else (CPU, 80)
    lengths = [1, 2, 7, 64, 300, 33, 1000, 512, 129, 65]
    data = samples(lengths if ON_GPU else [n // 16 + 1 for n in lengths], VOCABULARY)
    torch.manual_seed(0)
    half = bare_model(options, sizes, VOCABULARY)
    exact = bare_model(options, sizes, VOCABULARY, torch.float32, "pytorch")
    source = dict(named_parameters(half))
    with torch.no_grad():
        for name, parameter in named_parameters(exact):
            parameter.copy_(source[name])
    alone = arguments(cap, dynamic_batch_max_samples_per_row=1)
    wanted = _outputs(alone, exact, data)
    found = {
        "packed": _outputs(arguments(cap), half, data),
        "alone": _outputs(alone, half, data),
    }
    assert found["packed"]["rows"] < found["alone"]["rows"]
    kernel = type(unwrap_model(half[0]).decoder.layers[0].self_attention.core_attention).__name__
    rows = f"{found['packed']['rows']} rows in place of {found['alone']['rows']}"
    most = 1.5  # over that of single samples: two roundings of the same kind differ by less
    for name in ("log-probs", "gradients"):
        errors = {way: _error(found[way][name], wanted[name]) for way in found}
        report(
            f"{name}, {kernel}, {rows}: error over float32's norm, packed and alone",
            f"{errors['packed']:.2e}, {errors['alone']:.2e}",
            f"at most {most} × alone",
            errors["packed"] <= most * errors["alone"],
        )
    apart = _error(found["packed"]["log-probs"], found["alone"]["log-probs"])
    report("log-probs, packed from alone", f"{apart:.2e}", "for information", True)


def _outputs(args: Any, model: list[Any], data: dict[str, list[Any]]) -> dict[str, Any]:
    iterators, counts = get_data_iterator(args, model, dict(data))
    made = forward_only(log_probs_of, args, model, iterators, counts)
    step(args, model, (iterators, counts))
    gradients = {name: p.main_grad.float().clone() for name, p in named_parameters(model)}
    return {
        "rows": counts[0],
        "log-probs": torch.cat(made["log_probs"]).clone(),
        "gradients": torch.cat([gradients[name].flatten() for name in sorted(gradients)]),
    }


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def waits(options: argparse.Namespace) -> None:
    """Count waits of a step, and of one over twice as many micro-batches."""
    longest = 4096
    lengths = real_lengths(options.lengths, 48, longest)
    model = bare_model(options, GPU, VOCABULARY)
    counted = []
    for times in (1, 2):
        args = arguments(longest)
        planned = get_data_iterator(args, model, samples(lengths * times, VOCABULARY))
        step(args, model, planned)
        with _counted_waits() as lines:
            step(args, model, planned)
        counted.append((planned[1][0], lines))
    (few, once), (many, twice) = counted
    assert many > few
    grown = {line: n - once[line] for line, n in twice.items() if n > once[line]}
    for line, number in sorted(grown.items(), key=lambda each: -each[1])[:12]:
        report(
            f"waits at {line}",
            f"{number} more with {many} micro-batches than with {few}",
            "none" if _is_ours(line) else "for information: not this package",
            not _is_ours(line),
        )
    ours = sum(number for line, number in grown.items() if _is_ours(line))
    report("waits of this package that grow with micro-batches", ours, "none", not ours)
    ours = sum(number for line, number in once.items() if _is_ours(line))
    report("waits of this package a step", ours, "for information", True)


def _is_ours(line: str) -> bool:
    return line.startswith("mcore_batching/")


def _line() -> str:
    """The innermost line of this package or of Megatron."""
    for frame in reversed(traceback.extract_stack()):
        for root in ROOTS:
            if frame.filename.startswith(f"{root}/") and frame.filename != cpu_emulation.__file__:
                return f"{os.path.relpath(frame.filename, os.path.dirname(root))}:{frame.lineno}"
    return "elsewhere"


@contextlib.contextmanager
def _counted_waits() -> Iterator[collections.Counter[str]]:
    """Lines that wait inside the block, and how often."""
    lines: collections.Counter[str] = collections.Counter()

    def note(*unused: Any, **also_unused: Any) -> None:
        lines[_line()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            torch.cuda.set_sync_debug_mode("default")


def memory(options: argparse.Namespace) -> None:
    """Measure with a small vocabulary and a large one, and report."""
    vocabulary, tokens = 152064, 16384
    sizes = WIDE | {"num_layers": 2}
    small = _peaks(options, sizes, 1024, tokens)
    large = _peaks(options, sizes, vocabulary, tokens)
    copy, limit, tolerance = 4 * tokens * vocabulary, 0.7, 1.15
    for name in ("forward", "backward"):
        share = large[name] / copy
        report(
            f"{name} over the logits, of a float32 copy ({copy / GB:.2f} GB)",
            f"{share:.2f}",
            f"at most {limit}",
            share <= limit,
        )
    chunk = 4 * LOG_PROB_CHUNK_TOKENS * vocabulary
    weights = 2 * 2 * vocabulary * sizes["hidden_size"]
    predicted = small["step"] + copy / 2 + 3 * chunk + weights
    report(
        f"peak of a step over what is held between steps, {tokens} tokens",
        f"{large['step'] / GB:.2f} GB",
        f"predicted {predicted / GB:.2f} GB, at most {tolerance} × that",
        large["step"] <= tolerance * predicted,
    )


def _peaks(
    options: argparse.Namespace, sizes: Sizes, vocabulary: int, tokens: int
) -> dict[str, float]:
    """Bytes over the logits in the loss, forward and backward, and of the whole step."""
    model, args = bare_model(options, sizes, vocabulary), arguments(tokens)
    planned = get_data_iterator(args, model, samples([tokens // 4] * 4, vocabulary))
    step(args, model, planned)
    found: dict[str, float] = {}

    def watched(logits: Any, row: Any, totals: Any) -> Any:
        before = torch.cuda.memory_allocated()
        found["layers"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        made = loss(logits, row, totals)
        found["forward"] = torch.cuda.max_memory_allocated() - before

        def gradient_is_made(grad: Any) -> None:
            found["backward"] = torch.cuda.max_memory_allocated() - before

        logits.register_hook(gradient_is_made)
        return made

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    step(args, model, planned, watched)
    found["step"] = max(found["layers"], torch.cuda.max_memory_allocated()) - base
    del model, planned
    torch.cuda.empty_cache()
    return found


def throughput(options: argparse.Namespace) -> None:
    """Measure, and report two rows."""
    sizes, cap, count, dtype = CPU, 1024, 24, torch.float32
    if ON_GPU:
        sizes = WIDE | {"num_layers": 8}
        cap, count, dtype = 16384, 256, torch.bfloat16
    lengths = real_lengths(options.lengths, count, cap // 4)
    model, data = bare_model(options, sizes, 512, dtype), samples(lengths, 512)
    learning = arguments(cap, dynamic_batch_cost_model="auto")
    packed_seconds, schedule = timed_steps(learning, model, data)
    padded = arguments(cap, dynamic_batch_pad_each_to=max(lengths))
    padded_seconds, _ = timed_steps(padded, model, data)
    tokens, gain = sum(lengths), padded_seconds / packed_seconds
    source = "lengths of the file" if options.lengths else "log-normal lengths"
    report(
        f"{source}, {len(lengths)} samples, cap {cap}: packed over padded",
        f"{gain:.2f} × as fast ({tokens / packed_seconds:.0f} and "
        f"{tokens / padded_seconds:.0f} real tokens/s)",
        "faster",
        gain > 1,
    )
    learnt = schedule.settings.learnt
    assert learnt is not None
    assert learnt.seconds_per_unit is not None
    predicted = learnt.seconds_per_unit * predicted_step_time(*schedule.step_plan(0))
    error = packed_seconds / predicted - 1
    tolerance = 0.25  # costs are learnt from passes, and the host's time is between them
    report(
        "a step over the predicted one",
        f"{packed_seconds:.3f} s over {predicted:.3f} s: {error:+.0%}",
        f"within {tolerance:.0%}" if ON_GPU else "for information",
        abs(error) <= tolerance or not ON_GPU,
    )


def bare_model(
    options: argparse.Namespace,
    sizes: Sizes,
    vocabulary: int,
    dtype: torch.dtype = torch.bfloat16,
    attention: str | None = None,
) -> list[Any]:
    """A model in Megatron's wrappers, with the part's attention: Transformer Engine's ("te") or
    "pytorch"."""
    attention = attention or options.attention
    if attention == "te" and ON_GPU and not uses_transformer_engine():
        raise RuntimeError("Transformer Engine is not installed")
    config = transformer_config(
        "dense",
        **pipeline_config(ParallelDims(context_parallel=options.context_parallel)),
        **sizes,
        ffn_hidden_size=4 * sizes["hidden_size"],
        init_method_std=sizes["hidden_size"] ** -0.5,  # logits of order 1, or errors would not show
        use_cpu_initialization=False,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        apply_rope_fusion=attention == "te" and uses_transformer_engine(),
    )
    return build_model(
        config,
        vocab_size=vocabulary,
        max_sequence_length=1 << 17,
        spec=packed_layer_spec if attention == "te" else _local_spec,
    )


def _local_spec(config: Any) -> Any:
    local = get_gpt_layer_local_spec(normalization=config.normalization)
    return use_packed_attention(local, config)


def named_parameters(model: Sequence[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters under the names that they have without Transformer Engine's fused norms."""
    for chunk in model:
        for name, parameter in unwrap_model(chunk).named_parameters():
            plain = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
            yield re.sub(r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm.", plain), parameter


def arguments(cap_tokens: int, **changes: Any) -> Any:
    """Megatron's arguments, as far as the engine reads them; costs by the shape of the model."""
    usual = {"dynamic_batch_logits_in_model_dtype": True, "dynamic_batch_cost_model": None}
    return kit_model.arguments(ParallelDims(), max_tokens_per_gpu=cap_tokens, **usual | changes)


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
    train_step(loss_function, args, model, *planned, kit_model.no_optimizer())


def timed_steps(
    args: Any, model: list[Any], data: dict[str, list[Any]]
) -> tuple[float, MicroBatchSchedule]:
    """Median seconds of five steps behind a first one, and the schedule of the last."""
    took = []
    for _ in range(6):
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


if __name__ == "__main__":
    main()
