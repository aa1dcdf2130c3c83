"""Placeholders for slime's and miles' own ``get_batch``, ``forward_only`` and losses.

Since slime's pull request 1926 and miles' 1927 the rollout manager plans, and the rollout data of a
rank come with the samples of each micro-batch. One without samples is a placeholder. Here it
becomes a sample of one token with an empty response, which the framework packs and runs like any
other: its loss is 0 and stays attached to the graph, its mask adds no token to a count, and
``forward_only`` leaves its outputs out. The framework's functions all stay what they are.

The framework's ``forward_only`` puts outputs into the order of the samples by what it finds, be it
too few or too many. So what it finds is checked: before the pass, that the micro-batches hold each
sample once; after it, that the function of the logits gave one output for each. That an output is
of the right sample of its micro-batch, nobody can see.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

from mcore_batching.batch import Kind, OrderError, Schema, apply_order, make_placeholder
from mcore_batching.batch.consensus import Statement
from mcore_batching.integrations.replacements import HookError
from mcore_batching.integrations.slime.zero_count_mask import zero_count_mask
from mcore_batching.megatron.errors import CollationFailedError
from mcore_batching.megatron.job.job import job_of
from mcore_batching.megatron.step.logits_function import checked_outputs

_OPERATION = "forward_only"

LEADING = {
    "get_data_iterator": (("rollout_data",), ("args", "model", "rollout_data")),
    "forward_only": (("f", "args", "model", "data_iterator", "num_microbatches"),),
    "get_batch": (("data_iterator", "keys"),),
}
"""Parameters that slime's and miles' functions begin with."""


class _PlaceholderLengths(list[int]):
    """Total lengths of a placeholder's samples, which go through ``get_batch`` as they are."""


class PlaceholderIterator:
    """The framework's own iterator, with a fabricated sample where a micro-batch has none.

    Args:
        own: made by the framework.
        schema: the kind of every field that will be asked for.
    """

    def __init__(self, own: Any, schema: Schema) -> None:
        self._own = own
        # Positions identify samples. Top-p tokens of an empty response are none, though otherwise
        # there may be several per token.
        self._schema = schema.declare("partition", Kind.METADATA).declare(
            "rollout_top_p_token_ids", Kind.PER_RESPONSE_TOKEN
        )
        self._checked: set[tuple[str, ...]] = set()

    def __getattr__(self, name: str) -> Any:
        """Attributes that the framework's iterator has beside."""
        return getattr(self._own, name)

    def reset(self) -> PlaceholderIterator:
        """Go back to the first micro-batch."""
        self._own.reset()
        return self

    def get_next(self, keys: Sequence[str]) -> dict[str, list[Any] | None]:
        """The next micro-batch: one value per sample, None for fields that the data lack.

        Raises:
            IndexError: all micro-batches have been drawn.
            SchemaError: a field is not declared. On every rank at its first micro-batch, not only
                on one that has a placeholder.
        """
        data = self._own.rollout_data
        present = tuple(key for key in keys if data.get(key) is not None)
        if self._own.micro_batch_indices[self._own.offset]:
            if present not in self._checked:
                make_placeholder(self._schema, present, data)
                self._checked.add(present)
            drawn: dict[str, list[Any] | None] = self._own.get_next(keys)
            return drawn
        self._own.offset += 1
        made: dict[str, Any] = dict.fromkeys(keys) | make_placeholder(self._schema, present, data)
        if "total_lengths" in present:
            made["total_lengths"] = _PlaceholderLengths(made["total_lengths"])
        if "loss_masks" in present:
            made["loss_masks"] = list(map(zero_count_mask, made["loss_masks"]))
        return made


def get_data_iterator(
    original: Callable[..., Any], *arguments: Any, schema: Schema, **keywords: Any
) -> Any:
    """The result of the framework's function, its iterators with placeholders.

    miles plans some data (of several modalities or adapters) in the trainer: those stay its own.

    Args:
        original: the framework's function.
        arguments: of `original`.
        schema: the kind of every field that will be asked for.
        keywords: of `original`.
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
    """The framework's forward pass, without what placeholders put out.

    A collective over all ranks where the rollout manager has planned. Where not (fixed
    micro-batches, miles' own plans), what is wrong is raised where it is found: slime's server runs
    each data-parallel rank by itself.

    Args:
        original: the framework's function.
        f: the function of the logits; gets ``total_lengths`` by keyword.
        args: the framework's arguments.
        model: this rank's model chunks.
        data_iterator: from `get_data_iterator`.
        num_microbatches: of each step.
        arguments: further ones of `original`.
        keywords: of `original`.

    Raises:
        CollationFailedError: on every rank, if on any the micro-batches do not hold each sample
            once (an `OrderError`), or ranks differ in ``num_microbatches``.
        ForwardFailedError: on every rank, if ``f`` raised on any, did not return one output per
            sample (an `OrderError`), or returned other names than elsewhere.
        PipelineFailedError: on every rank that can still be reached, if anything else raised.
    """

    def run(guarded: _Guarded) -> Any:
        return original(
            guarded, args, model, data_iterator, num_microbatches, *arguments, **keywords
        )

    planned = isinstance(data_iterator[0], PlaceholderIterator)
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
    """Refuse micro-batches by which outputs would be lost or doubled.

    Raises:
        OrderError: they do not hold each sample once, or another number of them is to be run.
    """
    micro_batches = iterator.micro_batch_indices
    samples = range(len(iterator.rollout_data["tokens"]))
    try:
        apply_order(samples, [sample for each in micro_batches for sample in each])
    except OrderError as error:
        raise OrderError(
            f"the rollout data's micro_batch_indices do not hold its {len(samples)} samples once "
            f"each: missing {list(error.missing)}, doubled {list(error.doubled)}, not there "
            f"{list(error.extra)}; the rollout manager must plan by build_dp_schedule"
        ) from error
    if sum(num_microbatches) != len(micro_batches):
        raise OrderError(
            f"num_microbatches is {list(num_microbatches)}, {sum(num_microbatches)} in all, and "
            f"micro_batch_indices has {len(micro_batches)}: pass on those of the rollout data"
        )


def _raise(exception: Exception) -> None:
    raise exception


class _Guarded:
    """The function of the logits, with empty lists for a placeholder and checked ones for others.

    Args:
        f: the function.
        failed: called with what it raised, or with what is wrong with its outputs.

    Attributes:
        names: of its outputs; None before its first call.
    """

    def __init__(self, f: Callable[..., Any], failed: Callable[[Exception], None]) -> None:
        functools.update_wrapper(self, f)
        self._f = f
        self._failed = failed
        self.names: set[str] | None = None

    def __call__(self, logits: Any, **keywords: Any) -> Any:
        """Outputs as Megatron's schedule takes them: alone, or behind a tensor."""
        lengths = keywords.get("total_lengths", ())
        is_placeholder = isinstance(lengths, _PlaceholderLengths)
        output, values = None, {}
        try:
            if "total_lengths" not in keywords:
                raise HookError(
                    "forward_only calls its function without the keyword total_lengths, by which "
                    "placeholders are told apart: this version of the framework is not known"
                )
            made = self._f(logits, **keywords)
            values = self._checked(made, len(lengths))
            output = made[0] if isinstance(made, tuple) else None
        except Exception as exception:
            self._failed(exception)
            # As many as the framework will look for, of whatever name.
            values = collections.defaultdict(lambda: [None] * (not is_placeholder) * len(lengths))
        if is_placeholder:
            for name in values:
                values[name] = []
        if "non_loss_data" in keywords:  # miles collects outputs, slime takes them for a loss
            return values
        return logits.new_zeros(0) if output is None else output, values

    def _checked(self, made: Any, num_samples: int) -> dict[str, list[Any]]:
        values = checked_outputs(made, num_samples)
        if self.names is None:
            self.names = set(values)
        if self.names != set(values):
            raise OrderError(
                f"the function given to forward_only returned {sorted(values)} for one "
                f"micro-batch and {sorted(self.names)} for another: return the same names for all"
            )
        return values
