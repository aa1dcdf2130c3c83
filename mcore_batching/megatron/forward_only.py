"""`forward_only`: log-probs and the like for all samples, in the order they came in.

Every real sample of the rank has exactly one output, at its own index; too few or too many are an
error, never a `None`. A placeholder's is dropped. A rank without samples returns empty lists.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.utils import get_model_config
from torch import Tensor

from mcore_batching.batch import OrderError, PackedMicroBatch, restore_order
from mcore_batching.batch.values import count_of, describe
from mcore_batching.megatron import compat
from mcore_batching.megatron.errors import CollationFailedError
from mcore_batching.megatron.exchange import copied_output
from mcore_batching.megatron.iterator import DataIterator, rollout_of
from mcore_batching.megatron.job import Job, job_of
from mcore_batching.megatron.loss_shares import same_names
from mcore_batching.megatron.plan import plan_forward_passes, planned
from mcore_batching.megatron.prepare import PreparedStep, collated, collating
from mcore_batching.megatron.run_pipeline import run_for_losses, run_pipeline
from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.megatron.topology import is_last_stage, model_chunks
from mcore_batching.planning import sample_multiple_tokens

Outputs = dict[str, list[Tensor]]
"""By name one value for each of a row's real samples."""
OutputsOf = Callable[[Tensor, PackedMicroBatch], Outputs]


def logits_function(f: Callable[..., Any], args: Any, schedule: MicroBatchSchedule) -> OutputsOf:
    """A user's function of the logits, called with what it takes; what it returns is checked.

    Raises:
        TypeError: it is no function.
        ValueError: it takes no ``micro_batch``, and so expects the samples' tokens one behind the
            other, padded to twice the context-parallel size at most (slime's layout), which rows of
            this schedule do not have.
    """
    if not callable(f):
        raise TypeError(f"f must be a function of the logits, got {type(f).__name__}")
    takes = inspect.signature(f).parameters
    # slime's functions take `**kwargs` or a choice of these names.
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())
    drops_padding = False
    if "micro_batch" not in takes:
        size, fault, mend = schedule.dims.context_parallel, "", ""
        padded_to = sample_multiple_tokens(schedule.dims, schedule.config)
        # A row that is not cut can have its padding taken out.
        drops_padding = size == 1 and padded_to > 1
        if schedule.has_sizes_of_rows:
            fault, mend = "rows are cut in other ways", "unset --dynamic-batch-context-parallel"
        elif schedule.forest is not None:
            fault, mend = "samples share tokens", "unset --dynamic-batch-share-prefixes"
        elif size > 1 and padded_to != 2 * size:
            fault = f"samples are padded to {padded_to}, not {2 * size}"
            mend = "turn off sequence parallelism and --dynamic-batch-pad-each-to"
        if fault:
            raise ValueError(
                f"{getattr(f, '__name__', f)} does not take micro_batch, but {fault}; let it take "
                f"micro_batch (gather_response and response_log_probs do), or {mend}"
            )

    def outputs_of(logits: Tensor, row: PackedMicroBatch) -> Outputs:
        # By slime's names: its functions run here unchanged.
        offered = {
            "args": args,
            "unconcat_tokens": row.fields["tokens"],
            "total_lengths": row.total_lengths,
            "response_lengths": row.response_lengths,
            "with_entropy": getattr(args, "use_rollout_entropy", False),
            "micro_batch": row,
        }
        given = {name: value for name, value in offered.items() if takes_all or name in takes}
        if drops_padding:
            held = zip(row.host_cu_seqlens_padded, row.total_lengths, strict=False)
            # Not by a mask: the host would wait for the device to count.
            logits = torch.cat([logits[:, start : start + length] for start, length in held], dim=1)
        outputs = f(logits, **given)
        return {
            # None of a placeholder's: its one sample is fabricated.
            key: [copied_output(key, value) for value in values[: row.num_samples]]
            for key, values in checked_outputs(outputs, len(row.total_lengths)).items()
        }

    return outputs_of


def checked_outputs(made: Any, num_samples: int) -> dict[str, list[Tensor]]:
    """The outputs of ``f``: one per sample of a micro-batch, a placeholder's included."""
    # slime's functions return a pair: a tensor in place of a loss, then the outputs.
    outputs = made[1] if isinstance(made, tuple) and len(made) == 2 else made
    if not isinstance(outputs, Mapping):
        kind = type(outputs).__name__
        raise OrderError(f"f must return a dict of lists, or a pair that ends in one, got {kind}")
    for key, values in outputs.items():
        if not isinstance(key, str):
            raise OrderError(f"f returned the key {key!r}; name outputs by texts")
        count = count_of(values)
        if count != num_samples or any(value is None for value in values):
            found = describe(values) if count is None else f"{count} values"
            if count == num_samples:
                found += ", some of them None,"
            raise OrderError(
                f"f returned {found} for {key!r} in a micro-batch of {num_samples} samples; return "
                "one tensor for each, a placeholder's included"
            )
    return {key: list(values) for key, values in outputs.items()}


_OPERATION = "forward_only"


@torch.no_grad()
def forward_only(
    f: Callable[..., Any],
    args: Any,
    model: list[Any],
    data_iterator: Sequence[DataIterator],
    num_microbatches: Sequence[int],
    store_prefix: str = "",
) -> dict[str, list[Tensor]]:
    """Run all micro-batches forward and collect what ``f`` makes of the logits.

    A collective over all ranks. The model is in evaluation mode meanwhile.

    Args:
        f: called on the last stage as ``f(logits, args=, unconcat_tokens=, total_lengths=,
            response_lengths=, with_entropy=, micro_batch=)``, with logits as in `train_step`, made
            only where something else than `response_log_probs` and its siblings reads them, and a
            `PackedMicroBatch`; keywords that it does not take are left out. Returns a dict of lists
            with one tensor per sample of the micro-batch (one for a placeholder, which is dropped),
            or a pair that ends in one; the same names for every micro-batch on every rank.
        args: Megatron's arguments.
        model: this rank's model chunks.
        data_iterator: from `get_data_iterator`.
        num_microbatches: likewise; not read where forward passes have a plan of their own.
        store_prefix: put before every key of the result.

    Returns:
        on the last stage, for each key of ``f`` one tensor per sample of this rank, in the order of
        the rollout data, each in memory of its own and without a gradient; ``{}`` on other stages.

    Raises:
        CollationFailedError: on every rank, if arguments or samples could not be read on any, or
            ``f`` goes by the samples' lengths, as slime's functions do, where rows do not lie so:
            padded samples, dynamic CP, shared prefixes.
        ForwardFailedError: on every rank, if ``f`` raised on any, did not return one output per
            sample (an `OrderError`), or returned other names than elsewhere.
        PipelineFailedError: on every rank that can be reached, if the model raised on any, or
            exchanged outputs did not fit into memory.
    """
    job = job_of(args)
    with job.agreement(_OPERATION, failure=CollationFailedError) as agree:
        chunks = model_chunks(model)
        get_model_config(chunks[0])  # raises for what is no model of Megatron's
        rollout = rollout_of(data_iterator)
        function = logits_function(f, args, rollout)
        agree.same("plan (sha256)", rollout.plan_digest)
        # Ranks that differ in this would wait in different planning agreements.
        agree.same("plan of its own", job.options.has_own_forward_cap)
    schedule = plan_forward_passes(rollout, job, chunks)
    outputs: list[Outputs] = []
    names: list[str] = []
    with _evaluation_mode(chunks):
        for step in range(schedule.num_steps):
            planned(schedule, step)
            with collating(job, _OPERATION) as agree:
                if schedule is rollout:
                    schedule.check_step(step, num_microbatches)
                prepared = collated(agree, job, chunks, schedule, step, forward_only=True)
            made, failed, temperatures = _run(function, job, chunks, prepared)
            outputs += made
            # After each step, of all outputs so far: a name that comes late is an error, too.
            with job.agreement_after_pipeline(_OPERATION, failed) as agree:
                names = same_names("f", outputs, OrderError)
                if outputs:  # stages without logits have no names to compare
                    agree.same("names that f returned", sorted(names))
                agree.same("temperature", sorted(temperatures), within="stage")
    if not is_last_stage():
        return {}
    # Ends in a collective: what one rank raises here, as out of memory, leaves the others waiting.
    with job.watch.reporting(f"{_OPERATION}, returning outputs"):
        ran, found = [i for row in schedule.micro_batches for i in row], {}
        for name in names:
            values = [value for each in outputs for value in each[name]]
            found[name] = restore_order(values, ran, len(schedule.own_lengths))
        found = schedule.moves.returned(found)
    return {f"{store_prefix}{name}": values for name, values in found.items()}


@contextlib.contextmanager
def _evaluation_mode(chunks: list[Any]) -> Iterator[None]:
    """No dropout, and none of Megatron's timers, which expect a training step."""
    config = get_model_config(chunks[0])
    # Module by module: a caller may keep some, such as a frozen encoder, in evaluation mode.
    modes = [(module, module.training) for chunk in chunks for module in chunk.modules()]
    for chunk in chunks:
        chunk.eval()
    try:
        with compat.replaced(config, "timers", None):
            yield
    finally:
        for module, training in modes:
            module.training = training


def _run(
    function: OutputsOf, job: Job, chunks: list[Any], prepared: PreparedStep
) -> tuple[list[Outputs], list[Exception], Collection[float]]:
    """Outputs of ``f`` on the last stage, in slot order; what it raised; temperatures it used."""
    failed: list[Exception] = []

    def forward_step(
        rows: Iterator[PackedMicroBatch], chunk: Any, *unused: Any
    ) -> tuple[Tensor, Callable[..., Any]]:
        row = next(rows)
        of_chunk, logits_of = run_for_losses(job, chunk, row, fused=True)

        # Megatron names the second argument where it collects something else than losses.
        def collect(output: Tensor, non_loss_data: bool = True) -> Outputs:
            try:
                return function(logits_of(output), row)
            except Exception as exception:
                # The pipeline has to run dry before all ranks can raise it.
                job.defer(failed, exception, row)
                return {}

        return of_chunk, collect

    made, temperatures = run_pipeline(
        job,
        chunks,
        prepared,
        _OPERATION,
        forward_step,
        forward_only=True,
        collect_non_loss_data=True,
    )
    return made, failed, temperatures
