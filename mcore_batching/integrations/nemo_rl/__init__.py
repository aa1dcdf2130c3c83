"""`hook`: this package's planner as a packer of NeMo-RL's ``get_packer``, named `ALGORITHM`.

NeMo-RL deals bins to the data-parallel ranks round-robin, and each rank runs its own in order. So
bin ``slot * ranks + rank`` is that rank's micro-batch in that slot.

Guarantees
- Every sample is in one bin, and no bin holds more than the capacity, or more samples than
  ``max_sequences_per_bin``.
- The number of bins is a multiple of the ranks, and valid for the interleaved schedule; no bin is
  empty, since NeMo-RL cannot run an empty micro-batch.
- Contents and order are those with which the slowest rank's step ends first.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from mcore_batching.integrations.local import plan_full_slots
from mcore_batching.integrations.replacements import Hook, replacing
from mcore_batching.planning import (
    ConfigError,
    CostModel,
    LengthError,
    ParallelDims,
    ParallelDimsError,
    PlannerConfig,
    at_least,
)
from mcore_batching.planning.costs.layers_of import config_of_json, first_guess, language_model
from mcore_batching.planning.files import read_document

__all__ = ["ALGORITHM", "hook"]

ALGORITHM = "mcore_batching"  # of NeMo-RL's sequence_packing.algorithm


def hook(
    *,
    pipeline_parallel: int = 1,
    virtual_pipeline: int = 1,
    microbatch_group_size: int | None = None,
    expert_parallel: int = 1,
    model: Any = None,
) -> Hook:
    """Teach NeMo-RL's ``get_packer`` the name `ALGORITHM`. Call it in the driver's process.

    Sizes are the policy's, as in `ParallelDims`.

    Args:
        model: its config; the costs of samples follow from its layers. Names and values, as in
            Hugging Face's ``config.json`` or Megatron's config; or the path of a ``config.json`` or
            of its folder. None: the default costs.

    Returns:
        the replaced names; its ``undo`` puts NeMo-RL's own back.

    Raises:
        HookError: it is hooked already, or has another signature in this version.
        ConfigError: the model's config cannot be read, or lacks a size.
        ParallelDimsError: a size is below 1, or sizes do not fit together.
    """
    experts = at_least("expert_parallel", expert_parallel, 1, ParallelDimsError)
    dims = ParallelDims(
        data_parallel=experts,  # at least: the packer is given their number
        pipeline_parallel=pipeline_parallel,
        virtual_pipeline=virtual_pipeline,
        expert_parallel=experts,
        microbatch_group_size=microbatch_group_size,
    )
    costs = None
    if model is not None:
        costs = _costs_of_config(model, {"expert_model_parallel_size": expert_parallel})
    module = importlib.import_module("nemo_rl.data.packing.algorithms")
    packer = _packer_class(module.SequencePacker, dims, costs)
    get_packer = functools.partial(_get_packer, packer)
    return Hook([module], [replacing(module, "get_packer", get_packer)])


def _costs_of_config(model: Any, sizes: dict[str, int]) -> CostModel:
    """The first guess of a model's costs; ``sizes`` of the job count where it has none."""
    if isinstance(model, Mapping):
        return first_guess(sizes | language_model(model))
    path = os.fspath(model)
    path = os.path.join(path, "config.json") if os.path.isdir(path) else path
    try:
        text = read_document(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {path}: {error}; give a model's folder, or its config's names and values"
        ) from error
    return first_guess(sizes | config_of_json(text))


def _get_packer(
    packer: Callable[..., Any],
    original: Callable[..., Any],
    algorithm: Any,
    bin_capacity: int,
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
    max_sequences_per_bin: int | None = None,
) -> Any:
    given = {
        "collect_metrics": collect_metrics,
        "min_bin_count": min_bin_count,
        "bin_count_multiple": bin_count_multiple,
    }
    # NeMo-RL's own are members of an enumeration, or their names in any case.
    if isinstance(algorithm, str) and algorithm.lower() == ALGORITHM:
        made = packer(bin_capacity, **given)
        made.max_sequences_per_bin = max_sequences_per_bin
        return made
    if max_sequences_per_bin is not None:  # which older versions do not have
        given["max_sequences_per_bin"] = max_sequences_per_bin
    return original(algorithm, bin_capacity, **given)


def _packer_class(base: Any, dims: ParallelDims, costs: CostModel | None) -> Any:
    # Made here, since its base is there only where NeMo-RL is.
    class PipelinePacker(base):  # type: ignore[misc]
        max_sequences_per_bin: int | None = None

        def _pack_implementation(self, sequence_lengths: list[int]) -> list[list[int]]:
            self._validate_sequence_lengths(sequence_lengths)
            if not sequence_lengths:
                return []
            # NeMo-RL requires a multiple of the data-parallel ranks. With experts they are planned
            # as if all waited in each slot for the slowest, as those of an expert group do.
            ranks = self.bin_count_multiple or 1
            experts = ranks if dims.in_lockstep else 1
            over_ranks = dataclasses.replace(dims, data_parallel=ranks, expert_parallel=experts)
            return planned_bins(
                sequence_lengths, self.bin_capacity, over_ranks, costs, self.max_sequences_per_bin
            )

    return PipelinePacker


def planned_bins(
    lengths: list[int],
    capacity: int,
    dims: ParallelDims,
    costs: CostModel | None = None,
    most_samples: int | None = None,
) -> list[list[int]]:
    """The samples of each bin, in the order in which NeMo-RL deals bins to ranks.

    Lengths are padded; fewer samples than bins are a `LengthError`.
    """
    config = PlannerConfig(max_tokens_per_gpu=capacity, max_samples_per_row=most_samples)
    step, is_full = plan_full_slots(lengths, dims, config, costs)
    if not is_full:
        raise LengthError(
            f"{len(lengths)} samples are fewer than {dims.data_parallel} data-parallel ranks × "
            f"{step.num_microbatches} micro-batches: set policy.train_global_batch_size higher"
        )
    # Slot after slot, and within each rank after rank: as NeMo-RL deals bins out.
    return [list(samples) for slot in zip(*step.micro_batches, strict=True) for samples in slot]
