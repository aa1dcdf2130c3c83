"""Flags through Megatron's parser, and every refused combination by its message."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version

from mcore_batching.flags import FLAGS as FLAG_OF
from mcore_batching.flags import (
    REMOVED_FLAGS,
    THEMES,
    add_dynamic_batch_arguments,
    add_flags,
)
from mcore_batching.megatron import compat, cpu_emulation
from mcore_batching.megatron.checks.layers import (
    multi_token_problems,
    unfit_for_later_tokens,
)
from mcore_batching.megatron.checks.settings import check_model_config
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.options import Options
from mcore_batching.planning import (
    ConfigError,
    CostModel,
    OversizeSampleError,
    ParallelDims,
    PlannerConfig,
)
from mcore_batching.planning.config import row_capacity_tokens
from mcore_batching.planning.errors import FLAG_OF as PLANNING_FLAGS
from mcore_batching.planning.errors import named
from mcore_batching.planning.local import fill_local, pack_local
from mcore_batching.planning.problem import Problem
from mcore_batching.tools.options import (
    CommandParser,
    add_dims,
    add_lengths,
    add_options,
    add_search,
)


def parse(*words: str) -> argparse.Namespace:
    return add_dynamic_batch_arguments(argparse.ArgumentParser()).parse_args(words)


@pytest.mark.parametrize("flag", REMOVED_FLAGS)
@pytest.mark.parametrize("values", [[], ["1"], ["a", "b"]])
def test_removed_flags_are_refused_in_one_line(
    flag: str, values: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = f"{flag} is gone: {REMOVED_FLAGS[flag]}"
    with pytest.raises(SystemExit):
        parse(flag, *values)
    assert capsys.readouterr().err.splitlines()[-1].endswith(refusal)
    assert flag not in add_flags(argparse.ArgumentParser(), THEMES).format_help()
    attribute = flag.lstrip("-").replace("-", "_")
    assert not hasattr(parse(), attribute)
    for off in (None, False, "off"):  # YAML reads `off` as False
        assert Options.of(SimpleNamespace(**{attribute: off})) == Options.of(SimpleNamespace())
    for value in ("auto", True, 1.0):
        with pytest.raises(DynamicBatchArgumentError, match=re.escape(refusal)):
            Options.of(SimpleNamespace(**{attribute: value}))


def test_flags_that_a_framework_has_are_left_alone() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-tokens-per-gpu", type=int, default=7)
    assert add_dynamic_batch_arguments(parser).parse_args([]).max_tokens_per_gpu == 7


def test_every_argument_in_the_table_has_its_flag() -> None:
    parser = add_flags(argparse.ArgumentParser(), THEMES)
    assert set(FLAG_OF.values()) <= set(parser._option_string_actions)
    settings = {field.name for field in dataclasses.fields(PlannerConfig)}
    assert settings <= set(FLAG_OF)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("max_tokens_per_gpu", None, "max_tokens_per_gpu (--max-tokens-per-gpu)"),
        ("pad_total_to", 16, "pad_total_to=16 (--dynamic-batch-pad-total-to 16)"),
        ("balance", "cost", "balance='cost' (--dynamic-batch-balance cost)"),
        ("capacity", 8, "capacity=8"),
        ("lengths", None, "lengths"),
    ],
)
def test_errors_name_an_argument_and_its_flag(name: str, value: object, text: str) -> None:
    assert named(name, value) == text


def test_flags_that_errors_name_are_those_of_jobs_or_of_the_command_line() -> None:
    command = CommandParser()
    add_lengths(command)
    add_dims(command)
    add_options(command, "on_oversize", "fill", "packing", "balance")
    add_search(command)
    for name, flag in PLANNING_FLAGS.items():
        assert flag in {*command._option_string_actions, *FLAG_OF.values()}
        # A job's flag of the planner's options is one of the command line as well.
        action = command._option_string_actions.get(flag)
        assert action is None or action.dest == name


def test_cost_model_from_a_file(tmp_path: Path) -> None:
    model = CostModel(quadratic=1e-3, per_micro_batch=9.0)
    path = tmp_path / "cost.json"
    path.write_text(model.to_json())
    from_file = parse("--dynamic-batch-cost-model", str(path))
    assert Options.of(from_file).given_cost_model() == model
    assert not Options.of(from_file).learns_cost_model
    for of_no_file in (parse(), parse("--dynamic-batch-cost-model", "fixed"), SimpleNamespace()):
        assert Options.of(of_no_file).given_cost_model() is None
    other = tmp_path / "other.json"
    other.write_text("[]")
    for wrong in (other, tmp_path / "missing.json"):
        said = f"--dynamic-batch-cost-model {wrong}: .*a job writes under --dynamic-batch-record"
        with pytest.raises(DynamicBatchArgumentError, match=said):
            Options.of(parse("--dynamic-batch-cost-model", str(wrong))).given_cost_model()


def test_costs_are_learnt_where_that_is_asked_for() -> None:
    packs, flag = "--use-dynamic-batch-size", "--dynamic-batch-cost-model"
    assert not Options.of(SimpleNamespace()).learns_cost_model
    assert not Options.of(parse(packs)).learns_cost_model
    assert not Options.of(parse(packs, flag, "fixed")).learns_cost_model
    assert not Options.of(parse(flag, "auto")).learns_cost_model  # nothing is packed
    assert Options.of(parse(packs, flag, "auto")).learns_cost_model


def test_planner_config_from_flags() -> None:
    args = parse(
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "100"),
        *("--dynamic-batch-fill", "placeholder"),
        *("--dynamic-batch-on-oversize", "error", "--dynamic-batch-pad-total-to", "20"),
    )
    assert Options.of(args).planner_config(ParallelDims()) == PlannerConfig(
        max_tokens_per_gpu=100, fill="placeholder", on_oversize="error", pad_total_to=20
    )
    args = parse("--use-dynamic-batch-size", "--max-tokens-per-gpu", "9")
    assert Options.of(args).planner_config(ParallelDims()) == PlannerConfig(max_tokens_per_gpu=9)
    bare = SimpleNamespace(max_tokens_per_gpu=9)  # a framework's own arguments
    assert Options.of(bare).planner_config(ParallelDims()) == PlannerConfig(max_tokens_per_gpu=9)
    # What these lack is what the flags are by default.
    assert Options.of(bare) == Options.of(args)


@pytest.mark.parametrize(
    ("cap", "dims", "multiple"),
    [
        (16384, ParallelDims(), 128),
        (16384, ParallelDims(tensor_parallel=8, context_parallel=2), 2048),
        (10000, ParallelDims(tensor_parallel=8, context_parallel=2, sequence_parallel=True), 32),
        (9, ParallelDims(tensor_parallel=2), 1),
    ],
)
def test_rows_have_a_multiple_on_cuda_that_leaves_the_cap_what_it_is(
    cap: int, dims: ParallelDims, multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = parse("--use-dynamic-batch-size", "--max-tokens-per-gpu", str(cap))
    on_cpu = Options.of(args).planner_config(dims)
    assert on_cpu.pad_total_to is None
    with monkeypatch.context() as patch:
        patch.setattr(cpu_emulation, "is_enabled", lambda: False)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        on_cuda = Options.of(args).planner_config(dims)
        assert on_cuda == dataclasses.replace(on_cpu, pad_total_to=multiple)
        assert row_capacity_tokens(dims, on_cuda) == row_capacity_tokens(dims, on_cpu)
        # A sample of 19,990 tokens was over a forward cap of 20,000, as 128 do not divide it.
        args.dynamic_batch_forward_only_max_tokens_per_gpu = cap + 32
        alone, plain = (
            Options.of(args).forward_only_config(each, dims) for each in (on_cuda, on_cpu)
        )
        kernels = math.gcd(128 * dims.tensor_parallel, cap + 32)
        assert alone.pad_total_to == dims.context_parallel * kernels
        assert row_capacity_tokens(dims, alone) == row_capacity_tokens(dims, plain)
        args.dynamic_batch_pad_total_to = 1
        assert Options.of(args).planner_config(dims).pad_total_to == 1
        patch.setattr(cpu_emulation, "is_enabled", lambda: True)
        args.dynamic_batch_pad_total_to = None
        assert Options.of(args).planner_config(dims) == on_cpu


def test_rows_of_one_rank_keep_their_cap_under_dynamic_cp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their multiple is theirs, not that of as many ranks as the model's size."""
    words = ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "8320"]
    args = parse(*words, "--dynamic-batch-context-parallel", "4")
    dims = ParallelDims(data_parallel=2, context_parallel=2)
    monkeypatch.setattr(cpu_emulation, "is_enabled", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Options.of(args).planner_config(dims).pad_total_to == 128
    for size in (1, 2, 4):
        rows = dims.for_rows_on(size)
        assert row_capacity_tokens(rows, Options.of(args).planner_config(dims)) == 8320 * size


FORWARD_CAP = "--dynamic-batch-forward-only-max-tokens-per-gpu"


def test_forward_passes_have_the_cap_of_training_unless_they_are_given_one() -> None:
    words = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "100")
    words += ("--dynamic-batch-pad-total-to", "20")
    shared, own = parse(*words), parse(*words, FORWARD_CAP, "400")
    training = Options.of(own).planner_config(ParallelDims())
    assert training == Options.of(shared).planner_config(ParallelDims())
    assert training == Options.of(shared).forward_only_config(training, ParallelDims())
    assert Options.of(own).forward_only_config(training, ParallelDims()) == dataclasses.replace(
        training, max_tokens_per_gpu=400
    )
    assert not Options.of(shared).has_own_forward_cap
    assert Options.of(own).has_own_forward_cap
    assert not Options.of(SimpleNamespace(max_tokens_per_gpu=9)).has_own_forward_cap
    unpacked = parse("--max-tokens-per-gpu", "9", FORWARD_CAP, "400")
    assert not Options.of(unpacked).has_own_forward_cap
    assert Options.of(unpacked).forward_only_config(training, ParallelDims()) == training


def test_a_cap_of_forward_passes_out_of_range_is_refused_before_training() -> None:
    words = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "100", FORWARD_CAP, "0")
    with pytest.raises(ConfigError, match=rf"\({FORWARD_CAP}\) must be 1 or more, got 0; increase"):
        Options.of(parse(*words)).planner_config(ParallelDims())


def test_a_sample_over_the_cap_of_forward_passes_alone_names_that_cap() -> None:
    words = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "100")
    args = parse(*words, FORWARD_CAP, "20", "--dynamic-batch-on-oversize", "error")
    training = Options.of(args).planner_config(ParallelDims())
    forward = Options.of(args).forward_only_config(training, ParallelDims())
    for forward_only, config in ((False, training), (True, forward)):
        naming = Options.of(args).naming_the_cap(forward_only=forward_only, samples=[4, 7])
        if forward_only:
            with pytest.raises(OversizeSampleError) as caught, naming:
                Problem.of([30, 5], ParallelDims(), config)
            assert str(caught.value).startswith("sample 4 has 30 tokens")
            assert f"({FORWARD_CAP}) to 30 or more, or" in str(caught.value)
        else:
            with naming:
                Problem.of([30, 5], ParallelDims(), config)


def test_without_the_flag_there_is_no_cap() -> None:
    args = parse("--max-tokens-per-gpu", "9")
    args.micro_batch_size = 2
    options = Options.of(args)
    assert not options.exchanges_samples
    config = options.planner_config(ParallelDims())
    problem = Problem.of([10**6, 1, 5, 1, 7], ParallelDims(), config)
    assert fill_local(problem, pack_local(problem), 4) == ((0, 1), (2, 3), (), (4,))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max-tokens-per-gpu", "9"], "set --use-dynamic-batch-size and --max"),
        (["--use-dynamic-batch-size"], "set --max-tokens-per-gpu"),
    ],
)
def test_a_loop_of_ones_own_without_a_cap_is_refused(words: list[str], expected: str) -> None:
    with pytest.raises(DynamicBatchArgumentError, match=expected):
        Options.of(parse(*words)).planner_config(ParallelDims())


SOME_RELEASES = (
    "moe_hybridep_pad_uneven_dispatch_inputs",
    "mtp_hsm",
    "sequence_packing_scheduler",
)
"""Fields that other releases of Megatron may have."""


def config(**changes: Any) -> TransformerConfig:
    """A configuration that is accepted, with fields set as Megatron's validation leaves them."""
    made = TransformerConfig(num_layers=4, hidden_size=16, num_attention_heads=2)
    made.overlap_p2p_comm, made.batch_p2p_comm = False, True
    for name, value in changes.items():
        assert hasattr(made, name) or name in SOME_RELEASES, f"this megatron-core has no {name}"
        setattr(made, name, value)
    return made


def test_multi_token_prediction_runs_from_0_17_on() -> None:
    predicting = config(mtp_num_layers=1)
    if Version(megatron.core.__version__) >= Version("0.17"):
        check_model_config(predicting, ParallelDims(), PlannerConfig(max_tokens_per_gpu=64))
        return
    with pytest.raises(DynamicBatchArgumentError, match=r"runs from Megatron-LM 0.17 on: unset"):
        check_model_config(predicting, ParallelDims(), PlannerConfig(max_tokens_per_gpu=64))


def test_hidden_states_mixed_at_random_are_refused() -> None:
    made = config(mtp_num_layers=2, mtp_hsm=True)
    assert any("unset --mtp-hsm" in problem for problem in multi_token_problems(made))


def test_later_tokens_that_cannot_be_recomputed_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = config(mtp_num_layers=1, recompute_granularity="full", recompute_method="uniform")
    monkeypatch.setattr(compat, "recomputes_multi_token_rows", lambda: False)
    wanted = "set --recompute-granularity selective"
    assert any(wanted in problem for problem in multi_token_problems(made))
    made.recompute_method = "block"  # which these layers ignore
    assert not any(wanted in problem for problem in multi_token_problems(made))


def test_models_that_cannot_predict_later_tokens_are_refused() -> None:
    made = config(mtp_num_layers=1)
    chunk = SimpleNamespace(config=made, post_process=True, position_embedding_type="rope")
    (problem,) = unfit_for_later_tokens([chunk])
    assert "mtp_block_spec=packed_mtp_block_spec(config)" in problem
    chunk.post_process, chunk.position_embedding_type = False, "learned_absolute"
    assert not [*unfit_for_later_tokens([chunk])]
    made.pipeline_model_parallel_size = 2
    (problem,) = unfit_for_later_tokens([chunk])
    assert "set --position-embedding-type rope" in problem
    chunk.position_embedding_type, made.mtp_detach_heads = "rope", True
    assert not [*unfit_for_later_tokens([chunk])]
    chunk.ddp_config = SimpleNamespace(overlap_grad_reduce=True)
    (problem,) = unfit_for_later_tokens([chunk])
    assert "unset --overlap-grad-reduce or unset --mtp-detach-heads" in problem
    chunk.share_embeddings_and_output_weights = True
    for made.mtp_detach_heads in (True, False):
        (problem,) = unfit_for_later_tokens([chunk])
        assert "--untie-embeddings-and-output-weights" in problem
    made.grad_sync_func = print  # aligned
    assert not [*unfit_for_later_tokens([chunk])]
    made.grad_sync_func, chunk.ddp_config.overlap_grad_reduce = None, False
    assert not [*unfit_for_later_tokens([chunk])]
    made.mtp_num_layers = None
    assert not [*unfit_for_later_tokens([chunk])]


ONE, SEVERAL = ParallelDims(), ParallelDims(data_parallel=4)
VIRTUAL = ParallelDims(pipeline_parallel=2, virtual_pipeline=2)
TP2, CP2 = ParallelDims(tensor_parallel=2), ParallelDims(context_parallel=2)
TP2_SP = ParallelDims(tensor_parallel=2, sequence_parallel=True)
CP2_TP2_SP = ParallelDims(context_parallel=2, tensor_parallel=2, sequence_parallel=True)
PER_TOKEN = {"calculate_per_token_loss": True}
EXPERTS = {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall"}
FLEX = {"num_moe_experts": 4, "moe_token_dispatcher_type": "flex"}
HYBRID_EP = {**FLEX, "moe_flex_dispatcher_backend": "hybridep"}
LOSS = {**EXPERTS, "moe_aux_loss_coeff": 0.01}
Z_LOSS = {**EXPERTS, "moe_z_loss_coeff": 0.01}
ALL_TOKENS = "routes a token by all tokens of its micro-batch"
ROUTING = "set --moe-router-load-balancing-type aux_loss or none"
PER_TOKEN_LOSS = "set --calculate-per-token-loss"


def routed(*kinds: str, **changes: Any) -> dict[str, Any]:
    kind = [*kinds] if len(kinds) > 1 else kinds[0]
    return {**EXPERTS, "moe_router_load_balancing_type": kind, **changes}


PAD = "set --dynamic-batch-pad-total-to"
REFUSED: list[tuple[ParallelDims, dict[str, Any], str]] = [
    (VIRTUAL, {}, "drop --no-overlap-p2p-communication"),
    (VIRTUAL, {"overlap_p2p_comm": True}, "batch_p2p_comm=False"),
    (ONE, {"cuda_graph_impl": "local"}, "set --cuda-graph-impl none"),
    (ONE, {"enable_cuda_graph": True}, "set --cuda-graph-impl none"),
    (ONE, LOSS, PER_TOKEN_LOSS),
    (ONE, routed("none", "seq_aux_loss", moe_aux_loss_coeff=[0.0, 0.01]), PER_TOKEN_LOSS),
    (ONE, Z_LOSS, PER_TOKEN_LOSS),
    (ONE, {"mtp_num_layers": 1, "mtp_standalone": True}, "put its layers on the last stage"),
    (ONE, {"dsa_indexer_loss_coeff": 0.1}, "sparse attention's indexer loss would be a mean"),
    (ONE, routed("global_aux_loss"), ROUTING),
    (ONE, routed("sinkhorn"), f"sinkhorn {ALL_TOKENS}"),
    (ONE, routed("none", "sinkhorn"), ROUTING),
    (ONE, routed("quantile_balancing"), f"quantile_balancing {ALL_TOKENS}"),
    (
        ONE,
        {"num_moe_experts": 4, "moe_token_dispatcher_type": "allgather"},
        "set --moe-token-dispatcher-type alltoall",
    ),
    (ONE, {**EXPERTS, "moe_expert_capacity_factor": 0.0}, "unset --moe-expert-capacity-factor"),
    (CP2_TP2_SP, {"fp8": "hybrid"}, f"{PAD} 64"),
    (ONE, {"fp8": "hybrid", "fp8_recipe": "mxfp8"}, f"{PAD} 32"),
    (ONE, {"fp4": "e2m1"}, f"{PAD} 32"),
    (
        TP2_SP,
        {"fp8": "e4m3", "fp8_recipe": "blockwise"},
        "FP8 rows must divide by 128 on each rank, so by 256 in all",
    ),
    (TP2, {"fp8": "e4m3", "fp8_recipe": "blockwise"}, f"{PAD} 16"),
    (CP2_TP2_SP, {"fp4": "e2m1"}, "FP4 rows must divide by 32 on each rank, so by 128 in all"),
    (ONE, {"tp_comm_overlap": True}, "unset --tp-comm-overlap"),
    (
        ONE,
        {"experimental_attention_variant": "dsv4_hybrid"},
        "attention of the variant dsv4_hybrid is not known to keep packed samples apart",
    ),
    (ONE, {"defer_embedding_wgrad_compute": True}, "unset --defer-embedding-wgrad-compute"),
    (ONE, HYBRID_EP, "set --moe-hybridep-pad-uneven-dispatch-inputs"),
    (
        ONE,
        {**FLEX, "moe_flex_dispatcher_backend": "ncclep"},
        "set --moe-flex-dispatcher-backend deepep",
    ),
    (ONE, {"overlap_moe_expert_parallel_comm": True}, "unset --overlap-moe-expert-parallel-comm"),
    (ONE, {"sequence_packing_scheduler": "dp_balanced"}, "unset --sequence-packing-scheduler"),
]
ACCEPTED: list[tuple[ParallelDims, dict[str, Any]]] = [
    (ONE, {}),
    (ONE, {"overlap_p2p_comm": True}),  # without a pipeline nothing is sent
    (ParallelDims(pipeline_parallel=4), {}),
    (VIRTUAL, {"overlap_p2p_comm": True, "batch_p2p_comm": False}),
    (ONE, EXPERTS),  # a load-balancing loss with coefficient 0
    (ONE, {**LOSS, **PER_TOKEN}),
    (ONE, {**FLEX, "moe_flex_dispatcher_backend": "deepep"}),
    (ONE, {**EXPERTS, "moe_flex_dispatcher_backend": "hybridep"}),
    (ONE, {**HYBRID_EP, "moe_hybridep_pad_uneven_dispatch_inputs": True}),
]
PLANNER = PlannerConfig(max_tokens_per_gpu=128)
SHARED = dataclasses.replace(PLANNER, max_context_parallel=4)
RECOMPUTED = {
    "recompute_granularity": "selective",
    "recompute_modules": ["moe"],
}
SHARED_REFUSED: list[tuple[ParallelDims, dict[str, Any], str]] = [
    (SEVERAL, {"calculate_per_token_loss": False}, f"a fixed number of ranks: {PER_TOKEN_LOSS}"),
    (SEVERAL, LOSS | RECOMPUTED, "leave moe out of --recompute-modules"),
    (SEVERAL, {"multi_latent_attention": True}, "dev branch follows one, which is untried here"),
    (SEVERAL, {"fp8": "hybrid"}, "divide by 16 on each rank, so by 64 in all"),
]
FP8_PAD_8 = dataclasses.replace(PLANNER, pad_total_to=8)
FP8_PAD_48 = dataclasses.replace(PLANNER, pad_total_to=48)


@pytest.mark.parametrize(
    ("planner", "dims", "changes", "expected"),
    [
        *((PLANNER, *each) for each in REFUSED),
        *((PLANNER, *each, "") for each in ACCEPTED),
        *((SHARED, dims, PER_TOKEN | changes, said) for dims, changes, said in SHARED_REFUSED),
        *((SHARED, SEVERAL, PER_TOKEN | changes, "") for changes in ({}, LOSS, RECOMPUTED)),
        (FP8_PAD_8, ONE, {"fp8": "hybrid"}, "padded to a multiple of 8"),
        (FP8_PAD_48, ONE, {"fp8": "hybrid"}, ""),
    ],
)
def test_refused_combination_says_what_to_set(
    planner: PlannerConfig, dims: ParallelDims, changes: dict[str, Any], expected: str
) -> None:
    if not expected:
        check_model_config(config(**changes), dims, planner)
        return
    with pytest.raises(DynamicBatchArgumentError) as caught:
        check_model_config(config(**changes), dims, planner)
    assert expected in str(caught.value)


@pytest.mark.parametrize("dims", [CP2, TP2])
def test_a_z_loss_that_megatron_makes_too_weak_is_refused(
    dims: ParallelDims, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 0.19 by the number of ranks that share a row, with or without this package."""
    made = config(**Z_LOSS, **PER_TOKEN)
    monkeypatch.setattr(compat, "multiplies_by_ranks", lambda: True)
    check_model_config(made, dims, PLANNER)
    monkeypatch.setattr(compat, "multiplies_by_ranks", lambda: False)
    check_model_config(made, ONE, PLANNER)
    with pytest.raises(DynamicBatchArgumentError, match=r"2 times too weak .*, or install"):
        check_model_config(made, dims, PLANNER)
    with pytest.raises(DynamicBatchArgumentError, match="4 times too weak on 4 tensor- and"):
        check_model_config(made, ONE, SHARED)
    made.moe_z_loss_coeff = None
    check_model_config(made, dims, PLANNER)


def test_most_ranks_of_a_row_are_read_from_the_flag() -> None:
    words = ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "64"]
    args = parse(*words, "--dynamic-batch-context-parallel", "2")
    assert Options.of(args).planner_config(SEVERAL).max_context_parallel == 2
    assert Options.of(args).exchanges_samples
    assert Options.of(parse(*words)).exchanges_samples
    stays = parse(*words, "--no-dynamic-batch-exchange")
    assert not Options.of(stays).exchanges_samples
    stays.dynamic_batch_context_parallel = 2
    with pytest.raises(DynamicBatchArgumentError, match="unset --no-dynamic-batch-exchange"):
        Options.of(stays).planner_config(SEVERAL)
    args = parse(*words, "--dynamic-batch-context-parallel", "3")
    with pytest.raises(ConfigError, match=r"\(--dynamic-batch-context-parallel\) to 2"):
        Options.of(args).planner_config(SEVERAL)
    args = parse("--dynamic-batch-context-parallel", "2")
    with pytest.raises(DynamicBatchArgumentError, match="set --use-dynamic-batch-size and"):
        Options.of(args).planner_config(ParallelDims())


def test_all_problems_are_listed_at_once() -> None:
    broken = config(**EXPERTS, moe_expert_capacity_factor=1.0, cuda_graph_impl="local")
    with pytest.raises(DynamicBatchArgumentError) as caught:
        check_model_config(broken, VIRTUAL, PlannerConfig(max_tokens_per_gpu=128))
    assert str(caught.value).count("\n  - ") == 3
