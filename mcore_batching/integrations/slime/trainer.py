"""Placeholders for slime's and miles' own ``get_batch``, ``forward_only`` and losses.

Since slime's pull request 1926 and miles' 1927 the rollout manager plans, and a rank's rollout data
list the samples of each micro-batch. Older slime plans where it trains, each rank its own samples:
`planned_iterators`. Where a micro-batch lists none, `PlaceholderIterator` fabricates a sample of
one token with an empty response, which the framework packs and runs like any other: its loss is 0
and stays attached to the graph. ``forward_only`` drops its outputs.

Checked are, before a pass, that the model can run packed rows and that micro-batches hold each
sample once; after it, that there is one output per sample. Their order within a micro-batch cannot
be.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from mcore_batching.batch import (
    DEFAULT_SCHEMA,
    Kind,
    OrderError,
    Schema,
    SchemaError,
    apply_order,
    make_placeholder,
)
from mcore_batching.flags import LEARNT
from mcore_batching.integrations.dims import job_dims
from mcore_batching.integrations.local import check_model
from mcore_batching.integrations.replacements import HookError
from mcore_batching.integrations.slime.learning import shape_costs, trainers_costs
from mcore_batching.integrations.slime.rollout_manager import option_problems, row_multiple
from mcore_batching.megatron import compat, timing
from mcore_batching.megatron.errors import CollationFailedError, refuse
from mcore_batching.megatron.forward_only import checked_outputs
from mcore_batching.megatron.job import Job, job_of
from mcore_batching.megatron.plan import plan_rollout
from mcore_batching.megatron.samples import REQUIRED_FIELDS, Brought, read_rollout, read_samples
from mcore_batching.megatron.topology import model_chunks
from mcore_batching.planning.costs.cost import costs_of_stage
from mcore_batching.planning.learn import LearntCosts, TimedRow

_OPERATION = "forward_only"

# Others may be of the whole batch rather than of this rank's samples, or log-probs that are already
# cut for context parallelism.
_PLANNED = (
    *(*REQUIRED_FIELDS, "loss_masks"),
    *("multimodal_train_inputs", "position_ids", "dynamic_global_batch_size"),
)


def listed_iterators(
    schema: Schema, original: Callable[..., Any], rollout_data: dict[str, Any]
) -> list[PlaceholderIterator]:
    """The iterators of slime's ``get_data_iterator``, with placeholders."""
    # Mamba's state ends with each sample, which slime's and miles' rows do not mark.
    compat.end_states_with_samples()
    return [PlaceholderIterator(each, schema) for each in original(rollout_data)]


def miles_iterators(
    schema: Schema, original: Callable[..., Any], args: Any, model: Any, rollout_data: Any
) -> tuple[list[Any], list[int]]:
    """The iterators and counts of miles' ``get_data_iterator``, with placeholders where the rollout
    manager planned: there a collective over all ranks at the first call, and a
    `PlanningFailedError` on every rank if any rank's model cannot run packed rows."""
    compat.end_states_with_samples()
    # What miles plans in the trainer (several modalities or adapters) stays its own.
    is_planned = "micro_batch_indices" in rollout_data
    # slime's model is seen at forward_only.
    if is_planned and getattr(args, "use_dynamic_batch_size", False):
        check_model(model_chunks(model), job_of(args))
    iterators, counts = original(args, model, rollout_data)
    if is_planned:
        iterators = [PlaceholderIterator(each, schema) for each in iterators]
    return iterators, counts


def planned_iterators(
    schema: Schema,
    own: Callable[..., Any],
    original: Callable[..., Any],
    args: Any,
    model: Any,
    rollout_data: dict[str, Any],
) -> tuple[list[PlaceholderIterator], list[int]]:
    """Iterators over this rank's samples, packed under the cap, and each step's micro-batches.

    A collective over all ranks, which have the same number of micro-batches. ``own`` is the
    framework's class over the rollout data and such lists. Without ``use_dynamic_batch_size`` the
    framework plans itself. A `DynamicBatchArgumentError` for an option of the engine's own rows or
    training step.
    """
    if not getattr(args, "use_dynamic_batch_size", False):
        return original(args, model, rollout_data)  # type: ignore[no-any-return]
    problems = option_problems(args)
    if getattr(args, "dynamic_batch_exchange", False):
        problems.append("samples stay on their rank: unset dynamic_batch_exchange")
    if getattr(args, "dynamic_batch_cost_model", None) == LEARNT:
        problems.append(
            "no pass is timed here: set dynamic_batch_cost_model to fixed, or to a file"
        )
    refuse("the hooked batching", problems)
    compat.end_states_with_samples()
    # A copy, since the framework goes on with its own.
    planning_args = copy.copy(args)
    planning_args.dynamic_batch_share_prefixes = False
    planning_args.dynamic_batch_exchange = False
    planning_args.dynamic_batch_pad_total_to = row_multiple(args, job_dims())
    job = job_of(planning_args)
    samples, _ = read_samples(job, model, functools.partial(_planned, job, model, rollout_data))
    made = plan_rollout(samples)
    listed = [list(samples) for samples in made.micro_batches]
    iterators = [
        PlaceholderIterator(own(rollout_data, micro_batch_indices=listed), schema)
        for _ in range(made.dims.virtual_pipeline)
    ]
    return iterators, made.num_microbatches


def _planned(job: Job, model: Any, rollout_data: dict[str, Any]) -> Brought | None:
    """The samples, with fields that planning reads; one without tokens is refused."""
    planned = {key: rollout_data[key] for key in _PLANNED if rollout_data.get(key) is not None}
    for index, length in enumerate(planned.get("total_lengths", ())):
        if length < 1:
            # slime pads a mask by the length of the prompt minus 1.
            raise SchemaError(
                "total_lengths", sample_index=index, expected="at least one token", found="0"
            )
    return read_rollout(job, model, DEFAULT_SCHEMA, planned)


class PlaceholderLengths(list[int]):
    """Total lengths of a placeholder; ``get_batch`` passes the object on, so it is recognized."""


class PlaceholderIterator:
    """An iterator over rollout data, with a fabricated sample where a micro-batch has none.

    All other attributes are those of ``own``, the iterator inside.
    """

    def __init__(self, own: Any, schema: Schema) -> None:
        self.own = own
        # `partition` holds positions of samples, so identifiers. Top-p tokens are metadata (several
        # per token) but must be an empty tensor for an empty response, not None.
        self._schema = schema.declare("partition", Kind.METADATA).declare(
            "rollout_top_p_token_ids", Kind.PER_RESPONSE_TOKEN
        )
        self._micro_batches = own.micro_batch_indices
        self._checked: set[tuple[str, ...]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def reset(self) -> PlaceholderIterator:
        """Go back to the first micro-batch."""
        self.own.reset()
        return self

    def get_next(self, keys: Sequence[str]) -> dict[str, list[Any] | None]:
        """The next micro-batch: one value per sample, None for fields that the data lack.

        A `SchemaError` on every rank, at the first micro-batch, if a field is not declared, or does
        not have one value per sample.
        """
        if self.own.offset >= len(self._micro_batches):
            count = len(self._micro_batches)
            raise IndexError(f"all {count} micro-batches have been drawn: call reset() first")
        # Read anew each time: log-probs and advantages are added between the passes, and are there
        # without a collective.
        data = self.own.rollout_data
        present = tuple(key for key in keys if data.get(key) is not None)
        has_samples = bool(self._micro_batches[self.own.offset])
        # A placeholder is made once on every rank, needed or not: otherwise an undeclared field
        # would raise only on the rank that has a placeholder, and leave the others waiting.
        fabricated = {}
        if not has_samples or present not in self._checked:
            fabricated = self._fabricated(present)
            self._checked.add(present)
        if has_samples:
            drawn: dict[str, list[Any] | None] = self.own.get_next(keys)
            return drawn
        self.own.offset += 1
        return dict.fromkeys(keys) | fabricated

    def _fabricated(self, keys: Sequence[str]) -> dict[str, list[Any]]:
        data = self.own.rollout_data
        count = len(data["tokens"])
        for key in keys:
            if len(data[key]) != count:
                raise SchemaError(
                    key,
                    expected=f"{count} values, one for each sample of the rank",
                    found=f"{len(data[key])}",
                )
        made = make_placeholder(self._schema, keys, data)
        if not count:  # no sample shows where values are
            device = torch.device(torch.cuda.current_device())
            for values in made.values():
                values[:] = [
                    each.to(device, non_blocking=True) if isinstance(each, Tensor) else each
                    for each in values
                ]
        # Two marks: forward_only finds a placeholder by its lengths, a loss's mask counts none.
        if "total_lengths" in made:
            made["total_lengths"] = PlaceholderLengths(made["total_lengths"])
        if "loss_masks" in made:
            made["loss_masks"] = list(map(zero_count_mask, made["loss_masks"]))
        return made


_SUMS = (Tensor.sum, torch.sum)
_CLAMPS = (torch.clamp_min, torch.clamp, Tensor.clamp_min, Tensor.clamp)
_DIVISIONS = (Tensor.div, Tensor.true_divide, torch.div, torch.true_divide)


def zero_count_mask(mask: Tensor) -> Tensor:
    """The ``[0]`` mask of an empty response, with a sum that stays 0 when clamped to 1.

    Frameworks' loss functions clamp a sample's token count to 1, against a division by 0, and then
    sum these counts for a token mean. The clamp would count a placeholder as one token; its mask
    adds 0:

        mask = zero_count_mask(torch.zeros(0, dtype=torch.int32))
        count = torch.clamp_min(mask.sum(), 1)
        0 + count         # 0: a placeholder adds nothing to a sum of counts
        numerator / count # the numerator, as if the count were 1

    All other operations on the mask and its sum behave as on a plain empty mask.
    """
    if mask.numel():
        raise SchemaError(
            "loss_masks",
            expected="the empty mask of a placeholder",
            found=f"one of shape {list(mask.shape)}",
        )
    return mask.as_subclass(_ZeroCount)


class _ZeroCount(Tensor):
    """An empty mask, or its sum: a 0 that a clamp leaves unchanged, and that divides like 1."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # A mask has one dimension, its sum none.
        with torch._C.DisableTorchFunctionSubclass():
            if func in _CLAMPS and isinstance(args[0], cls) and not args[0].dim():
                return args[0]
            if func in _DIVISIONS and isinstance(args[1], cls) and not args[1].dim():
                args = (args[0], 1)
            result = func(*args, **(kwargs or {}))
        # Of the sum a further sum is plain: it is what other samples' counts were added to.
        is_sum = func in _SUMS and isinstance(args[0], cls) and args[0].dim() and not result.dim()
        return result.as_subclass(cls) if is_sum else result


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

    A collective over all ranks if the rollout manager planned; otherwise errors are raised on their
    own rank.

    Raises:
        PlanningFailedError: on every rank, if any rank's model cannot run packed rows.
        CollationFailedError: on every rank, if any rank's micro-batches do not hold each sample
            once (an `OrderError`), or ranks differ in ``num_microbatches``.
        ForwardFailedError: on every rank, if on any ``f`` raised, did not return one output per
            sample (an `OrderError`), or returned different names.
        PipelineFailedError: on every rank that can still be reached, if anything else raised.
    """
    given = (args, model, data_iterator, num_microbatches, *arguments)
    planned = isinstance(data_iterator[0], PlaceholderIterator)
    # slime's log-prob server runs data-parallel ranks separately: a collective would hang there.
    if not (planned and getattr(args, "use_dynamic_batch_size", False)):
        return original(_Guarded(f, None), *given, **keywords)
    job = job_of(args)
    check_model(model_chunks(model), job)
    # The framework restores the order of outputs by these places, without checking their number.
    with job.consensus.agreement(
        _OPERATION, failure=CollationFailedError, mismatch=CollationFailedError
    ) as agree:
        _check_plan(data_iterator[0], num_microbatches)
        agree.same("num_microbatches", list(num_microbatches))
    failed: list[Exception] = []
    # The pipeline has to run dry before all ranks can raise it.
    guarded = _Guarded(f, functools.partial(job.defer, failed))
    with job.watch.reporting(_OPERATION):
        made = original(guarded, *given, **keywords)
    with job.agreement_after_pipeline(_OPERATION, failed) as agree:
        if guarded.names is not None:  # none on other stages than the last
            agree.same("names that f returned", sorted(guarded.names))
    return made


def _check_plan(iterator: PlaceholderIterator, num_microbatches: Sequence[int]) -> None:
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


class _Guarded:
    """The function of the logits, with checked outputs, and empty ones for a placeholder."""

    def __init__(self, f: Callable[..., Any], failed: Callable[[Exception], None] | None) -> None:
        functools.update_wrapper(self, f)
        self._f = f
        # Called with what f or the check raises; None: each rank runs by itself, so it is raised.
        self._failed = failed
        self.names: set[str] | None = None  # of its outputs, since its first call

    def __call__(self, logits: Any, **keywords: Any) -> Any:
        """Outputs as Megatron's schedule takes them: a dict, or a tensor and a dict."""
        lengths = keywords.get("total_lengths", ())
        is_placeholder = isinstance(lengths, PlaceholderLengths)
        output, values = None, {}
        try:
            if "total_lengths" not in keywords:
                raise HookError(
                    "forward_only passes its function no total_lengths: use another version"
                )
            # Of a placeholder, too: f may be a collective of the ranks that share the row.
            made = self._f(logits, **keywords)
            values = self._checked(made, len(lengths))
            output = made[0] if isinstance(made, tuple) else None
        except Exception as exception:
            if self._failed is None:
                raise
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


class PassTimes:
    """Forward passes of training on this rank, timed by row, from which the manager's costs are
    learnt."""

    def __init__(self, args: Any) -> None:
        self._args = args
        self._shape = shape_costs(args)
        self._iterator: Any = None  # of the rollout that is being trained
        self._seconds: dict[int, list[tuple[Any, Any]]] = {}  # marks of each of its micro-batches
        self._is_warm = False

    def forward_step(
        self,
        original: Callable[..., Any],
        forward_step_func: Any,
        data_iterator: Any,
        *given: Any,
        **named: Any,
    ) -> Any:
        """Megatron's own, timed where it trains a row of the manager's plan."""
        is_planned = isinstance(data_iterator, PlaceholderIterator)
        if not (is_planned and torch.is_grad_enabled()):  # no log-probs: faster, without a graph
            return original(forward_step_func, data_iterator, *given, **named)
        if self._iterator is None or self._iterator.rollout_data is not data_iterator.rollout_data:
            self._send()
            self._iterator = data_iterator
        slot, before = data_iterator.offset, timing.mark()
        made = original(forward_step_func, data_iterator, *given, **named)
        self._seconds.setdefault(slot, []).append((before, timing.mark()))
        return made

    def _send(self) -> None:
        """Send what the last rollout's passes teach; all but the first, which compiles kernels."""
        timed, self._seconds = self._seconds, {}
        marks = [mark for of_row in timed.values() for pair in of_row for mark in pair]
        if not self._is_warm or not all(mark.query() for mark in marks):
            self._is_warm |= bool(timed)
            return
        lengths = self._iterator.rollout_data["total_lengths"]
        # What is fitted is a row's forward and backward pass together.
        both, rows = 1.0 + self._shape.backward_ratio, []
        for slot, of_row in timed.items():
            samples = tuple(lengths[i] for i in self._iterator.micro_batch_indices[slot])
            took = sum(itertools.starmap(timing.seconds_between, of_row))
            rows.append(TimedRow(samples, both * took))
        stage = parallel_state.get_pipeline_model_parallel_rank()
        of_stage = costs_of_stage(self._shape, job_dims(), stage)
        learnt = LearntCosts(shape=self._shape, cost_model=self._shape)
        trainers_costs(self._shape).add.remote(learnt.evidence(rows, of_stage))
