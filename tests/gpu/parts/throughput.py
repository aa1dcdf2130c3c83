"""Calibrate; then packed against padded rows on real lengths; then the predicted against a step.

Padded rows hold samples padded to the longest, as many as the cap lets in: what a fixed sequence
length costs. Layers, kernels, loss and cap are the same.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import setting
import torch

from mcore_batching.megatron import get_data_iterator, schedule_of
from mcore_batching.megatron.standalone.calibration import LayerStack, calibrate
from mcore_batching.planning.statistics import predicted_step_time

REPEATS = 5
TOLERANCE = 0.25
"""Of the predicted time: the cost model knows of layers alone, not of embedding, logits and
host."""


def main() -> None:
    """Measure, and report four rows."""
    options = setting.parse(__doc__)
    dims = setting.start(options)
    # A small vocabulary: the cost model is that of a stage's layers.
    sizes = (
        dataclasses.replace(setting.GPU, layers=8, hidden=2048, heads=32, key_value_heads=8)
        if setting.on_gpu()
        else setting.CPU
    )
    sizes = dataclasses.replace(sizes, vocabulary=512)
    stack = LayerStack(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        ffn_hidden_size=4 * sizes.hidden,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.key_value_heads,
        dtype=torch.bfloat16 if setting.on_gpu() else torch.float32,
    )
    cap = sizes.cap_tokens if setting.on_gpu() else 1024
    fit, _ = calibrate(stack, max_tokens=cap, repeats=3)
    setting.report(
        "calibrate: mean and largest error of the fit",
        f"{fit.mean_relative_error:.1%}, {fit.max_relative_error:.1%}",
        "mean at most 10%",
        fit.mean_relative_error <= 0.1 or not setting.on_gpu(),
    )
    longest = cap // 4
    lengths = setting.real_lengths(options.lengths, 256 if setting.on_gpu() else 24, longest)
    model = setting.bare_model(dims, sizes, options.attention, stack.dtype)
    data = setting.samples(lengths, sizes.vocabulary)
    packed = setting.arguments(cap)
    padded = setting.arguments(cap, dynamic_batch_pad_each_to=max(lengths))
    seconds = {}
    for name, args in (("packed", packed), ("padded", padded)):
        planned = get_data_iterator(args, model, dict(data))
        seconds[name] = _seconds(args, model, planned)
        if name == "packed":
            plan, own = schedule_of(planned[0]).step_plan(0)
    tokens = sum(lengths)
    gain = seconds["padded"] / seconds["packed"]
    source = "lengths of the file" if options.lengths else "log-normal lengths"
    setting.report(
        f"{source}, {len(lengths)} samples, cap {cap}: packed over padded",
        f"{gain:.2f} × as fast ({tokens / seconds['packed']:.0f} and "
        f"{tokens / seconds['padded']:.0f} real tokens/s)",
        "faster",
        gain > 1,
    )
    predicted = predicted_step_time(plan, own, fit.cost_model) * fit.seconds_per_unit
    error = seconds["packed"] / predicted - 1
    setting.report(
        "a step over the predicted one",
        f"{seconds['packed']:.3f} s over {predicted:.3f} s: {error:+.0%}",
        f"within {TOLERANCE:.0%}" if setting.on_gpu() else "for information",
        abs(error) <= TOLERANCE or not setting.on_gpu(),
    )


def _seconds(args: Any, model: list[Any], planned: Any) -> float:
    times = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        setting.step(args, model, planned)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
