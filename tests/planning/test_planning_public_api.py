"""Public names, signatures and flags, frozen: changing one is a decision, not an accident."""

from __future__ import annotations

import argparse
import dataclasses
import inspect

import mcore_batching
from mcore_batching import planning
from mcore_batching.tools.cli import build_parser

NAMES = {
    "ConfigError",
    "CostModel",
    "InflightBoundError",
    "InvariantError",
    "ItemTooLargeError",
    "ParallelDims",
    "ParallelDimsError",
    "LengthError",
    "OversizeSampleError",
    "Plan",
    "PlanFormatError",
    "PlannerConfig",
    "PlanningError",
    "ShardOutlook",
    "StepPlan",
    "StepStatistics",
    "bin_lower_bound",
    "fill_shard",
    "first_fit",
    "first_fit_decreasing",
    "group_steps",
    "pack_shard",
    "padded_row_tokens",
    "padded_sample_tokens",
    "placeholder_tokens",
    "plan_batch",
    "plan_step",
    "row_capacity_tokens",
    "row_multiple_tokens",
    "sample_multiple_tokens",
    "shard_outlook",
    "shard_packings",
    "soonest_packing",
    "step_statistics",
}

SIGNATURES = {
    "bin_lower_bound": "(sizes, capacity)",
    "fill_shard": (
        "(bins, lengths, num_microbatches, layout, config, cost_model=None, *, forward_only=False)"
    ),
    "first_fit": "(sizes, capacity)",
    "first_fit_decreasing": "(sizes, capacity)",
    "group_steps": "(groups, groups_per_step, *, last='keep')",
    "pack_shard": "(lengths, layout, config)",
    "padded_row_tokens": "(sum_of_padded_tokens, layout, config)",
    "padded_sample_tokens": "(length, layout, config)",
    "placeholder_tokens": "(layout, config)",
    "plan_batch": (
        "(lengths, layout, config, cost_model=None, *, samples_per_step=None, owners=None, "
        "groups=None, groups_per_step=None, last='keep', forward_only=False)"
    ),
    "plan_step": "(lengths, layout, config, cost_model=None, *, owners=None, forward_only=False)",
    "row_capacity_tokens": "(layout, config)",
    "row_multiple_tokens": "(layout, config)",
    "sample_multiple_tokens": "(layout, config)",
    "shard_outlook": (
        "(micro_batches, lengths, layout, config, cost_model=None, *, forward_only=False)"
    ),
    "shard_packings": "(lengths, layout, config, cost_model=None, *, forward_only=False)",
    "soonest_packing": "(packings, config)",
    "step_statistics": "(step, lengths, cost_model=None)",
}

FIELDS = {
    "ParallelDims": {
        "data_parallel": 1,
        "pipeline_parallel": 1,
        "virtual_pipeline": 1,
        "context_parallel": 1,
        "tensor_parallel": 1,
        "expert_parallel": 1,
        "sequence_parallel": False,
        "microbatch_group_size": None,
    },
    "PlannerConfig": {
        "max_tokens_per_gpu": dataclasses.MISSING,
        "packing": "auto",
        "balance": "auto",
        "fill": "split",
        "on_oversize": "own-bin",
        "pad_each_to": None,
        "pad_total_to": None,
        "plan_effort": 1500,
        "max_inflight_tokens": None,
    },
    "CostModel": {
        "linear": 1.0,
        "quadratic": 1 / 24576,
        "per_micro_batch": 256.0,
        "backward_ratio": 2.0,
        "window": None,
    },
}

METHODS = {
    "ParallelDims": {
        "group_size",
        "is_legal_num_microbatches",
        "round_up_num_microbatches",
        "sample_alignment_tokens",
    },
    "PlannerConfig": {"cap_tokens", "searches"},
    "CostModel": {"from_json", "from_model", "micro_batch", "sample", "to_json"},
    "StepPlan": {"digest", "explain", "from_json", "num_samples", "to_json", "validate"},
    "Plan": {"config", "digest", "explain", "from_json", "layout", "scope", "to_json", "validate"},
}

PLAN_FLAGS = {
    "--max-tokens-per-gpu",
    "--plan-effort",
    "--max-inflight-tokens",
    "--cost-model",
    "--column",
    "--dp",
    "--pp",
    "--vpp",
    "--cp",
    "--tp",
    "--ep",
    "--sequence-parallel",
    "--microbatch-group-size",
    "--samples-per-step",
    "--groups",
    "--group-column",
    "--groups-per-step",
    "--last-groups",
    "--on-oversize",
    "--fill",
    "--packing",
    "--balance",
    "--forward-only",
    "--out",
    "--plot",
    "--plot-step",
}


def test_names() -> None:
    assert set(planning.__all__) == NAMES
    assert set(mcore_batching.__all__) == NAMES | {"__version__", "hook", "install"}
    for name in NAMES:
        assert getattr(mcore_batching, name) is getattr(planning, name)


def test_signatures() -> None:
    functions = {name for name in NAMES if inspect.isfunction(getattr(planning, name))}
    assert functions == SIGNATURES.keys()
    for name, expected in SIGNATURES.items():
        signature = inspect.signature(getattr(planning, name))
        bare = signature.replace(
            parameters=[
                parameter.replace(annotation=inspect.Parameter.empty)
                for parameter in signature.parameters.values()
            ],
            return_annotation=inspect.Signature.empty,
        )
        assert str(bare) == expected, name


def test_fields_and_defaults() -> None:
    for name, expected in FIELDS.items():
        fields = dataclasses.fields(getattr(planning, name))
        assert {field.name: field.default for field in fields} == expected
        assert all(field.kw_only for field in fields)


def test_methods() -> None:
    for name, expected in METHODS.items():
        kind = getattr(planning, name)
        data = {field.name for field in dataclasses.fields(kind)}
        public = {attribute for attribute in vars(kind) if not attribute.startswith("_")}
        assert public - data == expected, name


def flags_of(command: str) -> set[str]:
    (commands,) = (
        action
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return {flag for action in commands.choices[command]._actions for flag in action.option_strings}


def test_flags() -> None:
    assert flags_of("plan") == PLAN_FLAGS | {"-h", "--help"}
    assert flags_of("check") == {"-h", "--help", "--column"}
    ours_alone = {"--groups", "--group-column", "--groups-per-step", "--last-groups", "--plot"}
    ours_alone |= {
        "--forward-only",
        "--plot-step",
        "--on-oversize",
        "--fill",
        "--packing",
        "--balance",
    }
    compared = PLAN_FLAGS - ours_alone | {"--draws", "--seed"}
    assert flags_of("compare") == compared | {"-h", "--help"}
    replayed = {"--steps", "--plan-effort", "--cost-model", "--plot"}
    assert flags_of("replay") == replayed | {"-h", "--help"}
