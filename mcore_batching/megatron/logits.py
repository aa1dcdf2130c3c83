"""The logits of a row as losses get them: a tensor, or the factors of the last layer's product.

With a vocabulary of 150k the logits of a row are by far its largest tensor. `FusedLogits` takes
their place in forward passes alone, and under ``--dynamic-batch-fuse-output-layer`` in training: it
has memory only where something else than log-probs reads it.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor
from torch.utils._pytree import tree_map

from mcore_batching.megatron import compat


@dataclasses.dataclass
class UseOfLogits:
    """Uses of a pipeline's logits by its losses, or by the functions of `forward_only`."""

    temperatures: set[float] = dataclasses.field(default_factory=set)  # by which they divided them
    vocabulary: int | None = None  # of this rank, once the model has returned some


# A context variable, not an argument: losses call what computes log-probs, and are the user's.
_use: contextvars.ContextVar[UseOfLogits | None] = contextvars.ContextVar("_use", default=None)


@contextlib.contextmanager
def noting_use() -> Iterator[UseOfLogits]:
    """Yield the use of logits inside a ``with`` block."""
    noted = UseOfLogits()
    token = _use.set(noted)
    try:
        yield noted
    finally:
        _use.reset(token)


def present_use() -> UseOfLogits:
    """The use of logits in the innermost block; outside of any, a new one."""
    return _use.get() or UseOfLogits()


def whole_hidden(hidden: Tensor, *, sequence_parallel: bool) -> Tensor:
    """``[local tokens, hidden size]`` on every tensor-parallel rank, from what goes into an output
    layer: ``[1, local tokens, hidden size]``, under sequence parallelism this rank's part."""
    # Both sum up the gradient over the ranks in the backward pass, as Megatron's layer does.
    if sequence_parallel:
        gathered: Tensor = tensor_parallel.gather_from_sequence_parallel_region(hidden[0])
        return gathered
    copied: Tensor = tensor_parallel.copy_to_tensor_model_parallel_region(hidden[0])
    return copied


class FusedLogits(Tensor):
    """Logits that `response_log_probs` and its siblings never make; any other reader has them made.

    A tensor ``[1, local tokens, local vocabulary]`` without memory of its own.

    Attributes:
        hidden: ``[1, local tokens, hidden size]``, under sequence parallelism this tensor-parallel
            rank's part of the tokens.
        weight: ``[local vocabulary, hidden size]``; the logits are the product of the two.
        sequence_parallel: True if the tokens are split over tensor-parallel ranks.
        whole: they themselves, once something has read them; None before.
    """

    hidden: Tensor
    weight: Tensor
    sequence_parallel: bool
    whole: Tensor | None
    _multiply: Callable[[Tensor], tuple[Tensor, Any]]
    _when_made: Callable[[], None]

    @staticmethod
    def __new__(
        cls,
        hidden: Tensor,
        weight: Tensor,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
        multiply: Callable[[Tensor], tuple[Tensor, Any]],
        when_made: Callable[[], None],
    ) -> FusedLogits:
        """Logits of a type; `multiply` is the output layer's forward, of ``[tokens, 1, hidden]``,
        and `when_made` is called as they are made."""
        shards = parallel_state.get_tensor_model_parallel_world_size() if sequence_parallel else 1
        shape = (1, hidden.shape[1] * shards, weight.shape[0])
        make: Any = Tensor._make_wrapper_subclass
        made: FusedLogits = make(cls, shape, dtype=dtype, device=hidden.device)
        made.hidden, made.weight, made.whole = hidden, weight, None
        made.sequence_parallel = sequence_parallel
        made._multiply, made._when_made = multiply, when_made
        return made

    def made(self) -> Tensor:
        """The logits, the same ones each time: a reader may write over them."""
        if self.whole is None:
            self._when_made()
            by_token, _ = self._multiply(self.hidden.transpose(0, 1))
            self.whole = by_token.transpose(0, 1).contiguous().to(self.dtype)
        return self.whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run any function but those of shape, type and device on the logits made."""
        if func in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Run an operation on the logits made."""
        args, kwargs = tree_map(_made, (args, kwargs or {}))
        return func(*args, **kwargs)


_WITHOUT_VALUES = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "requires_grad", "is_leaf", "grad_fn")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__),
}


def _made(value: Any) -> Any:
    return value.made() if isinstance(value, FusedLogits) else value


def why_not_fused(chunk: Any) -> str:
    """Why the last layer of a chunk is more than a product; empty if it is not, or has none."""
    layer = getattr(unwrap_model(chunk), "output_layer", None)
    # Only the last stage's last chunk has the layer.
    if layer is None:
        return ""
    if type(layer) is not ColumnParallelLinear:
        return f"is a {type(layer).__name__}"
    if layer.bias is not None:
        return "has a bias"
    if layer.gather_output:
        return "gathers its output (parallel_output=False)"
    if getattr(layer, "gtp_remat_size", 1) > 1:  # from 0.19 on
        return "gathers its weight (generalized tensor parallelism)"
    if getattr(get_model_config(chunk), "use_mup", False):
        return "scales its logits (--use-mup)"
    return ""


@contextlib.contextmanager
def output_layer(
    chunk: Any, dtype: torch.dtype | None, when_made: Callable[[], None]
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Let one forward pass of a chunk inside the block return what goes into its output layer.

    Yields a function from the chunk's output to what losses are given: on the last stage
    `FusedLogits` of this type; with None, and elsewhere, the output itself.
    """
    layer = getattr(unwrap_model(chunk), "output_layer", None)
    if layer is None or dtype is None:
        yield _noted
        return
    forward, found = layer.forward, []

    def keep(hidden: Tensor, weight: Tensor | None = None, **options: Any) -> tuple[Tensor, None]:
        found.append(functools.partial(forward, weight=weight, **options))
        return hidden, None

    def logits_of(output: Tensor) -> Tensor:
        weight = found[0].keywords["weight"]
        weight = layer.weight if weight is None else weight
        present_use().vocabulary = len(weight)
        return FusedLogits(
            output,
            weight,
            sequence_parallel=layer.sequence_parallel,
            dtype=dtype,
            multiply=found[0],
            when_made=when_made,
        )

    # On this one module and for this one pass: the model's own forward and its hooks run as ever.
    with compat.replaced(layer, "forward", keep):
        yield logits_of


def _noted(output: Tensor) -> Tensor:
    # A model of the user's may return anything: what reads it names what it is.
    if isinstance(output, Tensor) and output.dim():
        present_use().vocabulary = output.shape[-1]
    return output


def tensors_of(logits: Tensor) -> tuple[Tensor, ...]:
    """The tensors that get a gradient from a loss."""
    return (logits.hidden, logits.weight) if isinstance(logits, FusedLogits) else (logits,)
