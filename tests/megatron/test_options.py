"""What a job's flags and its model come to: options, the planner's settings, caps and costs, which
are guessed by the config's shape or learnt from times of passes."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import ModelParallelConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from refusals import refusals

from mcore_batching import planning
from mcore_batching.flags import FLAGS as FLAG_OF
from mcore_batching.flags import REMOVED_FLAGS, add_dynamic_batch_arguments
from mcore_batching.megatron import cpu_emulation, timing
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.job import JobMemory
from mcore_batching.megatron.options import Options
from mcore_batching.megatron.plan_inputs import PlanInputs
from mcore_batching.megatron.timing import TimedStep, learner_of
from mcore_batching.megatron.topology import first_guess
from mcore_batching.planning import (
    CostModel,
    OversizeSampleError,
    ParallelDims,
    PlannerConfig,
)
from mcore_batching.planning.config import row_capacity_tokens
from mcore_batching.planning.costs import layers_of
from mcore_batching.planning.errors import FLAG_OF as PLANNING_FLAGS
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.schedule import Pass
from mcore_batching.tools.options import (
    CommandParser,
    add_dims,
    add_lengths,
    add_options,
    add_search,
)


def parse(*words: str) -> argparse.Namespace:
    return add_dynamic_batch_arguments(argparse.ArgumentParser()).parse_args(words)


ONE, DP4 = ParallelDims(), ParallelDims(data_parallel=4)
FORWARD_CAP = "--dynamic-batch-forward-only-max-tokens-per-gpu"
MOST_RANKS = "--dynamic-batch-context-parallel"


def options(cap: int, *words: str) -> Options:
    """Of a job with this cap."""
    return Options.of(parse("--use-dynamic-batch-size", "--max-tokens-per-gpu", str(cap), *words))


@pytest.mark.parametrize("flag", REMOVED_FLAGS)
@pytest.mark.parametrize("values", [[], ["1"], ["a", "b"]])
def test_removed_flags_are_refused_in_one_line(
    flag: str, values: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = f"{flag} is gone: {REMOVED_FLAGS[flag]}"
    with pytest.raises(SystemExit):
        parse(flag, *values)
    assert capsys.readouterr().err.splitlines()[-1].endswith(refusal)
    assert flag not in add_dynamic_batch_arguments(argparse.ArgumentParser()).format_help()
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
    parser = add_dynamic_batch_arguments(argparse.ArgumentParser())
    assert set(FLAG_OF.values()) <= set(parser._option_string_actions)
    settings = {field.name for field in dataclasses.fields(PlannerConfig)}
    assert settings <= set(FLAG_OF)


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
    fixed, learnt = (parse("--dynamic-batch-cost-model", each) for each in ("fixed", "auto"))
    for of_no_file in (parse(), fixed, learnt, SimpleNamespace()):
        assert Options.of(of_no_file).given_cost_model() is None
        assert Options.of(of_no_file).learns_cost_model == (of_no_file is learnt)


def test_planner_config_from_flags() -> None:
    flags = ("fill placeholder", "on-oversize error", "pad-total-to 20")
    words = [word for flag in flags for word in f"--dynamic-batch-{flag}".split()]
    assert options(100, *words).planner_config(ONE) == PlannerConfig(
        max_tokens_per_gpu=100, fill="placeholder", on_oversize="error", pad_total_to=20
    )
    bare = Options.of(SimpleNamespace(max_tokens_per_gpu=9))  # a framework's own arguments
    assert bare.planner_config(ONE) == PlannerConfig(max_tokens_per_gpu=9)
    assert bare == options(9)  # what these lack is what the flags are by default


@pytest.fixture
def emulates(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether the CPU stands for the CUDA device that there is."""
    state = {"cuda": False}
    monkeypatch.setattr(cpu_emulation, "is_enabled", lambda: not state["cuda"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return state


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
    cap: int, dims: ParallelDims, multiple: int, emulates: dict[str, bool]
) -> None:
    # A sample of 19,990 tokens was over a forward cap of 20,000, as 128 do not divide it.
    plain, own = options(cap), options(cap, FORWARD_CAP, str(cap + 32))
    on_cpu = plain.planner_config(dims)
    assert on_cpu.pad_total_to is None
    emulates["cuda"] = True
    on_cuda = plain.planner_config(dims)
    assert on_cuda == dataclasses.replace(on_cpu, pad_total_to=multiple)
    assert row_capacity_tokens(dims, on_cuda) == row_capacity_tokens(dims, on_cpu)
    alone, of_cpu = (own.forward_only_config(each, dims) for each in (on_cuda, on_cpu))
    kernels = math.gcd(128 * dims.tensor_parallel, cap + 32)
    assert alone.pad_total_to == dims.context_parallel * kernels
    assert row_capacity_tokens(dims, alone) == row_capacity_tokens(dims, of_cpu)
    given = options(cap, "--dynamic-batch-pad-total-to", "1")
    assert given.planner_config(dims).pad_total_to == 1


def test_rows_of_one_rank_keep_their_cap_under_dynamic_cp(emulates: dict[str, bool]) -> None:
    """Their multiple is theirs, not that of as many ranks as the model's size."""
    emulates["cuda"] = True
    dims = ParallelDims(data_parallel=2, context_parallel=2)
    config = options(8320, MOST_RANKS, "4").planner_config(dims)
    assert config.pad_total_to == 128
    for size in (1, 2, 4):
        assert row_capacity_tokens(dims.for_rows_on(size), config) == 8320 * size


def test_forward_passes_have_the_cap_of_training_unless_they_are_given_one() -> None:
    words = "--dynamic-batch-pad-total-to", "20"
    shared, own = options(100, *words), options(100, *words, FORWARD_CAP, "400")
    training = own.planner_config(ONE)
    assert training == shared.planner_config(ONE) == shared.forward_only_config(training, ONE)
    larger = dataclasses.replace(training, max_tokens_per_gpu=400)
    assert own.forward_only_config(training, ONE) == larger
    assert (shared.has_own_forward_cap, own.has_own_forward_cap) == (False, True)


def test_a_sample_over_the_cap_of_forward_passes_alone_names_that_cap() -> None:
    given = options(100, FORWARD_CAP, "20", "--dynamic-batch-on-oversize", "error")
    training = given.planner_config(ONE)
    inputs = PlanInputs(ONE, training, CostModel())
    with inputs.naming([4, 7]):
        Problem.of([30, 5], ONE, training)
    forward = given.forward_only_config(training, ONE)
    inputs = dataclasses.replace(inputs, config=forward, forward_only=True)
    with pytest.raises(OversizeSampleError) as caught, inputs.naming([4, 7]):
        Problem.of([30, 5], ONE, forward)
    assert str(caught.value).startswith("sample 4 has 30 tokens")
    assert f"({FORWARD_CAP}) to 30 or more, or" in str(caught.value)


def test_most_ranks_of_a_row_are_read_from_the_flag() -> None:
    assert options(64, MOST_RANKS, "2").planner_config(DP4).max_context_parallel == 2
    staying = options(64, "--no-dynamic-batch-exchange")
    assert [each.exchanges_samples for each in (options(64), staying)] == [True, False]


test_refused = refusals(__file__, planning, timing, globals())


VOCABULARY = 10
SHAPE = {"hidden_size": 8, "ffn_hidden_size": 12, "num_layers": 4, "num_attention_heads": 2}
SAME = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "hidden_act": "gelu",
    "vocab_size": 10,
}


WINDOW, FULL = {"window_size": (7, 0)}, {"recompute_granularity": "full"}
SHARED = {"expert_model_parallel_size": 2, "moe_shared_expert_intermediate_size": 4}
EXPERTS = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 6} | SHARED
PUBLISHED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
PUBLISHED |= {"expert_model_parallel_size": 2, "shared_expert_intermediate_size": 4}
TRANSFORMERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {}),
    "grouped": (
        {"gated_linear_unit": True, "num_query_groups": 1, "kv_channels": 3},
        {"hidden_act": "silu", "num_key_value_heads": 1, "head_dim": 3},
    ),
    "recomputed": (FULL | {"recompute_method": "uniform", "recompute_num_layers": 1}, FULL),
    "window": (WINDOW, {"sliding_window": 8}),
    "windows": (
        WINDOW | {"window_attn_skip_freq": 2},
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8},
    ),
    "no-window": ({"window_size": (-1, -1)}, {}),
    "experts": (
        EXPERTS | {"moe_layer_freq": [0, 1, 1, 1]},
        PUBLISHED | {"first_k_dense_replace": 1},
    ),
    "mtp": ({"mtp_num_layers": 2}, {"num_nextn_predict_layers": 2}),
    "latent": (
        {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_head_dim": 4, "v_head_dim": 3}
        | {"qk_pos_emb_head_dim": 2},
        {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 4, "v_head_dim": 3}
        | {"qk_rope_head_dim": 2},
    ),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_costs_of_a_transformer(name: str) -> None:
    """The same from Megatron's config as from the model's published one."""
    config, published = TRANSFORMERS[name]
    make = MLATransformerConfig if name == "latent" else TransformerConfig
    made = make(**SHAPE, **config)
    assert first_guess(VOCABULARY, made) == layers_of.first_guess(SAME | published)
    # The output layer is left out where its size is not known.
    no_output = layers_of.first_guess(SAME | published | {"vocab_size": 0})
    assert first_guess(None, made) == no_output


UNEVEN = {"account_for_embedding_in_pipeline_split": True}
UNEVEN |= {"account_for_loss_in_pipeline_split": True, "num_layers": 6}
STAGES = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
MAMBA = {"mamba_head_dim": 4, "mamba_num_groups": 2, "mamba_state_dim": 4}


@pytest.mark.parametrize(
    ("config", "pattern", "layers"),
    [
        (STAGES | UNEVEN | {"virtual_pipeline_model_parallel_size": 2}, None, "a|aa|aa|aV"),
        (STAGES | {"pipeline_model_parallel_layout": "Ettt|tL"}, None, "aaa|aV"),
        (MAMBA, "M*|M-/*-", "M*|M-V"),
    ],
)
def test_layers_of_stages(config: dict[str, Any], pattern: str | None, layers: str) -> None:
    model = SimpleNamespace(hybrid_layer_pattern=pattern)
    assert first_guess(VOCABULARY, TransformerConfig(**SHAPE | config), model).layers == layers


@pytest.mark.parametrize(
    "odd",
    [
        {"num_attention_heads": 0},
        {"ffn_hidden_size": 0},
        {"ffn_hidden_size": None, "num_moe_experts": 4, "moe_ffn_hidden_size": None},
        {"num_layers": 0},
        {"is_hybrid_model": True},  # whose pattern nobody knows
    ],
    ids=str,
)
def test_a_model_of_another_shape_has_the_default_costs(odd: dict[str, Any]) -> None:
    config = TransformerConfig(**SHAPE)
    for name, value in odd.items():
        setattr(config, name, value)
    assert first_guess(VOCABULARY, config) == CostModel()
    assert first_guess(VOCABULARY, ModelParallelConfig()) == CostModel()


def test_a_row_that_ranks_share_teaches_nothing_nor_does_a_step_under_way() -> None:
    def mark(is_reached: bool = True) -> Any:
        return SimpleNamespace(query=lambda: is_reached, elapsed_time=lambda end: 1e3)

    order = [Pass("F", 0, 0), Pass("F", 0, 1)]
    step = TimedStep([(5,), ()], order, [mark(), mark(), mark(), mark()])
    assert step.is_over
    assert step.timed_rows() == [((5,), 1.0)]
    assert not TimedStep([(5,)], order[:1], [mark(), mark(is_reached=False)]).is_over


def test_an_actor_and_a_critic_have_learners_of_their_own() -> None:
    actor, critic = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    job: Any = SimpleNamespace(memory=JobMemory(None))
    assert learner_of(job, [actor]) is learner_of(job, [actor]) is not learner_of(job, [critic])
