"""`get_data_iterator`: rollout data on every rank, planned, as iterators over micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

from mcore_batching.batch import DEFAULT_SCHEMA, Schema
from mcore_batching.flags import FLAGS
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.job.job import job_of
from mcore_batching.megatron.rollout.rollout import Rollout, plan_rollout
from mcore_batching.megatron.rollout.samples import read_samples
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.planning import CostModel


class DataIterator:
    """Walks through the micro-batches of a rollout, for one virtual pipeline stage.

    The names that frameworks read are kept: ``rollout_data``, ``micro_batch_indices``, ``offset``,
    ``get_next`` and ``reset``. Reading one of the first two plans all steps that are not yet, which
    is a collective over all ranks.
    """

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self.offset = 0

    @property
    def rollout_data(self) -> dict[str, list[Any]]:
        """Field name to one value per sample of this rank."""
        return self._rollout.planned().rollout_data

    @property
    def micro_batch_indices(self) -> list[list[int]]:
        """Local sample indices of every micro-batch of every step; ``[]`` for a placeholder."""
        return [list(indices) for indices in self._rollout.planned().micro_batches]

    def get_next(self, keys: Sequence[str]) -> dict[str, list[Any] | None]:
        """The next micro-batch: for each key one value per sample, one fabricated value for a
        placeholder, None for a key that the rollout data lacks.

        Raises:
            IndexError: all micro-batches have been drawn; `reset` starts again.
            DynamicBatchArgumentError: samples share segments, or the step is not planned yet.
        """
        keys = list(keys)
        schedule = self._rollout.schedule
        # Whoever lays them out by their lengths would give each a segment of its own, over the cap.
        if schedule.hosts is not None:
            raise DynamicBatchArgumentError(
                "samples that share segments cannot be drawn; give the iterators to forward_only "
                f"and train_step, or unset {FLAGS['share_prefixes']}"
            )
        micro_batches = schedule.micro_batches
        # Not planned here: inside a pipeline the other ranks may wait for this one.
        step = len(schedule.steps)
        if self.offset >= len(micro_batches) and step < self._rollout.num_steps:
            raise DynamicBatchArgumentError(
                f"step {step} is not planned yet: read num_microbatches[{step}] on all ranks first"
            )
        if self.offset >= len(micro_batches):
            raise IndexError(
                f"all {len(micro_batches)} micro-batches have been drawn; call reset() first"
            )
        # slime asks for all fields that it knows, and takes None for those that a rollout lacks.
        present = [key for key in keys if key in schedule.template]
        values = schedule.samples(micro_batches[self.offset], present)
        self.offset += 1
        return {key: values.get(key) for key in keys}

    def reset(self) -> Self:
        """Start again from the first micro-batch."""
        self.offset = 0
        return self


def rollout_of(data_iterator: Sequence[DataIterator]) -> Rollout:
    """The batch that the iterators of one call walk through.

    Raises:
        TypeError: they are not what `get_data_iterator` returned.
    """
    first = data_iterator[0] if isinstance(data_iterator, Sequence) and data_iterator else None
    if not isinstance(first, DataIterator):
        raise TypeError(
            "data_iterator must be what get_data_iterator returned, got "
            f"{type(data_iterator).__name__}; pass on its list of iterators"
        )
    # The first stands for all: those of one call share the rollout, and move on with it.
    return first._rollout


def schedule_of(data_iterator: Sequence[DataIterator]) -> MicroBatchSchedule:
    """The micro-batches that the iterators of one call walk through. A collective over all ranks
    while some step is not planned.

    Raises:
        TypeError: they are not what `get_data_iterator` returned.
    """
    return rollout_of(data_iterator).planned()


def get_data_iterator(
    args: Any,
    model: list[Any],
    rollout_data: dict[str, list[Any]] | None,
    *,
    schema: Schema = DEFAULT_SCHEMA,
    steps: Iterable[Iterable[int]] | None = None,
    cost_model: CostModel | None = None,
) -> tuple[list[DataIterator], Sequence[int]]:
    """Plan this rank's micro-batches together with all other ranks.

    A collective over all ranks. The samples of all ranks are planned together, by the job's first
    rank, and each moves to the ranks that run it. Outputs of `forward_only` come back to where
    their samples came from, and `add_fields` takes fields in that order; the iterators
    (``rollout_data``, `get_next`) hold the samples that run here.

    Of several steps the first is planned and exchanged when this returns. A worker process plans
    the others meanwhile, of the samples as they are now; each is awaited when it is first used. If
    planning a later step fails, all ranks raise then.

    Under ``--no-dynamic-batch-exchange`` each data-parallel rank packs its own samples, and those
    with fewer micro-batches split theirs, then add placeholders.

    Under ``--dynamic-batch-share-prefixes`` samples whose tokens begin another's, in the same step
    and on the same rank, are computed in that one's segment of a row; all else stays per sample.

    Args:
        args: Megatron's arguments: ``max_tokens_per_gpu``, ``global_batch_size`` and the
            ``dynamic_batch_*`` options. Where ``use_dynamic_batch_size`` is there and False,
            micro-batches hold ``micro_batch_size`` samples each, however long.
        model: this rank's model chunks.
        rollout_data: field name to one value per sample of this data-parallel rank, which may have
            none (empty lists); ``tokens``, ``total_lengths`` and ``response_lengths`` are required.
            It is sent to ranks of a replica (pipeline, tensor, context) that pass None.
        schema: the kind of every field. Undeclared ones are inferred from this rank's samples;
            where these fit several kinds, a `SchemaError` prints the line that declares the field.
        steps: local sample indices of every optimizer step, in lists, arrays, tensors or whatever
            gives them once. None: steps of ``global_batch_size`` samples over all ranks, the last
            one short, to which each rank gives consecutive samples in proportion to its number.
            ``rollout_data["dynamic_global_batch_size"]`` overrides the argument; beside `steps` it
            is what `train_step` counts each of them as: prompts times trajectories per prompt.
        cost_model: what samples and micro-batches cost; None: as ``--dynamic-batch-cost-model``
            says, by default the model's shape.

    Returns:
        one iterator per virtual pipeline stage, and the number of micro-batches of each step, the
        same on every rank; reading that of a step that is not planned yet plans it, which is a
        collective over all ranks.

    Raises:
        DynamicBatchArgumentError: settings under which training would hang or be wrong.
        PlanningFailedError: on every rank, if any could not plan.
        PlanMismatchError: on every rank, if they disagree on settings, fields or plan.
    """
    job = job_of(args)
    samples = read_samples(
        job, model, schema, lambda: rollout_data, steps=steps, cost_model=cost_model
    )
    rollout = plan_rollout(samples)
    # The interleaved schedule draws every micro-batch once per model chunk, each at its own pace.
    # All share the rollout, so that `add_fields` on one list reaches every stage's iterator.
    iterators = range(rollout.schedule.dims.virtual_pipeline)
    return [DataIterator(rollout) for _ in iterators], rollout.num_microbatches()
