"""The packer behind NeMo-RL's ``get_packer``: the contract of its bins, and replacing it.

NeMo-RL's own module takes part where ``MCORE_BATCHING_NEMO_RL_SOURCE`` names a checkout
(7ea279abf).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from frameworks import PACKER, PACKING
from hypothesis import example, given
from hypothesis import strategies as st
from planning_cases import examples

from mcore_batching.integrations.nemo_rl import ALGORITHM, hook, planned_bins
from mcore_batching.planning import (
    ConfigError,
    LengthError,
    ParallelDims,
    ParallelDimsError,
    PlannerConfig,
    plan_step,
)
from mcore_batching.planning.costs.layers_of import first_guess


@examples(150)
@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=30),
    st.integers(1, 4),
    st.sampled_from([(1, 1), (4, 1), (2, 2)]),
)
@example([13, 55, 13, 40], 2, (1, 1))  # the step ends first with a placeholder
def test_the_contract_holds(lengths: list[int], ranks: int, pipeline: tuple[int, int]) -> None:
    stages, chunks = pipeline
    dims = ParallelDims(data_parallel=ranks, pipeline_parallel=stages, virtual_pipeline=chunks)
    try:
        bins = planned_bins(lengths, 64, dims)
    except LengthError:
        step = plan_step(lengths, dims, PlannerConfig(max_tokens_per_gpu=64, balance="cost"))
        assert len(lengths) < ranks * step.num_microbatches
        return
    assert sorted(sample for samples in bins for sample in samples) == list(range(len(lengths)))
    assert len(bins) % (ranks * chunks) == 0
    for samples in bins:
        assert samples
        assert sum(lengths[i] for i in samples) <= 64


def test_ranks_get_the_plans_micro_batches_in_order() -> None:
    lengths = [61, 3, 45, 17, 60, 12, 33, 28, 9, 54, 20, 41]
    dims = ParallelDims(data_parallel=2, pipeline_parallel=4)
    step = plan_step(lengths, dims, PlannerConfig(max_tokens_per_gpu=64))
    bins = planned_bins(lengths, 64, dims)
    assert [tuple(map(tuple, bins[rank::2])) for rank in range(2)] == list(step.micro_batches)


def test_too_few_samples_are_refused_by_name() -> None:
    with pytest.raises(LengthError, match=r"17 samples are fewer .*train_global_batch_size higher"):
        planned_bins([12000] * 17, 16384, ParallelDims(data_parallel=8))


@pytest.fixture
def algorithms(request: Any, small: Callable[..., Path], own: Callable[[str], Path]) -> Any:
    """A small ``nemo_rl.data.packing.algorithms``; NeMo-RL's own if the parameter says so."""
    (own if getattr(request, "param", "small") == "own" else small)("nemo_rl")
    return importlib.import_module(f"{PACKING}.algorithms")


def test_the_name_gives_our_packer_and_others_theirs(algorithms: Any) -> None:
    with hook(pipeline_parallel=4):
        packer = algorithms.get_packer(ALGORITHM.upper(), 64, bin_count_multiple=2)
        assert isinstance(packer, algorithms.SequencePacker)
        assert sorted(map(sorted, packer.pack([40, 30, 20, 10]))) == [[0, 3], [1, 2]]
        assert packer.pack([]) == []
        with pytest.raises(ValueError, match="exceeds bin capacity"):
            packer.pack([65, 1])
        given = algorithms.get_packer("first_fit_decreasing", 64, min_bin_count=3)
        assert given == ("own", "first_fit_decreasing", 64, 3, None)


def test_versions_that_bound_the_samples_of_a_bin(algorithms: Any) -> None:
    text = PACKER.replace(
        "bin_count_multiple=None", "bin_count_multiple=None, max_sequences_per_bin=None"
    )
    text = text.replace("min_bin_count, bin_count_multiple\n", "max_sequences_per_bin\n")
    exec(text, vars(algorithms))
    with hook():
        packer = algorithms.get_packer(ALGORITHM, 64, max_sequences_per_bin=2)
        assert sorted(map(len, packer.pack([10] * 5))) == [1, 2, 2]
        assert len(algorithms.get_packer(ALGORITHM, 64).pack([10] * 5)) == 1
        given = algorithms.get_packer("first_fit_decreasing", 64, max_sequences_per_bin=3)
        assert given == ("own", "first_fit_decreasing", 64, 3)


@pytest.mark.parametrize("algorithms", ["small", "own"], indirect=True)
def test_samples_cost_what_the_model_says(algorithms: Any, tmp_path: Path) -> None:
    config = {"num_hidden_layers": 4, "hidden_size": 8, "intermediate_size": 16}
    config |= {"num_attention_heads": 2, "num_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    lengths, shared = [343, 706, 657, 233, 478, 718, 585, 740], {"expert_model_parallel_size": 4}
    dims = ParallelDims(data_parallel=2, pipeline_parallel=4)
    # With experts both ranks wait in every slot for the slower one.
    waiting = replace(dims, expert_parallel=2)
    usual, guessed = planned_bins(lengths, 1000, waiting), first_guess(config | shared)
    expected = planned_bins(lengths, 1000, waiting, guessed)
    alone = planned_bins(lengths, 1000, waiting, first_guess(config))
    freely = planned_bins(lengths, 1000, dims, guessed)
    assert expected not in (usual, alone, freely)
    folder = str(tmp_path)
    models: list[Any] = [config, {"text_config": config}, folder, tmp_path / "config.json"]
    # What a config says itself counts before the argument.
    for model, ranks, bins in [
        *((each, 4, expected) for each in models),
        (config | shared, 1, freely),
    ]:
        with hook(pipeline_parallel=4, expert_parallel=ranks, model=model):
            packer = algorithms.get_packer(ALGORITHM, 1000, bin_count_multiple=2)
            assert packer.pack(lengths) == bins
    with pytest.raises(ParallelDimsError, match=r"expert_parallel \(--ep\) must be 1 or more"):
        hook(expert_parallel=0)
    with pytest.raises(ConfigError, match=r"cannot read some/name.*give a model's folder"):
        hook(model="some/name")
    with pytest.raises(ConfigError, match="hidden_size"):
        hook(model={})


@pytest.mark.parametrize("algorithms", ["own"], indirect=True)
def test_nemo_rls_own_packing_uses_it(algorithms: Any) -> None:
    lengths = [61, 3, 45, 17, 60, 12, 33, 28, 9, 54, 20, 41] * 4
    with hook(pipeline_parallel=4):
        packer = algorithms.get_packer(ALGORITHM, 64, min_bin_count=8, bin_count_multiple=8)
        bins = packer.pack(lengths)
        assert bins == planned_bins(lengths, 64, ParallelDims(data_parallel=8, pipeline_parallel=4))
        least = algorithms.get_packer(ALGORITHM, 64, min_bin_count=48, bin_count_multiple=8)
        assert [len(each) for each in least.pack(lengths)] == [1] * 48
        theirs = algorithms.get_packer("first_fit_decreasing", 64, bin_count_multiple=8)
        mine = theirs.pack(lengths)
    again = algorithms.get_packer("first_fit_decreasing", 64, bin_count_multiple=8)
    assert again.pack(lengths) == mine
    with pytest.raises(ValueError, match="Unknown packing algorithm"):
        algorithms.get_packer(ALGORITHM, 64)
