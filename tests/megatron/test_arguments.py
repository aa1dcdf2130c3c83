"""Flags through Megatron's parser, and every refused combination by its message."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mcore_batching.flags import FLAGS as FLAG_OF
from mcore_batching.flags import REMOVED_FLAGS, add_dynamic_batch_arguments
from mcore_batching.megatron import cpu_emulation
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.options import Options
from mcore_batching.megatron.plan_inputs import PlanInputs
from mcore_batching.planning import (
    ConfigError,
    CostModel,
    OversizeSampleError,
    ParallelDims,
    PlannerConfig,
)
from mcore_batching.planning.config import row_capacity_tokens
from mcore_batching.planning.errors import FLAG_OF as PLANNING_FLAGS
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
    other = tmp_path / "other.json"
    other.write_text("[]")
    for wrong in (other, tmp_path / "missing.json"):
        said = f"--dynamic-batch-cost-model {wrong}: .*a job writes under --dynamic-batch-record"
        with pytest.raises(DynamicBatchArgumentError, match=said):
            Options.of(parse("--dynamic-batch-cost-model", str(wrong))).given_cost_model()


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
        inputs = PlanInputs(ParallelDims(), config, CostModel(), forward_only=forward_only)
        naming = inputs.naming([4, 7])
        if forward_only:
            with pytest.raises(OversizeSampleError) as caught, naming:
                Problem.of([30, 5], ParallelDims(), config)
            assert str(caught.value).startswith("sample 4 has 30 tokens")
            assert f"({FORWARD_CAP}) to 30 or more, or" in str(caught.value)
        else:
            with naming:
                Problem.of([30, 5], ParallelDims(), config)


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


def test_most_ranks_of_a_row_are_read_from_the_flag() -> None:
    words = ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "64"]
    args = parse(*words, "--dynamic-batch-context-parallel", "2")
    assert Options.of(args).planner_config(ParallelDims(data_parallel=4)).max_context_parallel == 2
    assert Options.of(args).exchanges_samples
    assert Options.of(parse(*words)).exchanges_samples
    stays = parse(*words, "--no-dynamic-batch-exchange")
    assert not Options.of(stays).exchanges_samples
    stays.dynamic_batch_context_parallel = 2
    with pytest.raises(DynamicBatchArgumentError, match="unset --no-dynamic-batch-exchange"):
        Options.of(stays).planner_config(ParallelDims(data_parallel=4))
    args = parse(*words, "--dynamic-batch-context-parallel", "3")
    with pytest.raises(ConfigError, match=r"\(--dynamic-batch-context-parallel\) to 2"):
        Options.of(args).planner_config(ParallelDims(data_parallel=4))
