"""The engine on megatron.core: planning with all ranks, forward passes, train steps.

Importing this package imports torch and megatron.core. With ``MCORE_BATCHING_CPU=1`` in the
environment it lets the CPU stand in for CUDA, in this process, whatever launched it.
"""

from typing import TYPE_CHECKING, Any

from mcore_batching.batch.errors import CollectiveError
from mcore_batching.flags import add_dynamic_batch_arguments
from mcore_batching.megatron import cpu_emulation as cpu_emulation  # before megatron.core
from mcore_batching.megatron.attention import PackedAttention
from mcore_batching.megatron.checks.settings import check_settings, prepare_packed_model
from mcore_batching.megatron.errors import (
    CollationFailedError,
    DynamicBatchArgumentError,
    ForwardFailedError,
    NonFiniteError,
    PipelineFailedError,
    PlanMismatchError,
    PlanningFailedError,
)
from mcore_batching.megatron.forward_only import forward_only
from mcore_batching.megatron.iterator import (
    DataIterator,
    add_fields,
    get_data_iterator,
    schedule_of,
)
from mcore_batching.megatron.log_probs import response_log_probs, response_log_probs_and_entropy
from mcore_batching.megatron.logits import FusedLogits
from mcore_batching.megatron.specs import hybrid_spec as _hybrid_spec
from mcore_batching.megatron.specs import (
    packed_layer_spec,
    packed_mtp_block_spec,
    use_packed_attention,
)
from mcore_batching.megatron.topology import context_parallel_group
from mcore_batching.megatron.train_step import TrainStepResult, train_step

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    packed_hybrid_stack_spec: ModuleSpec

if cpu_emulation.is_requested():
    cpu_emulation.enable()

__all__ = [
    "CollationFailedError",
    "CollectiveError",
    "DataIterator",
    "DynamicBatchArgumentError",
    "ForwardFailedError",
    "FusedLogits",
    "NonFiniteError",
    "PackedAttention",
    "PipelineFailedError",
    "PlanMismatchError",
    "PlanningFailedError",
    "TrainStepResult",
    "add_dynamic_batch_arguments",
    "add_fields",
    "check_settings",
    "context_parallel_group",
    "forward_only",
    "get_data_iterator",
    "packed_hybrid_stack_spec",
    "packed_layer_spec",
    "packed_mtp_block_spec",
    "prepare_packed_model",
    "response_log_probs",
    "response_log_probs_and_entropy",
    "schedule_of",
    "train_step",
    "use_packed_attention",
]


def __getattr__(name: str) -> Any:
    """`packed_hybrid_stack_spec`, made at its first use: its layers import kernels."""
    if name != "packed_hybrid_stack_spec":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = _hybrid_spec()
    return globals()[name]
