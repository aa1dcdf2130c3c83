"""The fields that rollout frameworks put into a batch, with their kinds.

The names and lengths are slime's (``rollout_data`` of its Megatron backend), and a few that other
frameworks add. Fields of your own go on top: ``DEFAULT_SCHEMA.declare(name, kind)``.
"""

from __future__ import annotations

from mcore_batching.batch.fields import Field, Kind
from mcore_batching.batch.schema import Schema

_PER_RESPONSE_TOKEN = (
    "loss_masks",
    "log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "teacher_log_probs",
    "values",
    "advantages",
    "returns",
    "kl",
    "entropy",
    "opd_reverse_kl",
)
_PER_SAMPLE = (
    "rewards",
    "raw_reward",
    "truncated",
    "round_number",
    "rollout_mask_sums",
    "max_seq_lens",
    "is_padding",
)
# Identifiers are metadata: a zero in a placeholder would pass for somebody else's.
_METADATA = (
    "uids",
    "trajectory_ids",
    "sample_indices",
    "rollout_ids",
    "source_names",
    "prompt",
    "metadata",
    "rollout_top_p_token_ids",
)

DEFAULT_SCHEMA = Schema(
    (
        Field("tokens", Kind.TOKENS, required=True),
        Field("total_lengths", Kind.PER_SAMPLE, required=True),
        Field("response_lengths", Kind.PER_SAMPLE, required=True),
        *(Field(name, Kind.PER_RESPONSE_TOKEN) for name in _PER_RESPONSE_TOKEN),
        *(Field(name, Kind.PER_SAMPLE) for name in _PER_SAMPLE),
        *(Field(name, Kind.METADATA) for name in _METADATA),
        Field("position_ids", Kind.POSITION_IDS),
        Field("multimodal_train_inputs", Kind.MULTIMODAL),
        # Rollout engines route no token after the last one.
        Field("rollout_routed_experts", Kind.ROUTED_EXPERTS, length_offset=-1),
        # Offsets into rollout_top_p_token_ids begin with a 0.
        Field("rollout_top_p_token_offsets", Kind.PER_RESPONSE_TOKEN, length_offset=1),
    )
)
"""Every field that slime's Megatron backend reads, and the common ones of others."""
