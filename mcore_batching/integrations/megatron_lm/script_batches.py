"""Replace a training script's ``get_batch`` by one that accepts packed rows.

It is found in the globals of the script's forward step, wherever the script was imported from. A
batch of an ordinary iterator is read as before.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from mcore_batching.integrations.megatron_lm.packed_batches import (
    check_fields,
    next_batch,
    problems_of_fields,
)
from mcore_batching.integrations.replacements import Function, Hook, is_replacement
from mcore_batching.megatron.errors import DynamicBatchArgumentError

_scripts = Hook()  # those with a replaced get_batch


def use_packed_batches(forward_step_func: Callable[..., Any]) -> None:
    """Let a forward step's ``get_batch`` accept packed rows, unless it does so already."""
    function: Any = forward_step_func
    while isinstance(function, functools.partial):
        function = function.func
    # Of a decorated forward step the globals would be those of the decorator's module.
    function = inspect.unwrap(function)
    scope: dict[str, Any] = getattr(function, "__globals__", {})
    original = scope.get("get_batch")
    if not callable(original):
        raise DynamicBatchArgumentError(
            f"{function!r} has no get_batch in its module: name the function that reads the "
            "batch get_batch"
        )
    # Ours already, or of a script that is patched.
    code = getattr(inspect.unwrap(original), "__code__", None)
    if is_replacement(original) or "next_batch" in getattr(code, "co_names", ()):
        return
    ours = functools.partial(_get_batch, fields_unpacked_by(function))
    _scripts.replace(scope, "get_batch", ours)


def _get_batch(
    fields: Sequence[str], original: Function, data_iterator: Any, *rest: Any, **options: Any
) -> Any:
    packed = next_batch(data_iterator, fields)
    return original(data_iterator, *rest, **options) if packed is None else packed


def restore_batches() -> None:
    """Undo `use_packed_batches` in every script."""
    _scripts.undo()


def fields_unpacked_by(forward_step: Callable[..., Any]) -> tuple[str, ...]:
    """The names into which a forward step's source unpacks its ``get_batch``; an error where it
    does not.

        tokens, labels, loss_mask, attention_mask, position_ids = get_batch(data_iterator)
    """
    where = f"{getattr(forward_step, '__module__', '')}.{forward_step.__name__}"
    advice = (
        "mcore_batching.integrations.megatron_lm.next_batch(data_iterator, names) in the first "
        "lines of get_batch, with the names of what it returns"
    )
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward_step)))
    except (OSError, SyntaxError) as error:
        raise DynamicBatchArgumentError(
            f"cannot read the source of {where} ({error}): call {advice}"
        ) from None
    found = sorted(_unpackings(tree), key=len, reverse=True)
    if not found:
        raise DynamicBatchArgumentError(
            f"{where} does not unpack get_batch(...) into names: call {advice}"
        )
    fitting = [names for names in found if not problems_of_fields(names)]
    # Of several branches, by the batch's length, the longest that packed rows fit. Where none fits,
    # the error is about the longest: the others are older forms of it.
    check_fields((fitting or found)[0], where)
    return (fitting or found)[0]


def _unpackings(tree: ast.Module) -> list[tuple[str, ...]]:
    """Names into which a function unpacks a call of ``get_batch``, or a variable that holds its
    result."""
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    # batch = get_batch(data_iterator); tokens, labels, ... = batch
    holders = {
        node.targets[0].id
        for node in assigned
        if _calls_get_batch(node.value) and isinstance(node.targets[0], ast.Name)
    }
    return [
        tuple(getattr(name, "id", "?") for name in node.targets[0].elts)
        for node in assigned
        if isinstance(node.targets[0], ast.Tuple)
        and (_calls_get_batch(node.value) or getattr(node.value, "id", None) in holders)
    ]


def _calls_get_batch(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and getattr(value.func, "id", None) == "get_batch"
