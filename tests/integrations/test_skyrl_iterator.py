"""SkyRL's token-based micro-batches, planned here: their contract, and replacing its iterator.

SkyRL's own modules take part where ``MCORE_BATCHING_SKYRL_SOURCE`` names a checkout (a9564572).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from frameworks import LENGTHS, WORKERS, padded_batch, rewrite
from planning_cases import plan_locally, real_lengths

from mcore_batching.batch import OrderError
from mcore_batching.integrations import skyrl
from mcore_batching.integrations.skyrl import hook
from mcore_batching.planning import ParallelDims, PlannerConfig


@pytest.fixture
def workers(small: Callable[..., Path]) -> Any:
    small("skyrl")
    return importlib.import_module(f"{WORKERS}.worker_utils")


@pytest.fixture
def own_workers(own: Callable[[str], Path]) -> Any:
    own("skyrl")
    return importlib.import_module(f"{WORKERS}.worker_utils")


def test_in_a_pipeline_it_is_the_plan_of_the_rank(
    workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes of no other groups are read: the cap is that of all their ranks together."""
    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_pipeline_model_parallel_world_size=lambda: 4,
        get_virtual_pipeline_model_parallel_world_size=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    config = PlannerConfig(max_tokens_per_gpu=120)
    step = plan_locally(LENGTHS, ParallelDims(pipeline_parallel=4), config, [0] * 12)
    with hook():
        made = workers.TokenBasedBatchIterator(padded_batch(LENGTHS), max_tokens_per_microbatch=120)
    assert made._microbatches == [list(samples) for samples in step.micro_batches[0]]


FAULTS: dict[str, Callable[[list[dict[str, torch.Tensor]]], Any]] = {
    "one too few": lambda made: [{name: rows[:-1] for name, rows in made[0].items()}, *made[1:]],
    "one too many": lambda made: [
        {name: torch.cat((rows, rows[-1:])) for name, rows in made[0].items()},
        *made[1:],
    ],
    "a micro-batch less": lambda made: made[:-1],
    "a micro-batch more": lambda made: [*made, made[-1]],
}


def test_another_number_of_rows_is_an_error(workers: Any) -> None:
    with hook():
        made = workers.get_microbatch_iterator(padded_batch(LENGTHS), 1, 120)
        outputs = [{"places": torch.tensor(samples)} for samples in made._microbatches]
        for name, change in FAULTS.items():
            with pytest.raises(OrderError, match="outputs, got" if "a " in name else "rows of"):
                made.reorder_and_combine_batches(change(outputs))
        together = made.reorder_and_combine_batches(outputs)
        assert [int(row) for row in together["places"]] == list(range(len(LENGTHS)))
        assert len(made) == len(made._microbatches) < 12
        imported_meanwhile = workers.TokenBasedBatchIterator
    assert len(imported_meanwhile(padded_batch(LENGTHS), 120)) == 12  # undone, SkyRL's own


def test_items_of_a_sample_too_few_are_an_error(workers: Any) -> None:
    """A Megatron worker's micro-batches have rows behind their samples', which SkyRL drops."""
    with hook():
        made = workers.get_microbatch_iterator(padded_batch(LENGTHS), 1, 120)
        items = [[*samples, "padding"] for samples in made._microbatches]
        assert made.reorder_and_combine_items(items) == list(range(len(LENGTHS)))
        with pytest.raises(OrderError, match=r"micro-batch 1 has \d samples and \d items"):
            made.reorder_and_combine_items([items[0], items[1][:-2], *items[2:]])
        with pytest.raises(OrderError, match="outputs, got"):
            made.reorder_and_combine_items(items[:-1])


def test_the_cap_counts_tokens_as_skyrl_aligns_them(workers: Any) -> None:
    given = "self, data, max_tokens_per_microbatch"
    aligned = f"{given}, sequence_length_multiple=1, packed_length_multiple=1):"
    changed = rewrite(workers.__name__, Path(workers.__file__).parents[4], f"{given}):", aligned)
    with hook():
        unaligned = changed.TokenBasedBatchIterator(padded_batch([5] * 8), 20)
        of_samples = changed.TokenBasedBatchIterator(padded_batch([5] * 8), 20, 8)
        of_rows = changed.TokenBasedBatchIterator(
            padded_batch([5] * 8), 20, packed_length_multiple=16
        )
    assert [len(each) for each in (unaligned, of_samples, of_rows)] == [2, 4, 3]


def test_padding_micro_batches_follow_up_to_the_count_of_all_ranks(
    workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample cannot be split. `tests/distributed/kit/hooking.py` has the agreement of ranks."""
    monkeypatch.setattr(skyrl, "plan_locally", lambda *_: ((0,), (), ()))
    with hook():
        made = workers.get_microbatch_iterator(padded_batch([10]), 1, 100)
    assert (made._microbatches, made._num_padding_microbatches, len(made)) == ([[0]], 2, 3)


def training_batch(workers: Any, lengths: list[int]) -> Any:
    batch = workers.TrainingInputBatch(
        padded_batch(lengths)
        | {"rewards": torch.rand(len(lengths), 4), "loss_mask": torch.ones(len(lengths), 4)}
    )
    batch.metadata = {"response_length": 4}
    return batch


@pytest.mark.parametrize("cap", [16384, 4096])
def test_outputs_of_skyrls_own_come_back_in_order(own_workers: Any, cap: int) -> None:
    """At the smaller cap some samples are over it."""
    lengths = [length // 16 + 1 for length in real_lengths(96)]
    batch, cap = training_batch(own_workers, lengths), cap // 16

    def packed() -> Any:
        return own_workers.get_microbatch_iterator(batch, 1, cap)

    theirs = packed()._microbatches
    with hook():
        made = packed()
        for samples, micro_batch in zip(made._microbatches, made, strict=True):
            tokens = int(micro_batch["attention_mask"].sum())
            assert tokens == sum(lengths[i] for i in samples)
            assert tokens <= cap or len(samples) == 1
        together = made.reorder_and_combine_batches(list(made))
        for name, values in batch.items():
            assert torch.equal(together[name], values)
    assert packed()._microbatches == theirs
