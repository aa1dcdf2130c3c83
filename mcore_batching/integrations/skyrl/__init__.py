"""`hook`: SkyRL's ``TokenBasedBatchIterator`` with micro-batches that this package plans.

Guarantees
- Every sample of the rank is in one micro-batch, and SkyRL's ``reorder_and_combine_batches`` (and
  ``…_items``, where it has them) puts outputs back into their order; an output with other rows than
  its micro-batch has samples, or fewer items, is an error on that rank.
- A micro-batch holds at most ``max_tokens_per_microbatch`` tokens, aligned where SkyRL aligns them;
  a longer sample is alone, as in SkyRL.
- All ranks have the same number: micro-batches are split first, then SkyRL's padding ones are
  added at the end.
- A pipeline has at least three micro-batches a stage where samples allow; small ones come first and
  last.
- An error in planning on one rank is raised on all, and so is a Megatron worker's model that cannot
  run packed rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from mcore_batching.batch import OrderError
from mcore_batching.batch.consensus import Consensus
from mcore_batching.integrations.dims import job_dims
from mcore_batching.integrations.local import caller_with, check_model, plan_locally
from mcore_batching.integrations.replacements import Hook, HookError, Replacement, replacing
from mcore_batching.planning import PlannerConfig

__all__ = ["hook"]

_MODULE = "skyrl.backends.skyrl_train.workers.worker_utils"
_CLASS = "TokenBasedBatchIterator"
# What SkyRL's __init__ uses, in this order; another version may do something else.
_NAMES = ("_token_counts", "_microbatches", "_sync_num_microbatches", "_num_padding_microbatches")


def hook() -> Hook:
    """Replace the iterator in every loaded module of SkyRL. On all ranks or none.

    Returns:
        the replaced names; its ``undo`` puts SkyRL's own back.

    Raises:
        HookError: it is hooked already, or is another one in this version of SkyRL.
    """
    module = importlib.import_module(_MODULE)
    original = getattr(module, _CLASS, None)
    where = f"{_MODULE}.{_CLASS}"
    # A function of this name would be called, not subclassed.
    if not isinstance(original, type):
        raise HookError(f"{where} cannot be replaced: there is none in this version of SkyRL")
    methods = [
        replacing(original, name, ours)
        for name, ours in _METHODS.items()
        if name != _NEWEST or hasattr(original, name)
    ]
    # __init__ packs, has the number agreed on, then adds padding: ours comes between the two. In
    # another order its own micro-batches would be padded, or ours overwritten.
    used = [name for name in original.__init__.__code__.co_names if name in _NAMES]  # type: ignore[misc]
    if used != list(_NAMES):
        raise HookError(
            f"{where} cannot be replaced: its __init__ uses {', '.join(used) or 'none'}, expected "
            f"{', '.join(_NAMES)} in this order; hook a version of SkyRL that does"
        )
    body: dict[str, Any] = {each.name: each.ours for each in methods}
    subclass = Replacement(
        _CLASS, original, type(_CLASS, (original,), body | {"__module__": _MODULE})
    )
    # The methods are in no module's globals, but undone with the class that has them.
    return Hook([module], [subclass, *methods])


def _init(
    original: Callable[..., None],
    self: Any,
    data: Any,
    max_tokens_per_microbatch: int,
    sequence_length_multiple: int = 1,
    packed_length_multiple: int = 1,
) -> None:
    """SkyRL's own, inside of which our plan is made.

    Newest versions align a sample's tokens, and those of a micro-batch, to multiples.
    """
    self._alignment = sequence_length_multiple, packed_length_multiple
    multiples = {
        "sequence_length_multiple": sequence_length_multiple,
        "packed_length_multiple": packed_length_multiple,
    }
    given = {name: multiple for name, multiple in multiples.items() if multiple != 1}
    original(self, data, max_tokens_per_microbatch, **given)


def _sync_num_microbatches(original: Callable[..., Any], self: Any) -> int:
    """Plan this rank's micro-batches and return every rank's number. A collective over all ranks.

    SkyRL's ``__init__`` calls it behind its own packing, and then adds padding micro-batches up to
    that number.
    """
    del original
    of_sample, of_row = self._alignment
    consensus = Consensus(dist.group.WORLD if dist.is_initialized() else None)
    # Of Megatron's workers; the others have models of their own.
    worker = caller_with("actor_module")
    if worker is not None and worker.model.remove_microbatch_padding:
        check_model(worker.actor_module, consensus)
    planned = plan_locally(
        self._token_counts,
        # SkyRL's cap is for all context-parallel ranks together, in tokens as it aligns them.
        job_dims(data_parallel=1, context_parallel=1, tensor_parallel=1, expert_parallel=1),
        PlannerConfig(
            max_tokens_per_gpu=self._max_tokens_per_microbatch,
            pad_each_to=of_sample,
            pad_total_to=of_row,
        ),
        consensus,
    )
    self._microbatches = [list(samples) for samples in planned if samples]
    return len(planned)


def _reorder_and_combine_batches(original: Callable[..., Any], self: Any, batches: Any) -> Any:
    """SkyRL's own, after a check that each output has one row per sample, else an `OrderError`."""
    # SkyRL looks rows up by sample: one too many would be taken for another sample's.
    for number, samples, batch in _outputs(self, batches):
        for name, values in batch.items():
            if values is not None and len(values) != len(samples):
                raise OrderError(
                    f"micro-batch {number} has {len(samples)} samples and {len(values)} rows of "
                    f"{name!r}: return one row for each sample"
                )
    return original(self, batches)


def _reorder_and_combine_items(original: Callable[..., Any], self: Any, batches: Any) -> Any:
    """SkyRL's own, after a check that each micro-batch has an item per sample, else an
    `OrderError`. Items behind them, of rows that a Megatron worker adds, are dropped there."""
    for number, samples, items in _outputs(self, batches):
        if len(items) < len(samples):
            raise OrderError(
                f"micro-batch {number} has {len(samples)} samples and {len(items)} items: return "
                "one for each sample"
            )
    return original(self, batches)


def _outputs(iterator: Any, batches: Any) -> Iterator[tuple[int, list[int], Any]]:
    """Number, samples and output of each micro-batch with samples: padding ones come last."""
    if len(batches) != len(iterator):
        raise OrderError(
            f"expected {len(iterator)} micro-batches' outputs, got {len(batches)}: return one "
            "each, for padding too"
        )
    for number, (samples, batch) in enumerate(zip(iterator._microbatches, batches, strict=False)):
        yield number, samples, batch


_NEWEST = "reorder_and_combine_items"
_METHODS: dict[str, Callable[..., Any]] = {
    "__init__": _init,
    "_sync_num_microbatches": _sync_num_microbatches,
    "reorder_and_combine_batches": _reorder_and_combine_batches,
    _NEWEST: _reorder_and_combine_items,
}
