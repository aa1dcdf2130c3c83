"""Jobs that run slime's own modules since its pull request 1926, with its plan and batching hooked.

slime plans with `build_dp_schedule`, deals the rollout data out to the ranks by it, and trains with
its own iterator, forward step, log-probs, advantages, losses and training step. So does miles:
`kit.miles`.
"""

from __future__ import annotations

import copy
import importlib
import math
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state

import mcore_batching
from kit.exactness import difference
from kit.harness import Job
from kit.samples import make_samples, take
from kit.slime import SAMPLES, arguments, cut_to_rank, model_of, trained
from kit.slime import modules_of as of_checkout
from mcore_batching.integrations.slime import hook_schedule
from mcore_batching.megatron.topology import is_last_stage
from mcore_batching.planning import ParallelDims

ROLLOUTS = [0, 0, 1, 2, 3, 3, 4, 5]
"""Of each of the samples; two rollouts have two."""

LOG_PROBS = 2e-6
GRADIENTS = 2e-5
REPORTED = 2e-6
"""Tolerances, as in `test_exactness`: both sides compute in float32 over rows of other contents."""


def check_equal(job: Job, ranks: list[dict[str, Any]]) -> None:
    """Both steps of `compare` gave the same, and the hooked one had placeholders."""
    assert max(rank["log_probs"] for rank in ranks) < LOG_PROBS
    assert max(rank["gradients"] for rank in ranks) < GRADIENTS
    for rank in ranks:
        assert rank["placeholders"] >= (job.dims or {}).get("data_parallel", 1)
        assert rank["counts"][0] < len(SAMPLES)
        own, hooked = rank["reported"]
        assert own.keys() == hooked.keys()
        assert bool(own) == rank["last_stage"]
        for name, value in own.items():
            same = math.isclose(hooked[name], value, rel_tol=REPORTED, abs_tol=1e-7)
            assert same, (name, hooked[name], value)


def compare(
    dims: dict[str, Any],
    reference: str,
    source: str,
    per_token_loss: bool,
    advantage_estimator: str = "grpo",
) -> dict[str, Any]:
    """One training step of slime with its own plan and batching, and one with the hooked.

    Its own: one sample a micro-batch. Hooked: packed, with an additional placeholder in every rank.

    Returns:
        largest relative differences of ``log_probs`` and ``gradients``, both reported losses, and
        the hooked ``counts`` and ``placeholders`` over all ranks.
    """
    shape = ParallelDims(**dims)
    args = arguments(shape, per_token_loss, advantage_estimator)
    return compare_modules(modules_of(source, shape, args), args, shape, reference)


def modules_of(source: str, shape: ParallelDims, args: Any) -> SimpleNamespace:
    """slime's modules from this checkout; its arguments are completed for them."""
    vars(args).update(arguments_since_1926(shape))
    slime = of_checkout(source)
    slime.plan = importlib.import_module("slime.utils.dp_schedule")
    slime.cut = slime.loss
    slime.iterators = lambda args, chunks, rollout: slime.data.get_data_iterator(rollout)
    slime.step_options = ()
    slime.forward_options = {"use_rollout_top_p_replay": True}
    accelerator = importlib.import_module("slime.utils.accelerator")
    # It knows CUDA and MUSA alone, and no stand-in for either on the CPU.
    accelerator.device = accelerator.current_device = lambda *_: torch.device(
        torch.cuda.current_device()
    )
    return slime


def compare_modules(
    slime: SimpleNamespace, args: Any, shape: ParallelDims, reference: str
) -> dict[str, Any]:
    """`compare`, of slime's modules or another framework's."""
    samples = take(make_samples(), SAMPLES)
    own_part, own = _step(slime, args, shape, reference, samples)
    args = copy.copy(args)
    vars(args).update(use_dynamic_batch_size=True, dynamic_batch_fill="placeholder")
    planned = hook_schedule()
    assert planned is not None
    with planned, mcore_batching.hook(slime.data, slime.model) as hooked:
        assert len(hooked.hooked) == 2, hooked
        part, ours = _step(slime, args, shape, reference, samples)
    assert not hasattr(slime.model.forward_only, "_mcore_batching_original")
    assert not hasattr(slime.plan.build_dp_schedule, "_mcore_batching_original")

    parts: list[Any] = [None] * torch.distributed.get_world_size()
    by_sample = dict(zip(own_part, own["log_probs"], strict=is_last_stage()))
    torch.distributed.all_gather_object(parts, by_sample, group=None)
    differences = [0.0]
    # Context-parallel ranks hold other parts of a sample: those of this rank's peers alone count.
    peers = torch.distributed.get_process_group_ranks(parallel_state.get_data_parallel_group())
    for sample, values in zip(part, ours["log_probs"], strict=is_last_stage()):
        (same,) = [parts[rank][sample] for rank in peers if sample in parts[rank]]
        differences.append(difference(values, same))
    return {
        "log_probs": max(differences),
        "num_log_probs": len(ours["log_probs"]),
        "gradients": max(map(difference, ours["gradients"], own["gradients"])),
        "reported": [own["reported"], ours["reported"]],
        "counts": ours["counts"],
        "placeholders": ours["placeholders"],
        "last_stage": is_last_stage(),
    }


def _step(
    slime: SimpleNamespace, args: Any, shape: ParallelDims, reference: str, samples: dict[str, Any]
) -> tuple[list[int], dict[str, Any]]:
    """This rank's samples, and what a step over them gave."""
    config = {"dp_size": shape.data_parallel, "cp_size": shape.context_parallel}
    config |= {"vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    partitions, micro_batches, counts, sizes = slime.plan.build_dp_schedule(
        args,
        config,
        samples["total_lengths"],
        global_batch_size=len(set(ROLLOUTS)),
        rollout_indices=ROLLOUTS,
    )
    if args.use_dynamic_batch_size:
        for rank in micro_batches:
            rank.insert(1, [])
        counts = [count + 1 for count in counts]
    replica = parallel_state.get_data_parallel_rank()
    rollout = _rollout_data(slime, samples, partitions[replica])
    rollout |= {"micro_batch_indices": micro_batches[replica], "num_microbatches": counts}
    chunks = model_of(shape, reference, args)
    iterators = slime.iterators(args, chunks, rollout)
    step_options = (*sizes, *slime.step_options)
    made, gradients, reported = trained(
        *(slime, args, chunks, iterators, rollout, counts, *step_options), **slime.forward_options
    )
    return partitions[replica], {
        "log_probs": made.get("log_probs", []),
        "gradients": gradients,
        "reported": {name: float(value) for name, value in reported.items()},
        "counts": counts,
        "placeholders": sum(not each for rank in micro_batches for each in rank),
    }


def _rollout_data(
    slime: SimpleNamespace, samples: dict[str, Any], partition: list[int]
) -> dict[str, Any]:
    """This rank's samples, with what the rollout manager and the trainer add to them."""
    sums = [0.0] * (max(ROLLOUTS) + 1)
    for rollout, mask in zip(ROLLOUTS, samples["loss_masks"], strict=True):
        sums[rollout] += float(mask.sum())
    data = take({k: v for k, v in samples.items() if k != "advantages"}, partition)
    data["rollout_mask_sums"] = torch.tensor([sums[ROLLOUTS[i]] for i in partition])
    data |= {"partition": partition, "raw_reward": [0.0] * len(samples["tokens"])}
    cut_to_rank(slime.cut, data)
    return data


def arguments_since_1926(shape: ParallelDims) -> dict[str, Any]:
    """Arguments that its step has come to read; the defaults of its command line."""
    return {
        "balance_by_flops": False,
        "balance_data": False,
        "context_parallel_size": shape.context_parallel,
        "custom_advantage_function_path": None,
        "custom_megatron_init_path": "mcore_batching.integrations.slime.init",
        "eps_clip_c": None,
        "pipeline_model_parallel_size": shape.pipeline_parallel,
        "rollout_top_p": 1.0,
        "save_debug_train_data": None,
        "tensor_model_parallel_size": shape.tensor_parallel,
    }
