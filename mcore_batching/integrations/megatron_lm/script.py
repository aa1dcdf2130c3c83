"""A training script's ``get_batch``, found by its forward step and taught packed rows.

The forward step's own globals are changed, once: wherever the script was imported from, that is
where it looks ``get_batch`` up. A batch that does not come from the seam is read as before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from mcore_batching.integrations.megatron_lm.batch_fields import (
    check_fields,
    fields_unpacked_by,
    next_batch,
)
from mcore_batching.megatron.errors import DynamicBatchArgumentError

_MARK = "_mcore_batching_original"

_declared_fields: tuple[str, ...] | None = None
_changed: list[tuple[dict[str, Any], Callable[..., Any]]] = []
"""Globals of scripts, and the ``get_batch`` that they had."""


def declare_batch_fields(names: Sequence[str] | None) -> None:
    """Say what a script's ``get_batch`` returns, where its source does not.

    Args:
        names: in the order in which the script unpacks them; None: read it from the source.

    Raises:
        DynamicBatchArgumentError: a name is not known, or a needed one lacks.
    """
    global _declared_fields
    if names is not None:
        check_fields(names, "install(batch_fields=...)")
    _declared_fields = None if names is None else tuple(names)


def use_packed_batches(forward_step_func: Callable[..., Any]) -> None:
    """Let a forward step's ``get_batch`` take packed rows. Does nothing the second time.

    A script whose ``get_batch`` calls `next_batch` itself is left alone.

    Raises:
        DynamicBatchArgumentError: there is no such function, or its batch is of another kind.
    """
    function: Any = forward_step_func
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    scope: dict[str, Any] = getattr(function, "__globals__", {})
    original = scope.get("get_batch")
    if not callable(original):
        raise DynamicBatchArgumentError(
            f"the forward step {function!r} has no get_batch in its module, from which it would "
            "get packed rows: name the function that reads the batch get_batch"
        )
    if hasattr(original, _MARK) or "next_batch" in _names_used_by(original):
        return
    fields = _declared_fields or fields_unpacked_by(function)

    @functools.wraps(original)
    def get_batch(data_iterator: Any, *arguments: Any, **keywords: Any) -> Any:
        packed = next_batch(data_iterator, fields)
        return original(data_iterator, *arguments, **keywords) if packed is None else packed

    setattr(get_batch, _MARK, original)
    scope["get_batch"] = get_batch
    _changed.append((scope, original))


def restore_batches() -> None:
    """Undo `use_packed_batches` in every script."""
    while _changed:
        scope, original = _changed.pop()
        scope["get_batch"] = original


def _names_used_by(function: Callable[..., Any]) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code.co_names if code is not None else ()
