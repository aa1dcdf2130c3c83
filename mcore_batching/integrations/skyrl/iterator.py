"""`hook`: SkyRL's ``TokenBasedBatchIterator`` with micro-batches that this package plans.

Guarantees
- Every sample of the rank is in one micro-batch, and SkyRL's ``reorder_and_combine_batches`` puts
  outputs back into their order; an output with other rows than its micro-batch has samples is an
  error on that rank.
- A micro-batch holds at most ``max_tokens_per_microbatch`` tokens; a longer sample is alone, as in
  SkyRL.
- All ranks have the same number: micro-batches are split first, then SkyRL's padding ones are
  added at the end.
- A pipeline has at least three micro-batches a stage where samples allow; small ones come first and
  last.
- An error in planning on one rank is raised on all, and so is a Megatron worker's model that cannot
  run packed rows.
"""

from __future__ import annotations

import importlib
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
_REORDER = "reorder_and_combine_batches"


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
    reorder = replacing(original, _REORDER, _reorder_and_combine_batches)
    check_signature(
        f"{where}.__init__",
        original.__init__,  # type: ignore[misc]
        lambda self, data, max_tokens_per_microbatch: None,
    )
    # __init__ packs, has the number agreed on, then adds padding: ours comes between the two. In
    # another order its own micro-batches would be padded, or ours overwritten.
    used = [name for name in original.__init__.__code__.co_names if name in _NAMES]  # type: ignore[misc]
    if used != list(_NAMES):
        raise HookError(
            f"{where} cannot be replaced: its __init__ uses {', '.join(used) or 'none'}, expected "
            f"{', '.join(_NAMES)} in this order; hook a version of SkyRL that does"
        )
    body = {count.name: count.ours, reorder.name: reorder.ours, "__module__": _MODULE}
    subclass = Replacement(_CLASS, original, type(_CLASS, (original,), body))
    # The methods are in no module's globals, but undone with the class that has them.
    return Hook([module], [subclass, count, reorder])


def _sync_num_microbatches(original: Callable[..., Any], self: Any) -> int:
    """Plan this rank's micro-batches and return every rank's number. A collective over all ranks.

    SkyRL's ``__init__`` calls it behind its own packing, and then adds padding micro-batches up to
    that number.
    """
    del original
    consensus = Consensus(dist.group.WORLD if dist.is_initialized() else None)
    # Of Megatron's workers; the others have models of their own.
    worker = caller_with("actor_module")
    if worker is not None and worker.model.remove_microbatch_padding:
        check_model(worker.actor_module, consensus)
    planned = plan_locally(
        self._token_counts,
        # SkyRL's cap is for all context-parallel ranks together, in tokens without padding.
        job_dims(data_parallel=1, context_parallel=1, tensor_parallel=1, expert_parallel=1),
        PlannerConfig(max_tokens_per_gpu=self._max_tokens_per_microbatch),
        consensus,
    )
    self._microbatches = [list(samples) for samples in planned if samples]
    return len(planned)


def _reorder_and_combine_batches(original: Callable[..., Any], self: Any, batches: Any) -> Any:
    """SkyRL's own, after a check that each output has one row per sample, else an `OrderError`."""
    if len(batches) != len(self):
        raise OrderError(
            f"expected {len(self)} micro-batches' outputs, got {len(batches)}: return one each, "
            "for padding too"
        )
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
