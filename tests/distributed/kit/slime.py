"""Jobs that run slime's or miles' own modules, read from a checkout, with their batching hooked.

Their forward step, log-prob and loss functions, advantages and training step run as they are.
slime before its pull request 1860 plans where it trains ("slime unplanned"). Since 1926 it plans
with `build_dp_schedule`, deals the rollout data out to the ranks by it, and trains with its own
iterator ("slime"); miles has the same functions with other parameters, and keeps its parallel
groups in a state of its own ("miles"). What they import for other purposes (`STAND_INS`) is
replaced by empty modules, and so is ``megatron.training`` where the wheel has none: of that only
``get_args`` is called. Arguments are the defaults of their own parsers.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import math
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
from kit.model import named_parameters, seeded_model
from kit.samples import make_samples, take
from kit.stand_ins import StandIns, forget
from mcore_batching.integrations.slime import hook_schedule
from mcore_batching.megatron.topology import is_last_stage
from mcore_batching.planning import ParallelDims

STAND_INS = StandIns(
    (
        *("ray", "wandb", "httpx", "psutil", "tqdm", "transformers", "megatron.training"),
        *("sglang", "sglang_router", "requests", "yaml", "huggingface_hub", "datasets"),
        *("safetensors", "pydantic", "polars", "tokenizers"),  # miles' besides
    )
)

CAP_TOKENS = 48
# Shapes of `make_samples`: (17, 9), (5, 0), (8, 1), (12, 7), (3, 2), (27, 20), (9, 4), (16, 15).
SAMPLES = [0, 1, 5, 7, 8, 9, 10, 11]


ROLLOUTS = [0, 0, 1, 2, 3, 3, 4, 5]
"""Of each of the samples; two rollouts have two."""

LOG_PROBS = 2e-6
GRADIENTS = 2e-5
REPORTED = 2e-6
"""Tolerances, as in `test_exactness`: both sides compute in float32 over rows of other contents."""

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
"""Parallel dims and settings of `compare`."""


def compared_jobs(of: str, source: str) -> list[Job]:
    """A job of two ranks for each of `COMPARED`, with this framework's checkout."""
    return [
        Job(
            f"{of.replace(' ', '-')}-{name}",
            "kit.slime:compare",
            2,
            dims,
            {"dims": dims, "of": of, "source": source, **settings},
        )
        for name, (dims, settings) in COMPARED.items()
    ]


def check_equal(job: Job, ranks: list[dict[str, Any]]) -> None:
    """Both steps of `compare` gave the same, and the hooked one had placeholders."""
    is_planned = job.parameters["of"] != "slime unplanned"
    replicas = job.dims.get("data_parallel", 1)
    assert max(rank["log_probs"] for rank in ranks) < LOG_PROBS
    assert max(rank["gradients"] for rank in ranks) < GRADIENTS
    for rank in ranks:
        assert rank["counts"][0] < len(SAMPLES)
        assert rank["placeholders"] >= (replicas if is_planned else replicas > 1)
        own, hooked = rank["reported"]
        assert own.keys() == hooked.keys()
        assert bool(own) == rank["last_stage"]
        # By samples, slime counts a placeholder as one in the denominator of what it *reports*,
        # where it plans as it trains. Nothing that get_batch returns reaches that count. Gradients
        # do not depend on it.
        counted = 1.0
        if not is_planned and not job.parameters["per_token_loss"]:
            counted = 1 + rank["placeholders"] / len(SAMPLES)
        for name, value in own.items():
            same = math.isclose(hooked[name] * counted, value, rel_tol=REPORTED, abs_tol=1e-7)
            assert same, (name, hooked[name], value)


def use_checkout(source: str) -> None:
    """Import slime or miles from here from now on, even if another job has imported another."""
    torch.compiler.set_stance("force_eager")
    forget("slime", "miles")
    if STAND_INS not in sys.meta_path:
        sys.meta_path.append(STAND_INS)
    sys.path.insert(0, source)
    importlib.invalidate_caches()


def compare(
    dims: dict[str, Any],
    of: str,
    source: str,
    per_token_loss: bool,
    advantage_estimator: str = "grpo",
) -> dict[str, Any]:
    """One training step of a framework with its own plan and batching, and one with the hooked.

    Its own: equal shares, one sample a micro-batch. Hooked: packed; unplanned slime has all but one
    sample on the first data-parallel rank, the others an additional placeholder in every rank.

    Returns:
        largest relative differences of ``log_probs`` and ``gradients``, both reported losses, and
        the hooked ``counts`` and ``placeholders`` over all ranks.
    """
    shape = ParallelDims(**dims)
    use_checkout(source)
    args = arguments(of, shape, per_token_loss, advantage_estimator)
    modules = modules_of(of)
    own_part, own = _step(modules, args, shape)
    args = copy.copy(args)
    args.use_dynamic_batch_size = True
    planned: Any = contextlib.nullcontext()
    if modules.plan is not None:
        args.dynamic_batch_fill, planned = "placeholder", hook_schedule()
    assert planned is not None
    with planned, mcore_batching.hook(modules.data, modules.model) as hooked:
        assert len(hooked.hooked) == 2, hooked
        part, ours = _step(modules, args, shape)
    replaced = [modules.model.forward_only, modules.data.get_data_iterator]
    replaced += [modules.plan.build_dp_schedule] if modules.plan else []
    assert not any(hasattr(each, "_mcore_batching_original") for each in replaced)

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
        "gradients": max(map(difference, ours["gradients"], own["gradients"])),
        "reported": [own["reported"], ours["reported"]],
        "counts": ours["counts"],
        "placeholders": ours["placeholders"],
        "last_stage": is_last_stage(),
    }


def modules_of(of: str) -> SimpleNamespace:
    """The framework's modules from the checkout in use."""
    if of == "miles":
        return _modules_of_miles()
    names = ("data", "model", "loss")
    slime = SimpleNamespace(
        **{each: importlib.import_module(f"slime.backends.megatron_utils.{each}") for each in names}
    )
    slime.cut, slime.plan = slime.loss, None
    slime.iterators = lambda *given: slime.data.get_data_iterator(*given)  # hooked or not
    slime.step_options, slime.forward_options = (), {}
    if of == "slime":
        slime.plan = importlib.import_module("slime.utils.dp_schedule")
        slime.iterators = lambda args, chunks, rollout: (
            slime.data.get_data_iterator(rollout),
            rollout["num_microbatches"],
        )
        slime.forward_options = {"use_rollout_top_p_replay": True}
        accelerator = importlib.import_module("slime.utils.accelerator")
        # It knows CUDA and MUSA alone, and no stand-in for either on the CPU.
        accelerator.device = accelerator.current_device = lambda *_: torch.device(
            torch.cuda.current_device()
        )
    return slime


def _modules_of_miles() -> SimpleNamespace:
    backends = "miles.backends"
    miles = SimpleNamespace(
        data=importlib.import_module(f"{backends}.training_utils.data"),
        loss=importlib.import_module(f"{backends}.training_utils.loss"),
        cut=importlib.import_module(f"{backends}.training_utils.cp_utils"),
        model=importlib.import_module(f"{backends}.megatron_utils.model"),
        plan=importlib.import_module("miles.utils.dp_schedule"),
        step_options=(None, 0),  # no witness, first attempt
        forward_options={"rollout_id": 0},
    )
    miles.iterators = lambda *given: miles.data.get_data_iterator(*given)
    groups = importlib.import_module("miles.utils.ft_utils.process_group_utils")
    parallel = importlib.import_module(f"{backends}.megatron_utils.parallel")
    parallel.get_args = MagicMock()
    importlib.import_module(f"{backends}.training_utils.parallel").set_parallel_state(
        parallel.create_megatron_parallel_state(groups.GroupInfo(rank=0, size=1, group=None))
    )
    return miles


def _step(
    modules: SimpleNamespace, args: Any, shape: ParallelDims
) -> tuple[list[int], dict[str, Any]]:
    """This rank's samples, and what a step over them gave."""
    samples = take(make_samples(), SAMPLES)
    deal = _planned if modules.plan else _dealt
    part, plan, sizes = deal(modules, args, shape, samples)
    rollout = take({k: v for k, v in samples.items() if k != "advantages"}, part)
    _cut_to_rank(modules.cut, rollout)
    # slime has values of the whole batch among those of this rank's samples.
    rollout |= plan | {"raw_reward": [0.0] * (len(SAMPLES) + 3)}
    chunks = model_of(shape, args)
    iterators, counts = modules.iterators(args, chunks, rollout)
    assert counts == plan.get("num_microbatches", counts)
    made, gradients, reported = _trained(
        *(modules, args, chunks, iterators, rollout, counts, *sizes, *modules.step_options),
        **modules.forward_options,
    )
    placeholders = torch.tensor(sum(not each for each in iterators[0].micro_batch_indices or []))
    torch.distributed.all_reduce(placeholders, group=parallel_state.get_data_parallel_group())
    return part, {
        "log_probs": made.get("log_probs", []),
        "gradients": gradients,
        "reported": {name: float(value) for name, value in reported.items()},
        "counts": counts,
        "placeholders": int(placeholders),
    }


def _dealt(
    slime: SimpleNamespace, args: Any, shape: ParallelDims, samples: dict[str, Any]
) -> tuple[list[int], dict[str, Any], tuple[Any, ...]]:
    """This rank's samples where slime plans as it trains: a share, or all but one on one rank."""
    del slime, samples
    replica, replicas = parallel_state.get_data_parallel_rank(), shape.data_parallel
    everything = list(range(len(SAMPLES)))
    if not args.use_dynamic_batch_size:
        return everything[replica::replicas], {}, ()
    rest = len(everything) - (replicas > 1)
    return everything[rest:] if replica else everything[:rest], {}, ()


def _planned(
    modules: SimpleNamespace, args: Any, shape: ParallelDims, samples: dict[str, Any]
) -> tuple[list[int], dict[str, Any], tuple[Any, ...]]:
    """This rank's samples, what the rollout manager and the trainer add to them, and the sizes of
    steps, by the framework's plan."""
    config = {"dp_size": shape.data_parallel, "cp_size": shape.context_parallel}
    config |= {"vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    partitions, micro_batches, counts, sizes = modules.plan.build_dp_schedule(
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
    sums = [0.0] * len(set(ROLLOUTS))
    for rollout, mask in zip(ROLLOUTS, samples["loss_masks"], strict=True):
        sums[rollout] += float(mask.sum())
    part = partitions[replica]
    added = {
        "rollout_mask_sums": torch.tensor([sums[ROLLOUTS[i]] for i in part]),
        "partition": part,
        "micro_batch_indices": micro_batches[replica],
        "num_microbatches": counts,
    }
    return part, added, tuple(sizes)


def model_of(shape: ParallelDims, args: Any) -> list[Any]:
    """This rank's chunks with the weights of the reference, set up as slime does."""
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    chunks = seeded_model(
        shape, "dense", ddp, calculate_per_token_loss=args.calculate_per_token_loss
    )
    config = get_model_config(chunks[0])
    config.finalize_model_grads_func = finalize_model_grads
    config.variable_seq_lengths = True  # slime's arguments say so
    return chunks


def _cut_to_rank(module: Any, data: dict[str, Any]) -> None:
    """Leave this context-parallel rank's part of what slime keeps by tokens of the rank.

    Args:
        module: that has slime's function for it.
        data: rollout data, changed.
    """
    lengths = list(zip(data["total_lengths"], data["response_lengths"], strict=True))
    cut = module.slice_log_prob_with_cp
    for name in ("rollout_log_probs", "ref_log_probs"):
        data[name] = [cut(each, *own) for each, own in zip(data[name], lengths, strict=True)]


def _trained(
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
    with _arguments_of(slime.model, args):
        optimizer, scheduler = MagicMock(step=update), MagicMock()
        reported, *_ = slime.model.train_one_step(
            args, 0, 0, iterators, chunks, optimizer, scheduler, count, *step_options
        )
    return made, gradients, reported


@contextlib.contextmanager
def _arguments_of(module: Any, args: Any) -> Iterator[None]:
    original = module.get_args
    module.get_args = lambda: args
    try:
        yield
    finally:
        module.get_args = original


def arguments(
    of: str, shape: ParallelDims, per_token_loss: bool, advantage_estimator: str
) -> SimpleNamespace:
    """The framework's arguments: its parser's defaults, but for what the job is about, and those of
    Megatron that its step reads."""
    name = of.partition(" ")[0]
    # Made of pydantic, which is not there.
    sys.modules["miles.utils.ft_utils.health_checker"] = MagicMock()
    module = importlib.import_module(f"{name}.utils.arguments")
    parser = argparse.ArgumentParser(conflict_handler="resolve")
    getattr(module, f"get_{name}_extra_args_provider")()(parser)
    chosen = {
        "advantage_estimator": advantage_estimator,
        "calculate_per_token_loss": per_token_loss,
        "context_parallel_size": shape.context_parallel,
        "custom_advantage_function_path": None,
        "custom_megatron_init_path": "mcore_batching.integrations.slime.init",
        "data_pad_size_multiplier": 8,
        "decoder_seq_length": None,
        "entropy_coef": 0.01,
        "eps_clip_high": 0.28,
        "global_batch_size": len(SAMPLES),
        "kl_loss_coef": 0.1,
        "kl_loss_type": "low_var_kl",
        "max_tokens_per_gpu": CAP_TOKENS // shape.context_parallel,
        "pipeline_model_parallel_size": shape.pipeline_parallel,
        "qkv_format": "thd",
        "rollout_temperature": 0.9,
        "seq_length": 1,
        "tensor_model_parallel_size": shape.tensor_parallel,
        "use_kl_loss": True,
        "use_opsm": advantage_estimator == "gspo",
        "use_rollout_entropy": True,
    }
    return SimpleNamespace(**{each.dest: each.default for each in parser._actions} | chosen)
