"""The seam with stock training loops: Megatron's forward-backward function, re-packed.

`wrap_schedule` takes what ``get_forward_backward_func`` returned. The wrapper draws the ordinary
micro-batches from the stock iterators, plans their unpadded samples together with all other ranks,
and runs Megatron's own schedule over packed rows, in a number of its own. The loop outside never
learns of it: ``num_microbatches_calculator``, consumed samples, learning rate and checkpoints count
what they always did, and the rerun state machine replays the same draws.

Guarantees
- Without ``--use-dynamic-batch-size`` the function is handed back as it is.
- Losses come back one dict a packed micro-batch; their two-element entries (sum, tokens) add up to
  what the ordinary micro-batches give, with 0 and 0 from a placeholder.
- What cannot be right is an error on every rank: a loss that is a mean, a forward pass on one rank
  alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcore_batching.integrations.megatron_lm.arguments import is_on
from mcore_batching.integrations.megatron_lm.batch_fields import PackedRows
from mcore_batching.integrations.megatron_lm.samples import STOCK_SCHEMA, draw, rollout_data
from mcore_batching.integrations.megatron_lm.script import use_packed_batches
from mcore_batching.integrations.megatron_lm.step_log import note_step
from mcore_batching.megatron import compat
from mcore_batching.megatron.chunk_forward import padding_mask
from mcore_batching.megatron.consensus import agree_after_pipeline
from mcore_batching.megatron.data_iterator import plan_micro_batches, schedule_of
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.prepared_step import prepare
from mcore_batching.megatron.recording import recorded
from mcore_batching.megatron.topology import model_chunks

ForwardBackward = Callable[..., Any]


def wrap_schedule(forward_backward_func: ForwardBackward) -> ForwardBackward:
    """Megatron's forward-backward function over packed micro-batches.

    Args:
        forward_backward_func: what ``get_forward_backward_func`` returned.

    Returns:
        a function of the same keywords; the argument itself without ``--use-dynamic-batch-size``.
    """
    from megatron.training import get_args

    args = get_args()
    return (
        PackedForwardBackward(forward_backward_func, args)
        if is_on(args)
        else (forward_backward_func)
    )


class PackedForwardBackward:
    """Runs a schedule over re-packed micro-batches.

    Args:
        schedule: Megatron's own forward-backward function.
        args: Megatron's arguments.
    """

    def __init__(self, schedule: ForwardBackward, args: Any) -> None:
        self._schedule = schedule
        self._args = args

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        micro_batch_size: int,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        adjust_tensor_shapes_fn: Any = None,
        **others: Any,
    ) -> Any:
        """Draw, plan, run: see the module.

        Args:
            forward_step_func: the script's forward step; its ``get_batch`` gets packed rows.
            data_iterator: this rank's stock iterator (a list of them with model chunks), or None.
            model: this rank's model chunk or chunks.
            num_microbatches: how many ordinary micro-batches to draw.
            micro_batch_size: samples of each, not used: the batches tell.
            forward_only: whether this is an evaluation.
            collect_non_loss_data: must be False.
            adjust_tensor_shapes_fn: must be None.
            others: handed on.

        Returns:
            on the last stage, the loss function's report of every packed micro-batch.

        Raises:
            DynamicBatchArgumentError: something is asked for that packed rows do not have.
            CollectiveError: on every rank, if reading, planning or the loss function failed on any.
        """
        del micro_batch_size
        if collect_non_loss_data:
            raise DynamicBatchArgumentError(
                "process_non_loss_data_func runs forward passes on the last rank alone, where "
                "planning with all ranks would hang: drop it, or --use-dynamic-batch-size"
            )
        if adjust_tensor_shapes_fn is not None:
            raise DynamicBatchArgumentError(
                "a function that adjusts tensor shapes (distillation) expects rows of seq_length: "
                "unset it, or --use-dynamic-batch-size"
            )
        use_packed_batches(forward_step_func)
        chunks = model_chunks(model)
        started = time.monotonic()
        iterators, _ = plan_micro_batches(
            self._args,
            chunks,
            lambda: self._read(data_iterator, num_microbatches),
            schema=STOCK_SCHEMA,
        )
        schedule = schedule_of(iterators)
        operation = "evaluation" if forward_only else "training"
        prepared = prepare(self._args, operation, 0, lambda: schedule)
        count = len(prepared.rows)
        rows = [
            # One model chunk of a rank counts for all: each of them runs every row.
            PackedRows(stage, counts_flops=number == 0 and not forward_only)
            for number, stage in enumerate(prepared.iterators(len(chunks)))
        ]
        planned = time.monotonic()
        failed: list[Exception] = []
        training = contextlib.nullcontext() if forward_only else recorded(self._args, schedule, 0)
        with training:
            losses = self._schedule(
                forward_step_func=_guarded(forward_step_func, failed),
                data_iterator=rows if isinstance(model, list) and len(rows) > 1 else rows[0],
                model=model,
                num_microbatches=count,
                micro_batch_size=1,
                forward_only=forward_only,
                **others,
            )
        agree_after_pipeline(self._args, operation, failed)
        if not forward_only:
            compat.scale_moe_metrics(num_microbatches / count)
            torch.cuda.synchronize()
            note_step(
                *schedule.step_plan(0),
                plan_seconds=planned - started,
                run_seconds=time.monotonic() - planned,
            )
        return losses

    def _read(self, data_iterator: Any, num_microbatches: int) -> dict[str, Any] | None:
        batches = draw(data_iterator, num_microbatches)
        if batches is None:
            return None
        data = rollout_data(
            batches, split_documents=getattr(self._args, "reset_attention_mask", False)
        )
        # One step of all samples, whatever --global-batch-size says of them.
        return data | {"dynamic_global_batch_size": None}


def _guarded(
    forward_step_func: Callable[..., Any], failed: list[Exception]
) -> Callable[..., tuple[Tensor, Callable[..., Any]]]:
    """The forward step, with errors of its loss function put off until all ranks can hear of them.

    Args:
        forward_step_func: the script's.
        failed: where exceptions go.
    """

    def forward_step(data_iterator: PackedRows, chunk: Any, *rest: Any, **options: Any) -> Any:
        with _padding_known_to_router(data_iterator, chunk):
            output, loss_function = forward_step_func(data_iterator, chunk, *rest, **options)

        def loss(output_tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
            try:
                result = loss_function(output_tensor, *arguments, **keywords)
                _check_loss(result)
            except Exception as exception:
                failed.append(exception)
                zero = output_tensor.float().sum() * 0.0
                return zero, torch.zeros((), dtype=torch.int, device=zero.device), {}
            return result

        return output, loss

    return forward_step


def _check_loss(result: Any) -> None:
    """Refuse a loss that is a mean over its micro-batch.

    Raises:
        DynamicBatchArgumentError: it is no ``(sum, number of tokens, report)``, or a report's
            entry is no ``[sum, number]``.
    """
    if not isinstance(result, tuple) or len(result) != 3:
        raise DynamicBatchArgumentError(
            "the loss function must return (sum over tokens, number of tokens, report), so that "
            f"packing does not change its mean; it returned {_described(result)}"
        )
    single = [
        key for key, value in result[2].items() if torch.is_tensor(value) and value.numel() != 2
    ]
    if single:
        raise DynamicBatchArgumentError(
            f"the loss function's report must give {', '.join(single)} as [sum, number of tokens]: "
            "a lone value is averaged over micro-batches, however full"
        )


def _described(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__


class _padding_known_to_router:  # noqa: N801 (a context manager, used like a function)
    """While a mixture-of-experts model runs, its forward pass is told which tokens are padding.

    Stock scripts do not pass ``padding_mask``, and padding would be routed and counted. What 0.19's
    own script says of padded samples' length is taken back: its layers would cut rows there.
    """

    def __init__(self, data_iterator: PackedRows, chunk: Any) -> None:
        self._data_iterator = data_iterator
        self._chunk = chunk
        self._handle: Any = None

    def __enter__(self) -> None:
        module = self._chunk
        while hasattr(module, "module"):
            module = module.module
        if not getattr(module.config, "num_moe_experts", None):
            return

        def add(module: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
            del module
            row = self._data_iterator.current
            mask = padding_mask(self._chunk, row) if row is not None else None
            compat.forget_padded_length(keywords.get("packed_seq_params"))
            return arguments, {"padding_mask": mask} | keywords

        self._handle = module.register_forward_pre_hook(add, with_kwargs=True)

    def __exit__(self, *exception: object) -> None:
        if self._handle is not None:
            self._handle.remove()
