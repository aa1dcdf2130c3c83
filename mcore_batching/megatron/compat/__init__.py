"""Differences between Megatron-LM versions, and nothing else.

The rest of the package calls `compat.<function>` and never asks for a version. Run on megatron-core
0.16.1 and 0.19.2.

packed_rows  Megatron's parameters of a packed row, and the ranks that share it
layers       kinds of layers, what they can run, and their specs
schedules    passes of pipeline schedules, and transfers between stages
experts      routers, what they record, and how tokens are exchanged
multi_token  losses of multi-token prediction
scripts      start and log of stock training scripts
cpu          functions that insist on CUDA, replaced
"""

from mcore_batching.megatron.compat.cpu import patch_for_cpu
from mcore_batching.megatron.compat.experts import (
    fix_router_masks,
    pads_uneven_dispatch_inputs,
    scale_moe_metrics,
)
from mcore_batching.megatron.compat.layers import (
    HAVE_TRANSFORMER_ENGINE,
    class_of_forward,
    debugs_engine,
    engine_linears,
    has_hybrid_model,
    is_engines_attention,
    local_core_attention_name,
    local_gpt_layer_spec,
    packed_submodules,
    packs_gated_delta_net,
    packs_sparse_attention,
    replace_final_norm,
    scatters_padding_mask,
    what_mamba_lacks,
    why_no_plain_product,
)
from mcore_batching.megatron.compat.multi_token import (
    log_multi_token_loss,
    modules_with_multi_token_losses,
    multi_token_hits,
    recomputes_multi_token_rows,
    what_multi_token_prediction_lacks,
)
from mcore_batching.megatron.compat.packed_rows import (
    attention_groups,
    end_states_with_samples,
    forget_padded_length,
    give_offsets,
    let_rows_have_groups,
    packed_seq_params,
    set_row_group,
)
from mcore_batching.megatron.compat.schedules import (
    around_passes,
    in_passes,
    shapes_of_transfers,
    unknown_to_split_backward,
    waits_for_sends,
)
from mcore_batching.megatron.compat.scripts import (
    counts_operations_of_samples,
    has_sequence_packing,
    modules_with_validate_args,
)

__all__ = [
    "HAVE_TRANSFORMER_ENGINE",
    "around_passes",
    "attention_groups",
    "class_of_forward",
    "counts_operations_of_samples",
    "debugs_engine",
    "end_states_with_samples",
    "engine_linears",
    "fix_router_masks",
    "forget_padded_length",
    "give_offsets",
    "has_hybrid_model",
    "has_sequence_packing",
    "in_passes",
    "is_engines_attention",
    "let_rows_have_groups",
    "local_core_attention_name",
    "local_gpt_layer_spec",
    "log_multi_token_loss",
    "modules_with_multi_token_losses",
    "modules_with_validate_args",
    "multi_token_hits",
    "packed_seq_params",
    "packed_submodules",
    "packs_gated_delta_net",
    "packs_sparse_attention",
    "pads_uneven_dispatch_inputs",
    "patch_for_cpu",
    "recomputes_multi_token_rows",
    "replace_final_norm",
    "scale_moe_metrics",
    "scatters_padding_mask",
    "set_row_group",
    "shapes_of_transfers",
    "unknown_to_split_backward",
    "waits_for_sends",
    "what_mamba_lacks",
    "what_multi_token_prediction_lacks",
    "why_no_plain_product",
]
