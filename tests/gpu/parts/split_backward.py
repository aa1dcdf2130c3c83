"""Split backward passes on two pipeline stages: the gradients of whole ones to the bit, and sooner.

The plan splits every pass. What it gains is predicted by costs that were learnt from the passes,
whole ones before, split ones then.
"""

from __future__ import annotations

import dataclasses
import os
from unittest import mock

import setting
import torch
import torch.distributed as dist

from mcore_batching.megatron import get_data_iterator
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.megatron.step import prepare
from mcore_batching.planning import ParallelDims
from mcore_batching.tools.pictures.timeline import step_timeline

STAGES = 2
TOLERANCE = 0.03
"""Of the step of whole passes, between the gain and what the plan says it is."""


def main() -> None:
    """Compare, and report two rows."""
    options = setting.parse(__doc__)
    _be_deterministic()
    dims = setting.start(options, ParallelDims(pipeline_parallel=STAGES))
    big = dataclasses.replace(setting.GPU, layers=8, hidden=2048, heads=32, key_value_heads=8)
    sizes = dataclasses.replace(big if setting.on_gpu() else setting.CPU, vocabulary=512)
    lengths = setting.real_lengths(options.lengths, 48, sizes.cap_tokens // 2)
    uses_engine = options.attention == "te" and setting.on_gpu()
    dtype = torch.bfloat16 if setting.on_gpu() else torch.float32
    model = setting.bare_model(
        dims, sizes, options.attention, dtype, gradient_accumulation_fusion=uses_engine
    )
    data = setting.samples(lengths, sizes.vocabulary)
    gradients, seconds, predicted = [], [], []
    for mode in ("off", "all"):
        args = setting.arguments(
            sizes.cap_tokens, dynamic_batch_exchange=True, dynamic_batch_split_backward=mode
        )
        took, schedule = setting.timed_steps(args, model, data)
        seconds.append(took)
        predicted.append(_end(schedule))
    # The same rows in the same order for both: the plan has the order that suits split passes.
    args = setting.arguments(
        sizes.cap_tokens,
        dynamic_batch_split_backward="all",
        dynamic_batch_cost_model="fixed",
        dynamic_batch_split_backward_memory=4.0,
    )
    whole, split = (lambda *_: ()), prepare.planned_split
    for planned in (whole, whole, split):
        with mock.patch.object(prepare, "planned_split", planned):
            setting.step(args, model, get_data_iterator(args, model, dict(data)))
        gradients.append([p.main_grad.clone() for _, p in setting.named_parameters(model)])
    first, *others = gradients
    own = [sum(not torch.equal(a, b) for a, b in zip(first, g, strict=True)) for g in others]
    of_stages: list[list[int]] = [[]] * STAGES
    dist.all_gather_object(of_stages, own)
    differ = [*map(sum, zip(*of_stages, strict=True))]
    setting.report(
        "weights whose gradient differs from that of whole passes in any bit",
        f"of whole passes again {differ[0]}, of split ones {differ[1]}",
        "0 and 0",
        not any(differ),
    )
    measured, wanted = seconds[1] / seconds[0], predicted[1] / predicted[0]
    setting.report(
        "step of split over step of whole passes",
        f"{measured:.3f}, planned {wanted:.3f}",
        f"within {TOLERANCE:.2f}" if setting.on_gpu() else "for information",
        abs(measured - wanted) <= TOLERANCE or not setting.on_gpu(),
    )


def _be_deterministic() -> None:
    """Before anything is on the device: else attention's backward kernels add up in any order, and
    gradients of whole passes differ from one time to the next."""
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # takes time


def _end(schedule: MicroBatchSchedule) -> float:
    plan, lengths = schedule.step_plan(0)
    scale = 1.0 if schedule.learnt is None else schedule.learnt.seconds_per_unit or 1.0
    return scale * step_timeline(plan, lengths).end


if __name__ == "__main__":
    main()
