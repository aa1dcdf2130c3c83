"""Jobs that run miles' own modules, read from a checkout, with its plan and batching hooked.

As `kit.slime_scheduled`: miles has slime's functions with other parameters, and keeps its parallel
groups in a state of its own.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from kit.slime import arguments, use_checkout
from kit.slime_scheduled import arguments_since_1926, compare_modules
from mcore_batching.planning import ParallelDims


def compare(
    dims: dict[str, Any],
    reference: str,
    source: str,
    per_token_loss: bool,
    advantage_estimator: str = "grpo",
) -> dict[str, Any]:
    """As `kit.slime_scheduled.compare`, of miles."""
    shape = ParallelDims(**dims)
    args = arguments(shape, per_token_loss, advantage_estimator)
    return compare_modules(modules_of(source, shape, args), args, shape, reference)


def modules_of(source: str, shape: ParallelDims, args: Any) -> SimpleNamespace:
    """miles' modules from this checkout; slime's arguments are completed for them."""
    use_checkout(source)
    vars(args).update(arguments_since_1926(shape) | _arguments())
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
    groups = importlib.import_module("miles.utils.ft_utils.process_group_utils")
    parallel = importlib.import_module(f"{backends}.megatron_utils.parallel")
    parallel.get_args = MagicMock()
    importlib.import_module(f"{backends}.training_utils.parallel").set_parallel_state(
        parallel.create_megatron_parallel_state(groups.GroupInfo(rank=0, size=1, group=None))
    )

    def iterators(args: Any, chunks: list[Any], rollout: dict[str, Any]) -> list[Any]:
        made, counts = miles.data.get_data_iterator(args, chunks, rollout)
        assert counts == rollout["num_microbatches"]
        return made

    miles.iterators = iterators
    return miles


def _arguments() -> dict[str, Any]:
    """Arguments that its step reads beside slime's; the defaults of its command line."""
    return {
        "custom_tis_function_path": None,
        "debug_disable_optimizer": False,
        "dumper_enable": False,
        "dumper_fwd_bwd": None,
        "dumper_fwd_only": None,
        "enable_witness": False,
        "observe_training_entropy": False,
        "save_local_weight_checksum": False,
        "skip_actor_forward_only": False,
        "true_on_policy_mode": False,
        "use_dynamic_global_batch_size": False,
    }
