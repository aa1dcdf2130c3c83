"""Placeholders for slime's and miles' own ``get_batch``, ``forward_only`` and losses.

Since slime's pull request 1926 and miles' 1927 the rollout manager plans, and a rank's rollout data
list the samples of each micro-batch. Where it lists none, `PlaceholderIterator` fabricates one, and
``forward_only`` drops its outputs.

The framework's ``forward_only`` restores the order of outputs without checking their number. So it
is checked here: before the pass, that the micro-batches hold each sample once; after it, that the
function of the logits returned one output per sample. The order of outputs within a micro-batch
cannot be checked.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

from mcore_batching.batch import OrderError, Schema, apply_order
from mcore_batching.batch.agreement.consensus import Statement
from mcore_batching.integrations.replacements import HookError
from mcore_batching.integrations.slime.iterator import PlaceholderIterator, PlaceholderLengths
from mcore_batching.megatron.errors import CollationFailedError
from mcore_batching.megatron.job.job import job_of
from mcore_batching.megatron.step.logits_function import checked_outputs

_OPERATION = "forward_only"

LEADING = {
    "get_data_iterator": (("rollout_data",), ("args", "model", "rollout_data")),
    "forward_only": (("f", "args", "model", "data_iterator", "num_microbatches"),),
    "get_batch": (("data_iterator", "keys"),),
}
"""First parameters of slime's and miles' functions."""


def get_data_iterator(
    original: Callable[..., Any], *arguments: Any, schema: Schema, **keywords: Any
) -> Any:
    """The result of the framework's function, its iterators with placeholders.

    Data that miles plans in the trainer (several modalities or adapters) stay its own.
    """
    made = original(*arguments, **keywords)
    iterators, *counts = made if isinstance(made, tuple) else (made,)
    with_placeholders = [
        PlaceholderIterator(each, schema) if "micro_batch_indices" in each.rollout_data else each
        for each in iterators
    ]
    return (with_placeholders, *counts) if counts else with_placeholders


def forward_only(
    original: Callable[..., Any],
    f: Callable[..., Any],
    args: Any,
    model: Any,
    data_iterator: Sequence[Any],
    num_microbatches: Sequence[int],
    *arguments: Any,
    **keywords: Any,
) -> Any:
    """The framework's forward pass, without placeholders' outputs.

    A collective over all ranks if the rollout manager planned. Otherwise (fixed micro-batches,
    miles' own plans) errors are raised on their own rank.

    Raises:
        CollationFailedError: on every rank, if any rank's micro-batches do not hold each sample
            once (an `OrderError`), or ranks differ in ``num_microbatches``.
        ForwardFailedError: on every rank, if on any ``f`` raised, did not return one output per
            sample (an `OrderError`), or returned different names.
        PipelineFailedError: on every rank that can still be reached, if anything else raised.
    """

    def run(f: _Guarded) -> Any:
        return original(f, args, model, data_iterator, num_microbatches, *arguments, **keywords)

    planned = isinstance(data_iterator[0], PlaceholderIterator)
    # slime's log-prob server runs data-parallel ranks separately: a collective would hang there.
    if not (planned and getattr(args, "use_dynamic_batch_size", False)):
        return run(_Guarded(f, _raise))
    job = job_of(args)
    job.consensus.agree(
        _OPERATION,
        lambda: _check_plan(data_iterator[0], num_microbatches),
        lambda checked: Statement(equal={"num_microbatches": list(num_microbatches)}),
        failure=CollationFailedError,
        mismatch=CollationFailedError,
    )
    failed: list[Exception] = []
    # The pipeline has to run dry before all ranks can be told.
    guarded = _Guarded(f, functools.partial(job.defer, failed))
    with job.watch.reporting(_OPERATION):
        made = run(guarded)

    def says(nothing: None) -> Statement:
        names = guarded.names  # none on other stages than the last
        return Statement(equal={} if names is None else {"names that f returned": sorted(names)})

    job.agree_after_pipeline(_OPERATION, failed, says=says)
    return made


def _check_plan(iterator: PlaceholderIterator, num_microbatches: Sequence[int]) -> None:
    """Refuse micro-batches that do not hold each sample once, or another number than is to run."""
    micro_batches = iterator.micro_batch_indices
    samples = range(len(iterator.rollout_data["tokens"]))
    try:
        apply_order(samples, [sample for each in micro_batches for sample in each])
    except OrderError as error:
        raise OrderError(
            f"micro_batch_indices must hold each of {len(samples)} samples once: missing "
            f"{list(error.missing)}, doubled {list(error.doubled)}, extra {list(error.extra)}; "
            "plan by build_dp_schedule"
        ) from error
    if sum(num_microbatches) != len(micro_batches):
        raise OrderError(
            f"num_microbatches {list(num_microbatches)} do not add up to the {len(micro_batches)} "
            "micro_batch_indices: pass those of the rollout data"
        )


# Where each rank runs by itself, what fails is raised at once.
def _raise(exception: Exception) -> None:
    raise exception


class _Guarded:
    """The function of the logits, with checked outputs, and empty ones for a placeholder.

    Attributes:
        names: of its outputs; None before its first call.
    """

    def __init__(self, f: Callable[..., Any], failed: Callable[[Exception], None]) -> None:
        functools.update_wrapper(self, f)
        self._f = f
        self._failed = failed  # called with what f or the check raises
        self.names: set[str] | None = None

    def __call__(self, logits: Any, **keywords: Any) -> Any:
        """Outputs as Megatron's schedule takes them: a dict, or a tensor and a dict."""
        lengths = keywords.get("total_lengths", ())
        is_placeholder = isinstance(lengths, PlaceholderLengths)
        output, values = None, {}
        try:
            if "total_lengths" not in keywords:
                raise HookError(
                    "forward_only passes its function no total_lengths, which mark placeholders: "
                    "use a version of the framework that does"
                )
            # Of a placeholder, too: f may be a collective of the ranks that share the row.
            made = self._f(logits, **keywords)
            values = self._checked(made, len(lengths))
            output = made[0] if isinstance(made, tuple) else None
        except Exception as exception:
            self._failed(exception)
            # Stands in for any name, with one value per sample, until all ranks raise.
            values = collections.defaultdict(lambda: [None] * (not is_placeholder) * len(lengths))
        if is_placeholder:  # the framework puts what comes back into the samples' order
            for name in values:
                values[name] = []
        if "non_loss_data" in keywords:  # miles collects outputs, slime takes them for a loss
            return values
        return logits.new_zeros(0) if output is None else output, values

    def _checked(self, made: Any, num_samples: int) -> dict[str, list[Any]]:
        values = checked_outputs(made, num_samples)
        # The framework collects outputs by the first micro-batch's names: others would be lost.
        if self.names is None:
            self.names = set(values)
        if self.names != set(values):
            raise OrderError(
                f"forward_only's function returned {sorted(values)} for one micro-batch, "
                f"{sorted(self.names)} for another: return the same names for all"
            )
        return values
