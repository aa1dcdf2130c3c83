"""`hook`: the engine in slime, or in a framework that batches by the same three functions.

    import slime.backends.megatron_utils.data as data
    import slime.backends.megatron_utils.model as model

    hooked = mcore_batching.hook(data, model)   # get_data_iterator, get_batch; forward_only
    print(hooked)                               # the names that were replaced
    hooked.undo()                               # or: with mcore_batching.hook(data, model): ...

The framework has to have ``get_data_iterator``, ``forward_only`` and ``get_batch`` with slime's
signatures; all are checked before any is replaced. They are replaced together: a ``forward_only``
that knows no placeholders would mistake their outputs for samples'.

A function is replaced wherever a loaded module has it under its name, because ``from .data import
get_batch`` made a second name for it. Modules loaded later import the replacement.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from mcore_batching.batch import DEFAULT_SCHEMA, Schema
from mcore_batching.integrations.slime import batching
from mcore_batching.planning.errors import MCoreBatchingError

NAMES = ("get_data_iterator", "forward_only", "get_batch")

_MARK = "_mcore_batching_original"

Function = Callable[..., Any]


class HookError(MCoreBatchingError, ValueError):
    """A module's functions cannot be replaced: missing, of another signature, or hooked already."""


@dataclasses.dataclass(frozen=True)
class _Replacement:
    name: str
    original: Function
    ours: Function


class Hook:
    """The functions that `hook` replaced. Calling it, or leaving its ``with`` block, undoes that.

    Attributes:
        hooked: dotted names of the replaced functions, in order; empty after `undo`.
    """

    def __init__(self, modules: Sequence[ModuleType], replacements: list[_Replacement]) -> None:
        self._modules = modules
        self._replacements = replacements
        self.hooked: list[str] = []
        for each in replacements:
            for module in _holders(modules, each.name, each.original):
                setattr(module, each.name, each.ours)
                self.hooked.append(f"{module.__name__}.{each.name}")

    def undo(self) -> None:
        """Put the originals back, except where a name has been replaced again since.

        A second call does nothing.
        """
        while self._replacements:
            each = self._replacements.pop()
            for module in _holders(self._modules, each.name, each.ours):
                setattr(module, each.name, each.original)
        self.hooked.clear()

    def __call__(self) -> None:
        """`undo`."""
        self.undo()

    def __enter__(self) -> Hook:
        """Itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """`undo`."""
        self.undo()

    def __str__(self) -> str:
        """One line for a log."""
        return f"mcore_batching: hooked {', '.join(self.hooked) or 'nothing'}"


def hook(*modules: ModuleType, schema: Schema = DEFAULT_SCHEMA) -> Hook:
    """Replace ``get_data_iterator``, ``forward_only`` and ``get_batch`` in a framework.

    Signatures (parameters with a default may be missing, as in older versions)::

        get_data_iterator(args, model, rollout_data)
        forward_only(f, args, model, data_iterator, num_microbatches, store_prefix="")
        get_batch(data_iterator, keys, pad_multiplier=128, qkv_format="thd", allgather_cp=False)

    The framework's own forward step, loss and log-prob functions stay. What they get is slime's
    layout; see `mcore_batching.integrations.slime.batching`.

    Args:
        modules: that have the functions, all three between them.
        schema: the kind of every field that ``get_batch`` is asked for; extend it with
            `Schema.declare` for fields of your own.

    Returns:
        the replaced functions, with `Hook.undo`.

    Raises:
        HookError: a function is missing or hooked already, or its signature is another.
    """
    others = [module for module in modules if not isinstance(module, ModuleType)]
    if others:
        raise HookError(f"expected modules, got {others[0]!r}: import it, and give the module")
    ours: dict[str, Function] = {
        "get_data_iterator": functools.partial(batching.get_data_iterator, schema=schema),
        "forward_only": batching.forward_only,
        "get_batch": batching.get_batch,
    }
    replacements: list[_Replacement] = []
    for name in NAMES:
        holders = [module for module in modules if hasattr(module, name)]
        if not holders:
            given = ", ".join(module.__name__ for module in modules) or "none was given"
            raise HookError(
                f"{name} is in none of the modules given ({given}), and {', '.join(NAMES)} work "
                "only together: give the module that has it as well, hook(data, model)"
            )
        for module in holders:
            original = getattr(module, name)
            _check(f"{module.__name__}.{name}", original, getattr(batching, name))
            made = _in_place_of(original, ours[name])
            replacements.append(_Replacement(name, original, made))
    return Hook(modules, replacements)


def _check(where: str, function: Any, ours: Function) -> None:
    """Refuse a function whose callers could not call ours.

    Raises:
        HookError: saying what was expected and what was found.
    """
    if hasattr(function, _MARK):
        raise HookError(f"{where} is hooked already: undo that hook first")
    expected = _positional(inspect.signature(ours))
    if not callable(function) or inspect.isclass(function):
        raise HookError(
            f"{where} cannot be replaced: expected a function {_shown(where, expected)}, found a "
            f"{type(function).__name__}"
        )
    signature = inspect.signature(function)
    difference = _difference(list(signature.parameters.values()), expected)
    if difference:
        raise HookError(
            f"{where} cannot be replaced: expected {_shown(where, expected)}, found "
            f"{_shown(where, list(signature.parameters.values()))}: {difference}; hook a version "
            "of the framework with the expected signature, or put a function with it in its place "
            "and hook that"
        )


def _difference(found: list[inspect.Parameter], expected: list[inspect.Parameter]) -> str | None:
    """The first difference of parameters; None if callers cannot tell the two apart."""
    for place, (theirs, ours) in enumerate(zip(found, expected, strict=False), start=1):
        if (theirs.name, theirs.kind, theirs.default) != (ours.name, ours.kind, ours.default):
            return f"parameter {place} is {_bare(theirs)} and not {_bare(ours)}"
    if len(found) > len(expected):
        return f"there is a further parameter {_bare(found[len(expected)])}"
    missing = [each for each in expected[len(found) :] if each.default is each.empty]
    if missing:
        return f"there is no parameter {_bare(missing[0])}"
    return None


def _positional(signature: inspect.Signature) -> list[inspect.Parameter]:
    return [each for each in signature.parameters.values() if each.kind is not each.KEYWORD_ONLY]


def _bare(parameter: inspect.Parameter) -> str:
    bare = str(parameter.replace(annotation=parameter.empty))
    return f"keyword-only {bare}" if parameter.kind is parameter.KEYWORD_ONLY else bare


def _shown(where: str, parameters: Sequence[inspect.Parameter]) -> str:
    bare = [each.replace(annotation=each.empty) for each in parameters]
    return f"{where.rpartition('.')[2]}{inspect.Signature(bare)}"


def _in_place_of(original: Function, ours: Function) -> Function:
    @functools.wraps(original)
    def replacement(*arguments: Any, **keywords: Any) -> Any:
        return ours(*arguments, **keywords)

    setattr(replacement, _MARK, original)
    return replacement


def _holders(modules: Sequence[ModuleType], name: str, function: Function) -> Iterator[ModuleType]:
    """The given and all loaded modules that have this very function under this name."""
    loaded = [each for each in list(sys.modules.values()) if isinstance(each, ModuleType)]
    for module in dict.fromkeys([*modules, *loaded]):
        if vars(module).get(name) is function:
            yield module
