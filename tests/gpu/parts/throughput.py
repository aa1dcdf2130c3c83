"""Packed against padded rows on real lengths; then a step against what was learnt to predict.

Padded rows hold samples padded to the longest, as many as the cap lets in: what a fixed sequence
length costs. Layers, kernels, loss and cap are the same.
"""

from __future__ import annotations

import dataclasses

import setting
import torch

from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.planning import predicted_step_time

TOLERANCE = 0.25
"""Of the predicted time: costs are learnt from passes, and the host's time is between them."""


def main() -> None:
    """Measure, and report two rows."""
    options, dims = setting.start(__doc__)
    sizes = (
        dataclasses.replace(setting.GPU, layers=8, hidden=2048, heads=32, key_value_heads=8)
        if setting.on_gpu()
        else setting.CPU
    )
    sizes = dataclasses.replace(sizes, vocabulary=512)
    cap = sizes.cap_tokens if setting.on_gpu() else 1024
    longest = cap // 4
    lengths = setting.real_lengths(options.lengths, 256 if setting.on_gpu() else 24, longest)
    dtype = torch.bfloat16 if setting.on_gpu() else torch.float32
    model = setting.bare_model(dims, sizes, options.attention, dtype)
    data = setting.samples(lengths, sizes.vocabulary)
    packed = setting.arguments(cap, dynamic_batch_cost_model="auto")
    padded = setting.arguments(cap, dynamic_batch_pad_each_to=max(lengths))
    packed_seconds, schedule = setting.timed_steps(packed, model, data)
    padded_seconds, _ = setting.timed_steps(padded, model, data)
    predicted = _predicted_seconds(schedule)
    tokens = sum(lengths)
    gain = padded_seconds / packed_seconds
    source = "lengths of the file" if options.lengths else "log-normal lengths"
    setting.report(
        f"{source}, {len(lengths)} samples, cap {cap}: packed over padded",
        f"{gain:.2f} × as fast ({tokens / packed_seconds:.0f} and "
        f"{tokens / padded_seconds:.0f} real tokens/s)",
        "faster",
        gain > 1,
    )
    error = packed_seconds / predicted - 1
    setting.report(
        "a step over the predicted one",
        f"{packed_seconds:.3f} s over {predicted:.3f} s: {error:+.0%}",
        f"within {TOLERANCE:.0%}" if setting.on_gpu() else "for information",
        abs(error) <= TOLERANCE or not setting.on_gpu(),
    )


def _predicted_seconds(schedule: MicroBatchSchedule) -> float:
    """Seconds of a step by what was learnt before it."""
    assert schedule.settings.learnt is not None
    assert schedule.settings.learnt.seconds_per_unit is not None
    return schedule.settings.learnt.seconds_per_unit * predicted_step_time(*schedule.step_plan(0))


if __name__ == "__main__":
    main()
