"""Shapes of what pipeline stages send each other, as the plan has them."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from mcore_batching.megatron import DynamicBatchArgumentError, compat
from mcore_batching.megatron.run_pipeline import PlannedTransfers
from mcore_batching.planning import ParallelDims


def planned(dims: ParallelDims, num_microbatches: int, forward_only: bool) -> list[Any]:
    """The transfers of every stage; micro-batch i has rows of i + 1 tokens."""
    shapes = [[slot + 1, 1, 4] for slot in range(num_microbatches)]
    return [
        PlannedTransfers(shapes, dims, stage, forward_only=forward_only)
        for stage in range(dims.pipeline_parallel)
    ]


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize(
    ("pipeline", "virtual", "group"), [(2, 1, None), (4, 1, None), (2, 2, 3), (3, 2, 3), (2, 3, 2)]
)
def test_a_stage_expects_what_its_neighbour_sends(
    pipeline: int, virtual: int, group: int | None, forward_only: bool
) -> None:
    dims = ParallelDims(
        pipeline_parallel=pipeline, virtual_pipeline=virtual, microbatch_group_size=group
    )
    count = dims.round_up_num_microbatches(2 * pipeline + 1)
    stages = planned(dims, count, forward_only)
    for stage, following in itertools.pairwise([*stages, stages[0]]):
        sent, received = list(stage._to_next), list(following._from_previous)
        assert sent == received
        chunks = virtual - (following is stages[0])
        assert len(sent) == count * chunks
        back_sent, back_received = list(following._to_previous), list(stage._from_next)
        assert back_sent == back_received
        assert len(back_sent) == (0 if forward_only else count * chunks)


def test_tensors_that_the_plan_does_not_have_are_refused_before_they_are_sent() -> None:
    first, _ = planned(ParallelDims(pipeline_parallel=2), 2, False)
    assert first(torch.zeros(1, 1, 4), None, False, True) == ([0, 0, 0], [1, 1, 4])
    with pytest.raises(
        DynamicBatchArgumentError,
        match=r"sends shape \[2, 1, 8\], but its neighbour expects \[2, 1, 4\]; "
        r"set --dynamic-batch-no-planned-shapes",
    ):
        first(torch.zeros(2, 1, 8), None, False, False)
    first(None, None, False, True)
    for transfer in ((torch.zeros(1, 1, 4), None, False, False), (None, None, False, True)):
        with pytest.raises(
            DynamicBatchArgumentError, match="a stage has more transfers than its schedule"
        ):
            first(*transfer)


def test_megatrons_exchange_is_replaced_inside_the_block_alone() -> None:
    exchange = P2PCommunicator._communicate_shapes
    answers: list[Any] = []

    def known(*transfer: Any) -> tuple[list[int], list[int]]:
        answers.append(transfer)
        return [1], [2]

    with contextlib.suppress(ZeroDivisionError), compat.shapes_of_transfers(known):
        stage = object.__new__(P2PCommunicator)
        assert stage._communicate_shapes(None, None, True, False) == ([1], [2])
        raise ZeroDivisionError
    assert answers == [(None, None, True, False)]
    assert P2PCommunicator._communicate_shapes is exchange


def test_an_exchange_of_another_kind_is_left_alone_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def exchange(self: Any, tensors: Any) -> Any:
        return self, tensors

    monkeypatch.setattr(P2PCommunicator, "_communicate_shapes", exchange)
    with warnings.catch_warnings(record=True) as caught:
        for _ in range(3):
            with compat.shapes_of_transfers(lambda *transfer: ([], [])):
                assert P2PCommunicator._communicate_shapes is exchange
    assert [str(each.message).split(":")[0] for each in caught] == [
        "this Megatron-LM exchanges shapes between pipeline stages in a way that is not known here"
    ]
