"""Replace functions of a framework, in every module that imported them, and put them back.

``from .data import get_batch`` makes a second reference, so a function is replaced in every loaded
module that has it under its name. Modules loaded later import the replacement.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from mcore_batching.planning.errors import MCoreBatchingError

Function = Callable[..., Any]

# A replacement's attribute: a set that is empty once it is undone. functools.wraps copies
# attributes, so wrappers of a replacement share the set.
_MARK = "_mcore_batching_original"


class HookError(MCoreBatchingError, ValueError):
    """A module's functions cannot be replaced: missing, of another signature, or hooked already."""


class Replacement(NamedTuple):
    """The framework's function of a name, and the one from `in_place_of` to put wherever it is."""

    name: str
    original: Function
    ours: Function


class Hook:
    """Replaced functions of a framework, put back by `undo` or by leaving its ``with`` block.

    Args:
        modules: searched besides those that are loaded.
        replacements: what to replace, wherever it is found.
        copies: replace also in copies of a module's globals, as functions have that Ray pickled by
            value.
        empty: why nothing may be hooked, in words.

    Attributes:
        hooked: dotted names of the replaced functions, in order; empty after `undo`.
    """

    def __init__(
        self,
        modules: Sequence[ModuleType] = (),
        replacements: Sequence[Replacement] = (),
        *,
        copies: bool = False,
        empty: str = "undone",
    ) -> None:
        # Modules of people who built them by hand may not be in sys.modules.
        self._scopes = [vars(module) for module in modules]
        self._copies, self._empty = copies, empty
        self._done: list[Replacement] = []
        self.hooked: list[str] = []
        for each in replacements:
            self.add(each)

    def add(self, replacement: Replacement, *scopes: dict[str, Any]) -> None:
        """Replace a function in these modules' globals; in none given: wherever it is found."""
        for scope in scopes or self._scopes_with(replacement.name, replacement.original):
            scope[replacement.name] = replacement.ours
            self.hooked.append(f"{scope['__name__']}.{replacement.name}")
        self._done.append(replacement)

    def replace(self, scope: dict[str, Any], name: str, ours: Any) -> None:
        """Replace a name in one module's globals alone.

        ``ours`` is a class, or a function that is called with the original before its arguments.
        """
        original = scope[name]
        if not inspect.isclass(ours):
            ours = in_place_of(original, functools.partial(ours, original))
        self._scopes.append(scope)
        self.add(Replacement(name, original, ours), scope)

    def undo(self) -> None:
        """Put the originals back. A second call does nothing.

        Where somebody wrapped a replacement since, the wrapper stays and calls the original.
        """
        while self._done:
            each = self._done.pop()
            # References that cannot be reached call the original from now on. A class has no mark.
            getattr(each.ours, _MARK, set()).clear()
            for scope in self._scopes_with(each.name, each.ours):
                scope[each.name] = each.original
        self.hooked.clear()

    def __enter__(self) -> Hook:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __str__(self) -> str:
        found = f"hooked {', '.join(self.hooked)}" if self.hooked else ""
        return f"mcore_batching: {found or f'nothing hooked ({self._empty})'}"

    def _scopes_with(self, name: str, function: Function) -> list[dict[str, Any]]:
        """Globals of modules, and copies of them, with this very function under this name."""
        # A copy of the list: other threads may import meanwhile.
        scopes = [vars(each) for each in [*sys.modules.values()] if isinstance(each, ModuleType)]
        scopes += self._scopes
        if self._copies:
            # A copy refers to the function, so the garbage collector finds the copy.
            # Only globals of functions have __builtins__; other dicts that refer to it do not.
            found = gc.get_referrers(function)
            scopes += [each for each in found if type(each) is dict and "__builtins__" in each]
        each_once = {id(scope): scope for scope in scopes}.values()
        return [scope for scope in each_once if scope.get(name) is function]


def replacing(module: Any, name: str, ours: Function) -> Replacement:
    """A function of a module or class, and ours for it, if it has the expected signature.

    Ours is called with the framework's own before its arguments. Theirs must have the parameters of
    ours, of which those with a default may be missing; further ones where ours passes on ``*`` or
    ``**`` arguments.

    Raises:
        HookError: saying what was expected and what was found.
    """
    original: Any = getattr(module, name, None)
    owner = f"{module.__module__}.{module.__name__}" if inspect.isclass(module) else module.__name__
    # First, since a replacement has the signature that is looked for.
    if is_replacement(original):
        raise HookError(f"{owner}.{name} is hooked already: undo that hook first")
    bound = functools.partial(ours, original)
    parameters = parameters_of(bound)
    passed_on = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    expected = [each for each in parameters if each.kind not in passed_on]
    found = parameters_of(original)
    # Ours must take every call that theirs takes: a name, a default or the order may not differ.
    lacking, more = expected[len(found) :], found[len(expected) :]
    fits = (
        _is_function(original)
        and found[: len(expected)] == expected[: len(found)]
        and all(each.default is not each.empty for each in lacking)
        and (not more or len(expected) < len(parameters))
    )
    if not fits:
        shown = f"{name}{inspect.Signature(found)}"
        if not _is_function(original):
            shown = f"a {type(original).__name__}"
        raise HookError(
            f"{owner}.{name} cannot be replaced: expected {name}{inspect.Signature(parameters)}, "
            f"found {shown}; hook a version of the framework with that signature"
        )
    return Replacement(name, original, in_place_of(original, bound))


def in_place_of(original: Function, ours: Function) -> Function:
    """Our function under the original's name and signature; the original once it is undone."""
    mark = {"is ours"}

    # Modules that import it meanwhile keep a reference that `undo` cannot reach.
    @functools.wraps(original)
    def replacement(*arguments: Any, **keywords: Any) -> Any:
        return (ours if mark else original)(*arguments, **keywords)

    setattr(replacement, _MARK, mark)
    return replacement


def is_replacement(function: Any) -> bool:
    """True for a function that `in_place_of` made, or a wrapper of one, until it is undone."""
    return bool(getattr(function, _MARK, ()))


def parameters_of(function: Any) -> list[inspect.Parameter]:
    """A function's parameters without annotations, which may differ; none of anything else."""
    if not _is_function(function):
        return []
    found = inspect.signature(function).parameters.values()
    return [each.replace(annotation=each.empty) for each in found]


def _is_function(value: Any) -> bool:
    return callable(value) and not inspect.isclass(value)
