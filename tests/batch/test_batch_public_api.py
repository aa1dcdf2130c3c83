"""Public names, signatures and fields, frozen: changing one is a decision, not an accident."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from mcore_batching import batch

NAMES = {
    "BatchError",
    "DEFAULT_SCHEMA",
    "Field",
    "GroupStatistics",
    "Kind",
    "LeftPadded",
    "OUTCOME_ESTIMATORS",
    "OrderError",
    "PackedMicroBatch",
    "Schema",
    "SchemaError",
    "SplitGroupError",
    "StepTotals",
    "TEMPORAL_ESTIMATORS",
    "apply_order",
    "check_filled",
    "check_groups_are_local",
    "compute_advantages",
    "discounted_returns",
    "gather_response",
    "generalized_advantages",
    "group_statistics",
    "last_token_rewards",
    "left_pad",
    "left_pad_packed",
    "make_placeholder",
    "masked_mean",
    "masked_variance",
    "masked_zscore",
    "merge_packed",
    "outcome_advantages",
    "owned_num_tokens",
    "owned_response_mask",
    "pack",
    "pack_left_padded",
    "packed_positions",
    "pad_batch",
    "real_indices",
    "real_samples",
    "required_batch_multiple",
    "response_loss_masks",
    "response_values",
    "restore_order",
    "right_align",
    "right_aligned_rows",
    "sample_mean",
    "sample_metrics",
    "slice_packed",
    "step_batches",
    "step_totals",
    "take",
    "token_mean",
    "unpad",
    "zigzag_merge",
    "zigzag_positions",
    "zigzag_slice",
}

SIGNATURES = {
    "apply_order": "(values, sample_indices)",
    "check_filled": "(filled, *, schema, keys, total_lengths, response_lengths)",
    "check_groups_are_local": "(batch, *, group)",
    "compute_advantages": (
        "(batch, estimator='grpo', *, step_wise=False, outcome='last', steps=None, "
        "normalize=None, gamma=1.0, gae_lambda=1.0, group=None)"
    ),
    "discounted_returns": "(token_rewards, masks, *, gamma=1.0)",
    "gather_response": "(local_stream, micro_batch, *, group=None)",
    "generalized_advantages": "(token_rewards, values, masks, *, gamma=1.0, gae_lambda=1.0)",
    "group_statistics": "(values, groups, *, is_padding=None)",
    "last_token_rewards": "(rewards, masks)",
    "left_pad": "(samples, schema=DEFAULT_SCHEMA, *, pad_token_id, max_seq_len=None)",
    "left_pad_packed": "(row, *, pad_token_id, max_seq_len=None)",
    "make_placeholder": "(schema, batch_keys, example_batch, *, pad_token_id=0)",
    "masked_mean": "(values, masks, *, group=None)",
    "masked_variance": "(values, masks, *, group=None, correction=0)",
    "masked_zscore": "(values, masks, *, group=None, epsilon=1e-08)",
    "merge_packed": "(parts, cu_seqlens_padded, dim=0)",
    "outcome_advantages": "(rewards, groups, *, estimator='grpo', lengths=None)",
    "owned_num_tokens": "(row)",
    "owned_response_mask": "(micro_batch)",
    "pack": (
        "(samples, *, schema, sample_indices, sample_alignment_tokens=1, "
        "row_alignment_tokens=1, context_parallel_size=1, context_parallel_rank=0, "
        "pad_token_id=0, is_placeholder=False)"
    ),
    "pack_left_padded": "(left_padded, *, sample_indices, **options)",
    "packed_positions": "(cu_seqlens_padded, context_parallel_size, rank)",
    "pad_batch": (
        "(batch, multiple, schema=DEFAULT_SCHEMA, *, pad_token_id, response_token_id=None, "
        "identifiers=('uids', 'trajectory_ids', 'rollout_ids', 'sample_indices'), "
        "first_padding_number=0)"
    ),
    "real_indices": "(batch)",
    "real_samples": "(batch)",
    "required_batch_multiple": (
        "(*, data_parallel_size, samples_per_prompt, actor_mini_batch_size, "
        "critic_mini_batch_size=None, actor_trains=True)"
    ),
    "response_loss_masks": "(row)",
    "response_values": "(left_padded, values, index=None)",
    "restore_order": "(values, sample_indices, num_samples)",
    "right_align": "(values, *, fill=0, name='values', default=torch.float32)",
    "right_aligned_rows": "(block, lengths)",
    "sample_mean": "(per_token, row, totals, *, over_trained_samples=False)",
    "sample_metrics": "(batch, fields, *, group=None)",
    "slice_packed": "(x, cu_seqlens_padded, context_parallel_size, rank, dim=0)",
    "step_batches": "(batch, steps)",
    "step_totals": "(rows)",
    "take": "(batch, indices)",
    "token_mean": "(per_token, row, totals)",
    "unpad": "(left_padded)",
    "zigzag_merge": "(parts, dim=0)",
    "zigzag_positions": "(length, context_parallel_size, rank)",
    "zigzag_slice": "(x, context_parallel_size, rank, dim=0)",
}

FIELDS = {
    "Field": (
        "name",
        "kind",
        "length_offset",
        "required",
    ),
    "GroupStatistics": (
        "num_values",
        "total",
        "mean",
        "deviation",
    ),
    "LeftPadded": (
        "blocks",
        "others",
        "total_lengths",
        "response_lengths",
        "schema",
    ),
    "PackedMicroBatch": (
        "tokens",
        "labels",
        "position_ids",
        "loss_mask",
        "padding_mask",
        "cu_seqlens_padded",
        "host_cu_seqlens_padded",
        "cu_seqlens",
        "max_seqlen",
        "total_lengths",
        "response_lengths",
        "sample_indices",
        "is_placeholder",
        "responses",
        "fields",
        "schema",
        "context_parallel_size",
        "context_parallel_rank",
    ),
    "Schema": ("fields",),
    "StepTotals": (
        "num_samples",
        "num_trained_samples",
        "num_tokens",
        "token_weight",
    ),
}

DEFAULTS = {
    "Field": {"length_offset": 0, "required": False},
    "Schema": {"fields": ()},
    "StepTotals": {
        "num_samples": 0,
        "num_trained_samples": 0,
        "num_tokens": 0,
        "token_weight": 0.0,
    },
}

METHODS = {
    "Field": {"declaration", "num_rows"},
    "GroupStatistics": set(),
    "LeftPadded": {
        "attention_mask",
        "num_bytes",
        "num_rows",
        "num_samples",
        "position_ids",
        "response_mask",
        "tokens",
        "width",
    },
    "PackedMicroBatch": {"num_samples", "packed", "seqlens", "to"},
    "Schema": {"declare", "resolve", "validate"},
    "StepTotals": set(),
}

KINDS = {
    "TOKENS",
    "PER_TOKEN",
    "PER_RESPONSE_TOKEN",
    "PER_SAMPLE",
    "POSITION_IDS",
    "ROUTED_EXPERTS",
    "MULTIMODAL",
    "METADATA",
}

ERRORS = {
    "BatchError": set(),
    "OrderError": {"missing", "doubled", "extra"},
    "SchemaError": {"key", "sample_index", "expected", "found", "declaration"},
    "SplitGroupError": {"ranks_of_group"},
}

DEFAULT_FIELDS = {
    "tokens",
    "total_lengths",
    "response_lengths",
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
    "rewards",
    "raw_reward",
    "truncated",
    "round_number",
    "rollout_mask_sums",
    "max_seq_lens",
    "is_padding",
    "uids",
    "trajectory_ids",
    "sample_indices",
    "rollout_ids",
    "source_names",
    "prompt",
    "metadata",
    "rollout_top_p_token_ids",
    "position_ids",
    "multimodal_train_inputs",
    "rollout_routed_experts",
    "rollout_top_p_token_offsets",
}


class DefaultSchema:
    """Stands for the default in a signature, whose own text lists every field."""

    def __repr__(self) -> str:
        return "DEFAULT_SCHEMA"


def bare_signature(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    empty = inspect.Parameter.empty
    parameters = [
        parameter.replace(
            annotation=empty,
            default=DefaultSchema()
            if parameter.default is batch.DEFAULT_SCHEMA
            else parameter.default,
        )
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=empty))


def test_names() -> None:
    assert set(batch.__all__) == NAMES
    assert len(batch.__all__) == len(NAMES)
    assert all(getattr(batch, name) is not None for name in NAMES)


def test_signatures() -> None:
    functions = {name for name in NAMES if inspect.isfunction(getattr(batch, name))}
    assert functions == SIGNATURES.keys()
    for name, expected in SIGNATURES.items():
        assert bare_signature(getattr(batch, name)) == expected, name


def test_fields_and_defaults() -> None:
    kinds = {name: getattr(batch, name) for name in NAMES}
    classes = {n: k for n, k in kinds.items() if inspect.isclass(k) and dataclasses.is_dataclass(k)}
    assert classes.keys() == FIELDS.keys()
    for name, kind in classes.items():
        fields = [field for field in dataclasses.fields(kind) if not field.name.startswith("_")]
        assert tuple(field.name for field in fields) == FIELDS[name], name
        defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
        assert defaults == DEFAULTS.get(name, {}), name


def test_methods() -> None:
    for name, expected in METHODS.items():
        kind = getattr(batch, name)
        data = {field.name for field in dataclasses.fields(kind)}
        public = {attribute for attribute in vars(kind) if not attribute.startswith("_")}
        assert public - data == expected, name
    assert METHODS.keys() == FIELDS.keys()


def test_kinds_and_estimators() -> None:
    assert {kind.name for kind in batch.Kind} == KINDS
    assert set(batch.OUTCOME_ESTIMATORS) == {
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce_baseline",
        "opo",
    }
    assert batch.TEMPORAL_ESTIMATORS == ("gae", "reinforce_plus_plus")


def test_default_fields() -> None:
    assert set(batch.DEFAULT_SCHEMA) == DEFAULT_FIELDS


def test_errors_and_their_attributes() -> None:
    raised = {
        "BatchError": batch.BatchError("text"),
        "OrderError": batch.OrderError("text"),
        "SchemaError": batch.SchemaError("key", expected="this", found="that"),
        "SplitGroupError": batch.SplitGroupError("text", ranks_of_group={}),
    }
    assert raised.keys() == {name for name in NAMES if name.endswith("Error")} == ERRORS.keys()
    for name, error in raised.items():
        assert isinstance(error, batch.BatchError)
        assert isinstance(error, ValueError)
        assert vars(error).keys() == ERRORS[name], name
