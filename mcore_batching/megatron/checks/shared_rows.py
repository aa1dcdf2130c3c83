"""Models whose rows have context-parallel sizes of their own: what they need, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.utils import unwrap_model

from mcore_batching.flags import FLAGS
from mcore_batching.megatron import compat
from mcore_batching.megatron.attention import PackedAttention
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.planning import PlannerConfig

_FLAG = FLAGS["max_context_parallel"]
_STATE_SPACE_LAYERS = ("MambaMixer", "GatedDeltaNet", "GatedDeltaNet2", "GatedDeltaProductMixer")
# Others slice by the group that Megatron began with, whatever the row's.
_POSITIONS_OF_SHARED_ROWS = ("rope", "learned_absolute", "none")


def let_rows_have_groups(chunks: list[Any]) -> None:
    """Let every attention layer follow the row's context-parallel group, or refuse the model."""
    for chunk in chunks:
        positions = getattr(unwrap_model(chunk), "position_embedding_type", "of an unknown kind")
        if positions not in _POSITIONS_OF_SHARED_ROWS:
            raise DynamicBatchArgumentError(
                f"position embeddings {positions} slice by a fixed context-parallel group: set "
                f"--position-embedding-type rope, or unset {_FLAG}"
            )
        for name, module in chunk.named_modules():
            if compat.layers.class_of_forward(module) in _STATE_SPACE_LAYERS:
                raise DynamicBatchArgumentError(
                    f"{name} is a state-space layer of a fixed parallel group: unset {_FLAG}"
                )
            if not isinstance(module, Attention):
                continue
            core = module.core_attention
            known = isinstance(core, PackedAttention) or compat.layers.is_engines_attention(core)
            # Not isinstance: a subclass may well slice by itself.
            if type(module) is not SelfAttention or not known:
                raise DynamicBatchArgumentError(
                    f"{name}, a {type(module).__name__} with {type(core).__name__}, is not known "
                    f"to follow a row's own group: unset {_FLAG}, or build the model with "
                    "mcore_batching.megatron.packed_layer_spec(config)"
                )
            compat.packed_rows.let_rows_have_groups(module)


def shared_row_problems(
    config: Any, planner: PlannerConfig, *, has_auxiliary_loss: bool
) -> Iterator[str]:
    """Settings that do not go with a context-parallel size for every row."""
    if planner.max_context_parallel is None:
        return
    # Megatron divides by ranks or by micro-batches, which rows of several sizes count unevenly.
    if not config.calculate_per_token_loss:
        yield (
            f"under {_FLAG} Megatron averages over a fixed number of ranks: set "
            "--calculate-per-token-loss"
        )
    if has_auxiliary_loss:
        yield (
            "auxiliary losses of experts have a fixed context-parallel group: set "
            f"--moe-aux-loss-coeff 0 and no --moe-z-loss-coeff, or unset {_FLAG}"
        )
