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

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mcore_batching.batch import OrderError
from mcore_batching.batch.consensus import Consensus
from mcore_batching.integrations.dims import job_dims
from mcore_batching.integrations.local import caller_with, check_model, plan_locally
from mcore_batching.integrations.replacements import (
    Hook,
    HookError,
    Replacement,
    check_signature,
    replacing,
)
from mcore_batching.planning import PlannerConfig

_MODULE = "skyrl.backends.skyrl_train.workers.worker_utils"
_CLASS = "TokenBasedBatchIterator"
# What SkyRL's __init__ uses, in this order; another version may do something else.
_NAMES = ("_token_counts", "_microbatches", "_sync_num_microbatches", "_num_padding_microbatches")
_REORDER, _REORDER_ITEMS = "reorder_and_combine_batches", "reorder_and_combine_items"


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
    count = replacing(original, _NAMES[2], _sync_num_microbatches)
    reorder = [replacing(original, _REORDER, _reorder_and_combine_batches)]
    if hasattr(original, _REORDER_ITEMS):
        reorder.append(replacing(original, _REORDER_ITEMS, _reorder_and_combine_items))
    made = original.__init__  # type: ignore[misc]
    check_signature(f"{where}.__init__", made, _init)
    # __init__ packs, has the number agreed on, then adds padding: ours comes between the two. In
    # another order its own micro-batches would be padded, or ours overwritten.
    used = [name for name in made.__code__.co_names if name in _NAMES]
    if used != list(_NAMES):
        raise HookError(
            f"{where} cannot be replaced: its __init__ uses {', '.join(used) or 'none'}, expected "
            f"{', '.join(_NAMES)} in this order; hook a version of SkyRL that does"
        )
    methods = [count, *reorder]
    body: dict[str, Any] = {each.name: each.ours for each in methods}
    body |= {"__init__": _keeping_alignment(made), "__module__": _MODULE}
    subclass = Replacement(_CLASS, original, type(_CLASS, (original,), body))
    # The methods are in no module's globals, but undone with the class that has them.
    return Hook([module], [subclass, *methods])


def _init(
    self: Any,
    data: Any,
    max_tokens_per_microbatch: int,
    sequence_length_multiple: int = 1,
    packed_length_multiple: int = 1,
) -> None:
    """The parameters of SkyRL's ``__init__``: newest versions align a sample's tokens, and those of
    a micro-batch, to multiples."""


def _keeping_alignment(original: Callable[..., None]) -> Callable[..., None]:
    """SkyRL's ``__init__``; what it aligns to is kept for our plan, which is made inside of it."""
    names = inspect.signature(original)

    @functools.wraps(original)
    def made(self: Any, *given: Any, **named: Any) -> None:
        found = names.bind(self, *given, **named).arguments
        self._alignment = [
            found.get(f"{each}_length_multiple", 1) for each in ("sequence", "packed")
        ]
        original(self, *given, **named)

    return made


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
    _require_all(self, batches)
    # SkyRL looks rows up by sample: one too many would be taken for another sample's.
    outputs = zip(self._microbatches, batches, strict=False)  # padding micro-batches come last
    for number, (samples, batch) in enumerate(outputs):
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
    _require_all(self, batches)
    outputs = zip(self._microbatches, batches, strict=False)
    for number, (samples, items) in enumerate(outputs):
        if len(items) < len(samples):
            raise OrderError(
                f"micro-batch {number} has {len(samples)} samples and {len(items)} items: return "
                "one for each sample"
            )
    return original(self, batches)


def _require_all(iterator: Any, batches: Any) -> None:
    if len(batches) != len(iterator):
        raise OrderError(
            f"expected {len(iterator)} micro-batches' outputs, got {len(batches)}: return one "
            "each, for padding too"
        )
