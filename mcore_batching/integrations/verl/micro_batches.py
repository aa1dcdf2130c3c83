"""`hook`: verl's ``rearrange_micro_batches``, ``restore_dynamic_batch`` and, where it has dynamic
context parallelism, the scheduler of that, replaced by ours.

Guarantees of micro-batches, which each data-parallel rank packs from the samples that it holds
- Every sample of the rank is in one micro-batch, and `restore_dynamic_batch` puts outputs back into
  their order; another number of rows than samples is an error on that rank.
- No micro-batch of several samples holds more than ``max_token_len`` tokens, padding for tensor and
  context parallelism included.
- All ranks of ``dp_group`` have the same number, at least ``min_num_micro_batch`` and a multiple of
  ``num_batches_divided_by``.
- A pipeline has at least three micro-batches a stage where samples allow; small ones come first and
  last.
- Too few samples are no error: the rank repeats its shortest sample, with a loss mask of zeros, in
  micro-batches that would be empty; `restore_dynamic_batch` drops these rows.
- An error in planning on one rank is raised on all of the group; a model of verl's Megatron engine
  that cannot run packed rows on all ranks.

Under dynamic context parallelism verl gives all data- and context-parallel ranks all samples, and
each rank takes what Megatron's scheduler assigns to it. `RowScheduler` stands in for that one. All
ranks have the same lengths, so they make the same plan without a message.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mcore_batching.batch import OrderError
from mcore_batching.batch.consensus import Consensus
from mcore_batching.integrations.dims import job_dims
from mcore_batching.integrations.local import (
    caller_with,
    check_model,
    plan_full_slots,
    plan_locally,
)
from mcore_batching.integrations.replacements import Hook, HookError, replacing
from mcore_batching.planning import LengthError, MicroBatches, ParallelDims, PlannerConfig

# Either may be what a loss reads, by verl's version.
_MASKS = ("loss_mask", "response_mask")


def hook() -> Hook:
    """Replace these functions in every loaded module of verl.

    Returns:
        the replaced functions; its ``undo`` puts verl's own back.

    Raises:
        HookError: they are hooked already, or have another signature in this version of verl.
    """
    module = importlib.import_module("verl.utils.seqlen_balancing")
    found = [
        replacing(module, "rearrange_micro_batches", rearrange_micro_batches),
        replacing(module, "restore_dynamic_batch", restore_dynamic_batch),
    ]
    modules = [module]
    if importlib.util.find_spec("verl.utils.dynamic_cp_scheduler"):
        modules.append(importlib.import_module("verl.utils.dynamic_cp_scheduler"))
        name = "get_megatron_dynamic_cp_scheduler_cls"
        found.append(replacing(modules[1], name, scheduler_class))
    return Hook(modules, found)


def rearrange_micro_batches(
    original: Callable[..., Any],
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:
    """The rank's micro-batches, and the samples in each. A collective over ``dp_group``.

    All but ``original``, verl's function, is as in verl.

    Raises:
        LengthError: on every rank, for a sample over the cap or a rank without samples.
        RankFailedError: on every rank, if reading or planning failed on some, or the model of
            verl's Megatron engine cannot run packed rows.
        HookError: on every rank: a sample would run twice where verl counts its tokens.
    """
    if force_group_size != 1:  # consecutive samples that must stay together: verl's own plan
        rest = num_batches_divided_by, same_micro_num_in_dp, min_num_micro_batch
        balance = use_dynamic_bsz_balance, force_group_size
        return original(batch, max_token_len, dp_group, *rest, *balance)  # type: ignore[no-any-return]
    agrees = dist.is_initialized() and same_micro_num_in_dp and dp_group is not None
    group = dp_group if agrees else None
    multiple = num_batches_divided_by or 1
    # Every step below is agreed on: a rank that raised alone would leave the others waiting.
    consensus = Consensus(group)
    if agrees:
        check_model_of_engine()
    lengths, fewest = _checked_lengths(batch, max_token_len, consensus)
    dims, config = _settings(max_token_len, multiple, group)
    chosen = plan_locally(
        lengths, dims, config, consensus, fewest=min_num_micro_batch or 1, multiple=multiple
    )
    # Under Megatron's calculate_per_token_loss verl puts routed_num_tokens into the batch.
    if fewest < len(chosen) and batch.get("routed_num_tokens", None) is not None:
        raise HookError(
            f"a data-parallel rank has fewer samples than its {len(chosen)} micro-batches, and "
            "calculate_per_token_loss would count a repeated one twice: set ppo_mini_batch_size or "
            "ppo_max_token_len_per_gpu higher"
        )
    return _filled(batch, lengths, chosen)


def restore_dynamic_batch(
    original: Callable[..., Any], data: torch.Tensor, batch_idx_list: list[list[int]]
) -> torch.Tensor:
    """Rows of all micro-batches, dense or nested, in the order of the batch, one per sample.

    Raises:
        OrderError: on this rank: there is not one row for each index, or a sample has none.
    """
    indices = [sample for samples in batch_idx_list for sample in samples]
    # The sample of the highest number may be missing unseen: the batch's size is not passed here.
    first: dict[int, int] = {}
    for row, sample in enumerate(indices):
        first.setdefault(sample, row)  # a repeated sample's rows are equal
    missing = sorted(set(range(max(first, default=-1) + 1)) - set(first))
    if missing or len(indices) != data.shape[0]:
        raise OrderError(
            f"expected {len(indices)} rows, one a sample, got {data.shape[0]}, none of samples "
            f"{missing}: return one row per sample",
            missing=tuple(missing),
        )
    if len(first) < len(indices):
        # verl's function takes each sample once.
        if data.is_nested:
            rows = data.unbind()
            data = torch.nested.as_nested_tensor(
                [rows[row] for row in first.values()], layout=torch.jagged
            )
        else:
            data = data[torch.tensor(list(first.values()), dtype=torch.long)]
        batch_idx_list = [list(first)]
    restored: torch.Tensor = original(data, batch_idx_list)
    return restored


def scheduler_class(original: Callable[[], Any]) -> type[RowScheduler]:
    """The class of verl's scheduler, where verl's own function finds Megatron's."""
    original()  # raises for a Megatron without the groups of such rows
    return RowScheduler


class RowScheduler:
    """Megatron's ``DefaultDynamicCPScheduler``, as verl calls it.

    RowScheduler(100, cp_size=1, dp_size=2).get_groups_and_subsamples([(0, 150), (1, 40), (2, 30)])
    [[[0], [0]], [[1], [2]]]      a micro-batch for each slot, [ranks][samples]: both share 0
    """

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None = None,
    ) -> None:
        self._dims = dataclasses.replace(
            _padded_dims(data_parallel=dp_size, context_parallel=cp_size),
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


def check_model_of_engine() -> None:
    """Raise where verl's Megatron engine calls and its model cannot run packed rows."""
    engine = caller_with("tf_config")
    if engine is not None and engine.engine_config.use_remove_padding:
        # Over all stages, which must fail together: `dp_group` holds one alone.
        check_model(engine.module, Consensus(dist.group.WORLD))


def _padded_dims(**known: Any) -> ParallelDims:
    dims = job_dims(**known)
    # verl pads samples to a multiple of the tensor-parallel size, with or without it.
    return dataclasses.replace(dims, sequence_parallel=dims.tensor_parallel > 1)


def _settings(max_token_len: int, multiple: int, group: Any) -> tuple[ParallelDims, PlannerConfig]:
    if group is None:  # this rank's own plan: the ranks that share its experts are not passed
        dims = _padded_dims(data_parallel=1, expert_parallel=1)
    else:
        dims = _padded_dims(data_parallel=dist.get_world_size(group))
    if dims.virtual_pipeline > 1:
        # verl requires a multiple of it, which Megatron's process groups do not have.
        slots = max(multiple, dims.pipeline_parallel)
        dims = dataclasses.replace(dims, microbatch_group_size=slots)
    # verl's cap is for all context-parallel ranks together, this package's for one.
    cap = max(1, max_token_len // dims.context_parallel)
    return dims, PlannerConfig(max_tokens_per_gpu=cap)


def _checked_lengths(batch: Any, max_token_len: int, consensus: Consensus) -> tuple[list[int], int]:
    """Tokens of this rank's samples, none over the cap on any rank, and the fewest samples that a
    rank has: at least one."""
    with consensus.agreement("reading lengths") as agree:
        ids = batch["input_ids"]
        counts = ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(dim=1)
        lengths = [int(count) for count in counts.tolist()]
        longest = agree.max("longest", max(lengths, default=0))
        fewest = agree.min("fewest", len(lengths))
    if not fewest.value:
        raise LengthError("a data-parallel rank has no sample: set ppo_mini_batch_size higher")
    if longest.value > max_token_len:
        raise LengthError(
            f"a sample has {longest.value} tokens, a micro-batch may hold {max_token_len}: set "
            "ppo_max_token_len_per_gpu (log_prob_max_token_len_per_gpu) higher"
        )
    return lengths, fewest.value


def _filled(
    batch: Any, lengths: Sequence[int], chosen: MicroBatches
) -> tuple[list[Any], list[list[int]]]:
    """The micro-batches and the samples in each, none empty: verl runs no empty one."""
    # The shortest sample, masked, takes a placeholder's place.
    shortest = min(range(len(lengths)), key=lambda sample: (lengths[sample], sample))
    indices = [list(samples) or [shortest] for samples in chosen]
    made = [_select(batch, samples) for samples in indices]
    for micro_batch in (each for each, samples in zip(made, chosen, strict=True) if not samples):
        for name in _MASKS:
            if micro_batch.get(name, None) is not None:
                micro_batch[name] = torch.zeros_like(micro_batch[name])
    return made, indices


def _select(batch: Any, samples: list[int]) -> Any:
    utilities = importlib.import_module("verl.utils.tensordict_utils")
    return utilities.index_select_tensor_dict(batch, samples)
