"""verl's dynamic context parallelism, with the rows and their sizes of this package's plan.

verl gives all data- and context-parallel ranks all samples, and each rank takes what Megatron's
scheduler assigns to it. `RowScheduler` stands in for that scheduler:

    RowScheduler(100, cp_size=1, dp_size=2).get_groups_and_subsamples([(0, 150), (1, 40), (2, 30)])
    [[[0], [0]], [[1], [2]]]      a micro-batch for each slot, [ranks][samples]: both share 0

All ranks have the same lengths, so they make the same plan without a message.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from mcore_batching.integrations.dims import job_dims
from mcore_batching.integrations.local import plan_full_slots
from mcore_batching.integrations.verl.micro_batches import check_model_of_engine
from mcore_batching.planning import PlannerConfig


def scheduler_class(original: Callable[[], Any]) -> type[RowScheduler]:
    """The class of verl's scheduler, where verl's own function finds Megatron's."""
    original()  # raises for a Megatron without the groups of such rows
    return RowScheduler


class RowScheduler:
    """Megatron's ``DefaultDynamicCPScheduler``, as verl calls it."""

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None = None,
    ) -> None:
        dims = job_dims(data_parallel=dp_size, context_parallel=cp_size)
        self._dims = dataclasses.replace(
            dims,
            # verl pads samples to a multiple of the tensor-parallel size, with or without it.
            sequence_parallel=dims.tensor_parallel > 1,
            microbatch_group_size=microbatch_group_size_per_vp_stage,
        )
        self._config = PlannerConfig(
            max_tokens_per_gpu=max_seqlen_per_dp_cp_rank, max_context_parallel=dp_size * cp_size
        )

    def get_groups_and_subsamples(
        self, sample_id_seqlens: Sequence[tuple[int, int]]
    ) -> list[list[list[int]]]:
        """The samples of each rank in each micro-batch, by their ids; none is empty.

        Ranks that share a row list the same samples. Every rank gives the same lengths.
        """
        check_model_of_engine()
        ids, lengths = zip(*sample_id_seqlens, strict=True)
        step, is_full = plan_full_slots(lengths, self._dims, self._config)
        if not is_full:  # fewer samples than ranks: all share each
            ranks = self._dims.data_parallel * self._dims.context_parallel
            return [[[sample]] * ranks for sample in ids]
        slots = zip(*step.micro_batches, strict=True)
        return [[[ids[i] for i in samples] for samples in of_slot] for of_slot in slots]
