"""Log-probabilities and entropies of response tokens, from a model's logits.

With a vocabulary of 150k the logits of a row are by far its largest tensor, and every float32 copy
of them is another 10 GB at 16k tokens. So nothing here has the shape of all logits: rows are cast
to float32 a chunk at a time, and only those that predict a response token; the backward pass
computes the softmax again, and writes the gradient over the logits, which nobody reads by then.
With ``--dynamic-batch-logits-in-model-dtype`` the logits themselves take half as much, with
``--dynamic-batch-fuse-output-layer`` (`fused_output`) they are never made.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, cast

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mcore_batching.batch import BatchError, PackedMicroBatch
from mcore_batching.batch.fields.value_shapes import describe, shape_of
from mcore_batching.batch.rows.context_parallel import gather_own_values
from mcore_batching.megatron.job.row_groups import context_parallel_group
from mcore_batching.megatron.logits.fused_output import FusedLogits, Logits
from mcore_batching.megatron.logits.token_statistics import (
    Options,
    StatisticsOfLogits,
    StatisticsOfProduct,
)
from mcore_batching.planning.plans.memory import LOG_PROB_CHUNK_TOKENS

# Context variables, not arguments: losses call these functions, and are the user's.
_chunk_tokens = contextvars.ContextVar("chunk_tokens", default=LOG_PROB_CHUNK_TOKENS)
_temperatures: contextvars.ContextVar[set[float] | None] = contextvars.ContextVar(
    "temperatures", default=None
)


@contextlib.contextmanager
def chunks_of_tokens(tokens: int) -> Iterator[set[float]]:
    """Let this be the default for ``chunk_tokens`` in a block; yields temperatures asked for."""
    # Tensor-parallel ranks have to agree on them: each divides its own part of the vocabulary.
    temperatures: set[float] = set()
    chunk, asked = _chunk_tokens.set(tokens), _temperatures.set(temperatures)
    try:
        yield temperatures
    finally:
        _chunk_tokens.reset(chunk)
        _temperatures.reset(asked)


_model_shape: contextvars.ContextVar[torch.Size | None] = contextvars.ContextVar(
    "model_shape", default=None
)


@contextlib.contextmanager
def logits_of_shape(logits: Logits) -> Iterator[None]:
    """Refuse logits of another vocabulary than these inside a ``with`` block."""
    shape = logits.shape if isinstance(logits, Tensor) else None
    token = _model_shape.set(shape)
    try:
        yield
    finally:
        _model_shape.reset(token)


def response_log_probs(
    logits: Logits,
    row: PackedMicroBatch,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    overwrite_logits: bool = True,
) -> list[Tensor]:
    """Log-probability of every response token, whole responses on every rank; differentiable.

    Args:
        logits: ``[1, local tokens, local vocabulary]`` of any floating-point type, as the model's
            last chunk returns them; or `FusedLogits`.
        row: the micro-batch that they were computed from.
        temperature: divides the logits.
        chunk_tokens: tokens of which float32 copies are held at a time; None: what
            ``--dynamic-batch-log-prob-chunk-tokens`` says in `train_step` and `forward_only`, 512
            elsewhere.
        overwrite_logits: write the gradient over the logits in the backward pass. False if another
            function's backward pass reads the same logits, or anybody does later.

    Returns:
        float32 ``[response_length]`` for each sample of the row. A token without a predecessor
        (the response is the whole sample) has log-probability 0 and no gradient.

    Raises:
        BatchError: the logits' shape is not that of the row.
        ValueError: ``temperature`` is not positive, or ``chunk_tokens`` less than 1.
    """
    options = _options(temperature, chunk_tokens, with_entropy=False)
    found = _gathered(logits, row, options, overwrite_logits)
    return [values[:, 0] for values in found]


def response_log_probs_and_entropy(
    logits: Logits,
    row: PackedMicroBatch,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    overwrite_logits: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probability of every response token, and entropy of what it was drawn from, in one pass.

    Args: those of `response_log_probs`.

    Returns:
        two lists of float32 ``[response_length]``, both differentiable; the entropies in nats, of
        the distribution at ``temperature``, 0 for tokens without a predecessor.

    Raises: as `response_log_probs`.
    """
    options = _options(temperature, chunk_tokens, with_entropy=True)
    found = _gathered(logits, row, options, overwrite_logits)
    return [values[:, 0] for values in found], [values[:, 1] for values in found]


def log_probs_of_all(logits: FusedLogits, labels: Tensor) -> Tensor:
    """Log-probability of each of the labels ``[1, local tokens]``, float32 of their shape."""
    whole = logits.whole_hidden()
    positions = torch.arange(len(whole), device=whole.device)
    options = Options(1.0, _chunk_tokens.get(), with_entropy=False)
    product = cast(Any, StatisticsOfProduct)
    values: Tensor = product.apply(whole, logits.weight, positions, labels[0], options)
    return values[:, 0][None]


def _options(temperature: float, chunk_tokens: int | None, *, with_entropy: bool) -> Options:
    tokens = _chunk_tokens.get() if chunk_tokens is None else chunk_tokens
    options, asked = Options(temperature, tokens, with_entropy), _temperatures.get()
    if asked is not None:
        asked.add(float(temperature))
    return options


_readers: Any = WeakTensorKeyDictionary()  # its methods have no types
"""Logits to one entry for each differentiable call on them."""


def _gathered(
    logits: Logits, row: PackedMicroBatch, options: Options, overwrite_logits: bool
) -> list[Tensor]:
    """``[response_length, 1 or 2]`` for each sample: log-probability, and entropy if asked for."""
    whole = logits.whole_hidden()[None] if isinstance(logits, FusedLogits) else logits
    expected = row.labels.shape[1]
    shape = shape_of(whole) if isinstance(whole, Tensor) else None
    if shape is None or len(shape) != 3 or shape[:2] != (1, expected) or not shape[2]:
        raise BatchError(
            f"expected logits of shape [1, {expected}, vocabulary], got "
            f"{describe(logits) if shape is None else list(shape)}"
        )
    # Logits that a loss gathered or cut have the wrong part of the vocabulary on each rank.
    model, tp = _model_shape.get(), parallel_state.get_tensor_model_parallel_world_size()
    if model is not None and tp > 1 and whole is logits and shape[2] != model[2]:
        raise BatchError(
            f"expected logits of this tensor-parallel rank's {model[2]} entries of the vocabulary, "
            f"got {shape[2]}: do not gather or cut them"
        )
    # Only the response tokens that this context-parallel rank holds; the others' values come in
    # `gather_own_values`.
    positions = row.responses.owned_positions.to(whole.device)
    targets = row.labels[0].index_select(0, positions)
    if isinstance(logits, FusedLogits):
        product = cast(Any, StatisticsOfProduct)
        values = product.apply(whole[0], logits.weight, positions, targets, options)
    else:
        # One entry for each call: two of them must not both write over the logits.
        readers: list[None] | None = None
        if overwrite_logits and logits.requires_grad and torch.is_grad_enabled():
            readers = _readers.setdefault(logits, [])
            readers.append(None)
        values = cast(Any, StatisticsOfLogits).apply(logits, positions, targets, options, readers)
    return gather_own_values(values, row, group=context_parallel_group(row))
