"""Jobs that run slime's own modules, read from a checkout, with its batching hooked.

slime's forward step, log-prob and loss functions, advantages and training step run as they are.
What they import for other purposes (`STAND_INS`) is replaced by empty modules, and so is
``megatron.training`` where the wheel has none: of that only ``get_args`` is called.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.utils import get_model_config

import mcore_batching
from kit.exactness import difference
from kit.harness import Job
from kit.model import named_parameters, sharded_model
from kit.samples import make_samples, take
from kit.stand_ins import StandIns
from mcore_batching.megatron.topology import is_last_stage
from mcore_batching.planning import ParallelDims

STAND_INS = StandIns(
    (
        *("ray", "wandb", "httpx", "psutil", "tqdm", "transformers", "megatron.training"),
        *("sglang", "safetensors", "pydantic", "huggingface_hub", "datasets"),  # miles' besides
    )
)

CAP_TOKENS = 48
# Shapes of `make_samples`: (17, 9), (5, 0), (8, 1), (12, 7), (3, 2), (27, 20), (9, 4), (16, 15).
SAMPLES = [0, 1, 5, 7, 8, 9, 10, 11]


COMPARED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp2-tokens": ({"data_parallel": 2}, {"per_token_loss": True}),
    "dp2-samples": ({"data_parallel": 2}, {"per_token_loss": False}),
    "dp2-gspo": ({"data_parallel": 2}, {"per_token_loss": True, "advantage_estimator": "gspo"}),
    "cp2-tokens": ({"context_parallel": 2}, {"per_token_loss": True}),
    "pp2-samples": ({"pipeline_parallel": 2}, {"per_token_loss": False}),
    "tp2-sp-tokens": (
        {"tensor_parallel": 2, "sequence_parallel": True},
        {"per_token_loss": True},
    ),
}
"""Parallel dims and settings of `compare`, of both modules that have one."""


def compared_jobs(prefix: str, function: str, source: str) -> list[Job]:
    """A job of two ranks for each of `COMPARED`, with slime's checkout."""
    return [
        Job(
            f"{prefix}-{name}",
            function,
            2,
            dims,
            {"dims": dims, "reference": "dense", "source": source, **settings},
        )
        for name, (dims, settings) in COMPARED.items()
    ]


def use_checkout(source: str) -> None:
    """Import slime or miles from here from now on, even if another job has imported another."""
    torch.compiler.set_stance("force_eager")
    for name in [each for each in sys.modules if each.partition(".")[0] in ("slime", "miles")]:
        del sys.modules[name]
    if STAND_INS not in sys.meta_path:
        sys.meta_path.append(STAND_INS)
    sys.path.insert(0, source)
    importlib.invalidate_caches()


def compare(
    dims: dict[str, Any],
    reference: str,
    source: str,
    per_token_loss: bool,
    advantage_estimator: str = "grpo",
) -> dict[str, Any]:
    """One training step of slime with its own batching, and one with the hooked.

    Its own: equal shares, one sample a micro-batch. Hooked: all but one sample on the first
    data-parallel rank, packed.

    Returns:
        largest relative differences of ``log_probs`` and ``gradients``, both reported losses,
        and the hooked ``counts``, ``samples`` and ``placeholders``, the last two over all ranks.
    """
    shape = ParallelDims(**dims)
    slime = modules_of(source)
    samples = take(make_samples(), SAMPLES)
    replica, replicas = parallel_state.get_data_parallel_rank(), shape.data_parallel
    count = len(SAMPLES)
    equal = list(range(count))[replica::replicas]
    uneven = [count - 1] if replica else list(range(count - (replicas > 1)))
    args = arguments(shape, per_token_loss, advantage_estimator)

    own = _step(slime, args, shape, reference, take(samples, equal))
    args.use_dynamic_batch_size = True
    with mcore_batching.hook(slime.data, slime.model) as hooked:
        assert len(hooked.hooked) == 4, hooked
        ours = _step(slime, args, shape, reference, take(samples, uneven))
    assert not hasattr(slime.model.get_batch, "_mcore_batching_original")

    found: dict[int, torch.Tensor] = dict(zip(uneven, ours["log_probs"], strict=is_last_stage()))
    differences = [0.0]
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, dict(zip(equal, own["log_probs"], strict=False)))
    for part in parts:  # a sample may have been on the other rank
        for i, values in part.items():
            if i in found and replicas > 1:
                differences.append(difference(found[i], values))
    if replicas == 1:
        differences += map(difference, ours["log_probs"], own["log_probs"])
    return {
        "log_probs": max(differences),
        "num_log_probs": len(ours["log_probs"]),
        "gradients": max(map(difference, ours["gradients"], own["gradients"])),
        "reported": [own["reported"], ours["reported"]],
        "counts": ours["counts"],
        "samples": count,
        "placeholders": ours["placeholders"],
        "last_stage": is_last_stage(),
    }


def modules_of(source: str) -> SimpleNamespace:
    """slime's modules from this checkout."""
    use_checkout(source)
    names = ("data", "model", "loss")
    return SimpleNamespace(
        **{each: importlib.import_module(f"slime.backends.megatron_utils.{each}") for each in names}
    )


def _step(
    slime: SimpleNamespace, args: Any, shape: ParallelDims, reference: str, rollout: dict[str, Any]
) -> dict[str, Any]:
    chunks = model_of(shape, reference, args)
    rollout = {k: v for k, v in rollout.items() if k != "advantages"}
    cut_to_rank(slime.loss, rollout)
    # slime has values of the whole batch among those of this rank's samples.
    rollout["raw_reward"] = [0.0] * (len(rollout["tokens"]) + 3)

    iterators, counts = slime.data.get_data_iterator(args, chunks, rollout)
    made, gradients, reported = trained(slime, args, chunks, iterators, rollout, counts)
    indices = iterators[0].micro_batch_indices
    placeholders = torch.tensor(sum(not each for each in indices or []))
    torch.distributed.all_reduce(placeholders, group=parallel_state.get_data_parallel_group())
    return {
        "log_probs": made.get("log_probs", []),
        "gradients": gradients,
        "reported": reported,
        "counts": counts,
        "placeholders": int(placeholders),
    }


def model_of(shape: ParallelDims, reference: str, args: Any) -> list[Any]:
    """This rank's chunks with the weights of the reference, set up as slime does."""
    weights = torch.load(reference, weights_only=True)["weights"]
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    chunks = sharded_model(
        shape, "dense", weights, ddp, calculate_per_token_loss=args.calculate_per_token_loss
    )
    config = get_model_config(chunks[0])
    config.finalize_model_grads_func = finalize_model_grads
    config.variable_seq_lengths = True  # slime's arguments say so
    return chunks


def cut_to_rank(module: Any, data: dict[str, Any]) -> None:
    """Leave this context-parallel rank's part of what slime keeps by tokens of the rank.

    Args:
        module: that has slime's function for it.
        data: rollout data, changed.
    """
    lengths = list(zip(data["total_lengths"], data["response_lengths"], strict=True))
    cut = module.slice_log_prob_with_cp
    for name in ("rollout_log_probs", "ref_log_probs"):
        data[name] = [cut(each, *own) for each, own in zip(data[name], lengths, strict=True)]


def trained(
    slime: SimpleNamespace,
    args: Any,
    chunks: list[Any],
    iterators: list[Any],
    rollout: dict[str, Any],
    counts: list[int],
    *step_options: Any,
    **forward_options: Any,
) -> tuple[dict[str, Any], list[torch.Tensor], dict[str, Any]]:
    """Log-probs, gradients and reported losses of one of slime's training steps.

    Args:
        step_options: further arguments of its training step.
        forward_options: of its forward-only pass.
    """
    made = slime.model.forward_only(
        slime.loss.get_log_probs_and_entropy, args, chunks, iterators, counts, **forward_options
    )
    rollout.update(made)
    slime.loss.compute_advantages_and_returns(args, rollout)
    for iterator in iterators:
        iterator.reset()
    gradients: list[torch.Tensor] = []

    def update() -> tuple[bool, float, int]:
        gradients.extend(parameter.main_grad.clone() for _, parameter in named_parameters(chunks))
        return True, 0.0, 0

    (count,) = counts
    with arguments_of(slime.model, args):
        optimizer, scheduler = MagicMock(step=update), MagicMock()
        reported, *_ = slime.model.train_one_step(
            args, 0, 0, iterators, chunks, optimizer, scheduler, count, *step_options
        )
    return made, gradients, reported


@contextlib.contextmanager
def arguments_of(module: Any, args: Any) -> Iterator[None]:
    original = module.get_args
    module.get_args = lambda: args
    try:
        yield
    finally:
        module.get_args = original


def arguments(
    shape: ParallelDims, per_token_loss: bool, advantage_estimator: str
) -> SimpleNamespace:
    """slime's arguments, as far as its step reads them; the defaults of its command line."""
    return SimpleNamespace(
        advantage_estimator=advantage_estimator,
        allgather_cp=False,
        calculate_per_token_loss=per_token_loss,
        ci_test=False,
        custom_megatron_before_log_prob_hook_path=None,
        custom_megatron_before_train_step_hook_path=None,
        custom_pg_loss_reducer_function_path=None,
        data_pad_size_multiplier=8,
        decoder_seq_length=None,
        enable_mtp_training=False,
        entropy_coef=0.01,
        eps_clip=0.2,
        eps_clip_high=0.28,
        get_mismatch_metrics=False,
        global_batch_size=len(SAMPLES),
        kl_coef=0.0,
        kl_loss_coef=0.1,
        kl_loss_type="low_var_kl",
        log_probs_chunk_size=-1,
        loss_type="policy_loss",
        max_tokens_per_gpu=CAP_TOKENS // shape.context_parallel,
        micro_batch_size=1,
        normalize_advantages=False,
        qkv_format="thd",
        recompute_loss_function=False,
        rollout_temperature=0.9,
        seq_length=1,
        use_dynamic_batch_size=False,
        use_kl_loss=True,
        use_opd=False,
        use_opsm=advantage_estimator == "gspo",
        opsm_delta=1e-4,
        use_rollout_entropy=True,
        use_rollout_logprobs=False,
        use_tis=False,
        use_unbiased_kl=False,
    )
