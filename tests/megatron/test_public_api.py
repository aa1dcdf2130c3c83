"""Names and signatures that users and frameworks rely on."""

from __future__ import annotations

import inspect

import mcore_batching.megatron as public
from mcore_batching.megatron import forward_only, get_data_iterator, train_step

NAMES = {
    "CollationFailedError",
    "CollectiveError",
    "DataIterator",
    "DynamicBatchArgumentError",
    "ForwardFailedError",
    "PackedAttention",
    "PlanMismatchError",
    "PlanningFailedError",
    "TrainStepResult",
    "add_dynamic_batch_arguments",
    "add_fields",
    "check_settings",
    "forward_only",
    "get_data_iterator",
    "packed_layer_spec",
    "response_entropy",
    "response_log_probs",
    "schedule_of",
    "train_step",
    "use_packed_attention",
}


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_names() -> None:
    assert set(public.__all__) == NAMES
    assert all(getattr(public, name) is not None for name in NAMES)


def test_frameworks_signatures() -> None:
    assert parameters(get_data_iterator)[:3] == ["args", "model", "rollout_data"]
    expected = ["f", "args", "model", "data_iterator", "num_microbatches", "store_prefix"]
    assert parameters(forward_only) == expected
    assert inspect.signature(forward_only).parameters["store_prefix"].default == ""
    assert parameters(train_step) == [
        "loss_function",
        "args",
        "model",
        "data_iterator",
        "num_microbatches",
        "optimizer",
        "opt_param_scheduler",
        "step",
    ]
