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
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_model_config

import mcore_batching
from kit.model import named_parameters, small_model
from kit.objective import difference
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
TOLERANCE = 2e-6
"""As in `test_exactness`, of gradients ten times as much: both sides compute in float32 over rows
of other contents."""


def compare(
    dims: ParallelDims,
    of: str,
    source: str,
    per_token_loss: bool,
    advantage_estimator: str = "grpo",
) -> None:
    """One training step of a framework with its own plan and batching, and one with the hooked,
    which has placeholders: log-probs, gradients and reported losses are the same.

    Its own: equal shares, one sample a micro-batch. Hooked: packed; unplanned slime has all but one
    sample on the first data-parallel rank, the others an additional placeholder in every rank.
    """
    torch.compiler.set_stance("force_eager")
    forget("slime", "miles")  # another job may have imported those of another checkout
    if STAND_INS not in sys.meta_path:
        sys.meta_path.append(STAND_INS)
    sys.path.insert(0, source)
    importlib.invalidate_caches()
    args = arguments(of, dims, per_token_loss, advantage_estimator)
    modules = _modules_of_miles() if of == "miles" else _modules_of_slime(of)
    own = _step(modules, args, dims)
    args = copy.copy(args)
    args.use_dynamic_batch_size = True
    planned: Any = contextlib.nullcontext()
    if modules.plan is not None:
        args.dynamic_batch_fill, planned = "placeholder", hook_schedule()
    assert planned is not None
    with planned, mcore_batching.hook(modules.data, modules.model) as hooked:
        assert len(hooked.hooked) == 2, hooked
        ours = _step(modules, args, dims)
    replaced = [modules.model.forward_only, modules.data.get_data_iterator]
    replaced += [modules.plan.build_dp_schedule] if modules.plan else []
    assert not any(hasattr(each, "_mcore_batching_original") for each in replaced)

    # Context-parallel ranks hold other parts of a sample: those of this rank's peers alone count.
    group = parallel_state.get_data_parallel_group()
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, own["log_probs"], group=group)
    same = {sample: values for part in parts for sample, values in part.items()}
    off = [difference(each, same[sample]) for sample, each in ours["log_probs"].items()]
    assert max(off, default=0.0) < TOLERANCE, off
    off = [*map(difference, ours["gradients"], own["gradients"])]
    assert max(off) < 10 * TOLERANCE, off
    placeholders, replicas = ours["placeholders"], dims.data_parallel
    assert placeholders >= (replicas if modules.plan else replicas > 1)
    assert ours["counts"][0] < len(SAMPLES)
    assert own["reported"].keys() == ours["reported"].keys()
    assert bool(own["reported"]) == is_last_stage()
    # By samples, slime counts a placeholder as one in the denominator of what it *reports*, where
    # it plans as it trains. Nothing that get_batch returns reaches that count. Gradients do not
    # depend on it.
    by_samples = not modules.plan and not per_token_loss
    counted = 1 + placeholders / len(SAMPLES) if by_samples else 1.0
    for name, value in own["reported"].items():
        found = ours["reported"][name] * counted
        assert math.isclose(found, value, rel_tol=TOLERANCE, abs_tol=1e-7), (name, found, value)


def _modules_of_slime(of: str) -> SimpleNamespace:
    """The modules that are run from the checkout in use, and what differs between frameworks."""
    megatron = "slime.backends.megatron_utils"
    data, model, loss = (
        importlib.import_module(f"{megatron}.{n}") for n in ("data", "model", "loss")
    )
    slime = SimpleNamespace(data=data, model=model, loss=loss, cut=loss, plan=None)
    slime.iterators = lambda *given: data.get_data_iterator(*given)  # hooked or not
    slime.step_options, slime.forward_options = (), {}
    if of == "slime":
        slime.plan = importlib.import_module("slime.utils.dp_schedule")
        slime.iterators = lambda args, chunks, rollout: (
            data.get_data_iterator(rollout),
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


def _step(modules: SimpleNamespace, args: Any, dims: ParallelDims) -> dict[str, Any]:
    """What one of the framework's training steps gave, log-probs by the sample."""
    samples = take(make_samples(), SAMPLES)
    part, plan, sizes = (_planned if modules.plan else _dealt)(modules, args, dims, samples)
    rollout = take({k: v for k, v in samples.items() if k != "advantages"}, part)
    # Of what slime keeps by tokens of the rank, the context-parallel rank's part.
    lengths = list(zip(rollout["total_lengths"], rollout["response_lengths"], strict=True))
    for name in ("rollout_log_probs", "ref_log_probs"):
        whole = zip(rollout[name], lengths, strict=True)
        rollout[name] = [modules.cut.slice_log_prob_with_cp(each, *own) for each, own in whole]
    # slime has values of the whole batch among those of this rank's samples.
    rollout |= plan | {"raw_reward": [0.0] * (len(SAMPLES) + 3)}

    per_token = args.calculate_per_token_loss
    chunks = small_model(dims, calculate_per_token_loss=per_token)
    config = get_model_config(chunks[0])
    config.finalize_model_grads_func = finalize_model_grads
    config.variable_seq_lengths = True  # slime's arguments say so
    iterators, counts = modules.iterators(args, chunks, rollout)
    assert counts == plan.get("num_microbatches", counts)
    log_probs = modules.loss.get_log_probs_and_entropy
    passed = log_probs, args, chunks, iterators, counts
    made = modules.model.forward_only(*passed, **modules.forward_options)
    rollout.update(made)
    modules.loss.compute_advantages_and_returns(args, rollout)
    for iterator in iterators:
        iterator.reset()
    gradients: list[torch.Tensor] = []

    def update() -> tuple[bool, float, int]:
        gradients.extend(parameter.main_grad.clone() for _, parameter in named_parameters(chunks))
        return True, 0.0, 0

    given = (args, 0, 0, iterators, chunks, MagicMock(step=update), MagicMock(), *counts)
    with mock.patch.object(modules.model, "get_args", return_value=args):
        reported, *_ = modules.model.train_one_step(*given, *sizes, *modules.step_options)
    placeholders = torch.tensor(sum(not each for each in iterators[0].micro_batch_indices or []))
    dist.all_reduce(placeholders, group=parallel_state.get_data_parallel_group())
    return {
        "log_probs": dict(zip(part, made.get("log_probs", []), strict=is_last_stage())),
        "gradients": gradients,
        "reported": {name: float(value) for name, value in reported.items()},
        "counts": counts,
        "placeholders": int(placeholders),
    }


Dealt = tuple[list[int], dict[str, Any], tuple[Any, ...]]
"""This rank's samples, what the rollout manager and the trainer add to them, and the sizes of
steps."""


def _dealt(modules: Any, args: Any, dims: ParallelDims, samples: dict[str, Any]) -> Dealt:
    """Where slime plans as it trains: a share, or all but one on one rank."""
    replica, replicas = parallel_state.get_data_parallel_rank(), dims.data_parallel
    everything = list(range(len(SAMPLES)))
    if not args.use_dynamic_batch_size:
        return everything[replica::replicas], {}, ()
    rest = len(everything) - (replicas > 1)
    return everything[rest:] if replica else everything[:rest], {}, ()


def _planned(modules: Any, args: Any, dims: ParallelDims, samples: dict[str, Any]) -> Dealt:
    config = {"dp_size": dims.data_parallel, "cp_size": dims.context_parallel}
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


def arguments(
    of: str, dims: ParallelDims, per_token_loss: bool, advantage_estimator: str
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
        "context_parallel_size": dims.context_parallel,
        "custom_advantage_function_path": None,
        "custom_megatron_init_path": "mcore_batching.integrations.slime.init",
        "data_pad_size_multiplier": 8,
        "decoder_seq_length": None,
        "entropy_coef": 0.01,
        "eps_clip_high": 0.28,
        "global_batch_size": len(SAMPLES),
        "kl_loss_coef": 0.1,
        "kl_loss_type": "low_var_kl",
        "max_tokens_per_gpu": CAP_TOKENS // dims.context_parallel,
        "pipeline_model_parallel_size": dims.pipeline_parallel,
        "qkv_format": "thd",
        "rollout_temperature": 0.9,
        "seq_length": 1,
        "tensor_model_parallel_size": dims.tensor_parallel,
        "use_kl_loss": True,
        "use_opsm": advantage_estimator == "gspo",
        "use_rollout_entropy": True,
    }
    return SimpleNamespace(**{each.dest: each.default for each in parser._actions} | chosen)
