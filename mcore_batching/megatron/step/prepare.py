"""`prepare`: a step collated on every rank, or on none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.utils import get_model_config

from mcore_batching.batch import PackedMicroBatch, StepTotals
from mcore_batching.batch.consensus import Reduction
from mcore_batching.flags import FLAGS
from mcore_batching.megatron.checks.shared_prefixes import check_shared_prefixes
from mcore_batching.megatron.checks.shared_rows import let_rows_have_groups
from mcore_batching.megatron.checks.validation import check_logits
from mcore_batching.megatron.errors import CollationFailedError
from mcore_batching.megatron.job.job import Job
from mcore_batching.megatron.rows.prepared_step import PreparedStep
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.megatron.topology import model_chunks, prediction_depths

_ALIKE = ("no_planned_shapes", "fuse_output_layer")
"""Arguments of the pipeline, which planning does not read."""


def prepare(
    job: Job,
    model: Any,
    operation: str,
    step: int,
    schedule: Callable[[], MicroBatchSchedule],
    *,
    forward_only: bool = True,
    change: Callable[[PackedMicroBatch], PackedMicroBatch] = lambda row: row,
    alike: Callable[[MicroBatchSchedule], Mapping[str, Any]] = lambda schedule: {},
) -> PreparedStep:
    """Collate all micro-batches of a step, and go on only if every rank could.

    A collective over all ranks; what ``schedule`` raises, and what fails here, is raised on each.
    ``model`` is not read before. ``forward_only`` leaves out losses of further tokens,
    ``change`` gives the row that model and loss get, ``alike`` what else ranks compare.
    """
    # Under dynamic CP the ranks of a replica run different rows, so each agrees for itself.
    with job.consensus_of_rows.agreement(
        f"{operation}, collating", failure=CollationFailedError
    ) as agree:
        # All rows at once, before the pipeline: a value that does not fit would otherwise show
        # inside it, where the other ranks wait for this one's tensors.
        found, chunks = schedule(), model_chunks(model)
        config = get_model_config(chunks[0])  # raises for what is no model of Megatron's
        check_logits(job.options, chunks)
        # The model need not be the one planned with: a reference model runs the same rows.
        if found.hosts is not None:
            check_shared_prefixes(chunks)
        if found.has_sizes_of_rows:
            let_rows_have_groups(chunks)
        depths = 0 if forward_only else prediction_depths(config)
        prepared = PreparedStep.of_rows(found, step, found.rows(step, depths), chunks, change)
        agree.same("plan (sha256)", found.plan_digest)
        agree.same("step", step)
        agree.same("number of micro-batches", len(prepared.rows))
        # Ranks that differ in these would wait for messages that nobody sends, or scale their
        # gradients differently. Read from the model, which training uses, not from the argument.
        agree.same("calculate_per_token_loss", bool(config.calculate_per_token_loss))
        for name in _ALIKE:
            agree.same(FLAGS[name], getattr(job.options, name))
        for name, value in alike(found).items():
            agree.same(name, value)
        # What losses divide by, over all ranks, without a collective of its own.
        sums: dict[str, Reduction[Any]] = {}
        for name, value in dataclasses.asdict(prepared.totals).items():
            sums[name] = agree.sum(name, value)
            # The weight is a sum of floats, which another device adds up in another order.
            if name != "token_weight":
                agree.same(name, value, within="replica")
        weights = agree.sum("token weights by depth", list(prepared.token_weights))
    totals = StepTotals(**{name: each.value for name, each in sums.items()})
    return dataclasses.replace(prepared, totals=totals, token_weights=weights.value)
