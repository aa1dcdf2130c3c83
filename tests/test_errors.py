"""Errors of the package have one root and a built-in kind, one name each, and survive pickling."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest

import mcore_batching
from mcore_batching import MCoreBatchingError

FAILURES = {3: "KeyError: 'tokens'", 1: "no memory"}
VALUES: dict[str, Callable[[int], Any]] = {
    "str": "{} is wrong".format,
    "InitVar[str]": "{} is wrong".format,
    "int": int,
    "int | None": int,
    "tuple[int, ...]": lambda number: (number, number + 1),
    "Mapping[int, str]": lambda number: FAILURES,
}
"""Arguments of their constructors, by annotation and place."""


def exception_classes() -> list[type[Exception]]:
    """Every exception class of the modules that can be imported here."""
    found: dict[type[Exception], None] = {}
    modules = pkgutil.walk_packages(
        mcore_batching.__path__, "mcore_batching.", onerror=lambda name: None
    )
    for each in modules:
        if each.name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(each.name)
        except (ModuleNotFoundError, MCoreBatchingError) as error:
            # Here may be no torch, no Megatron, or no framework for a hook.
            if str(getattr(error, "name", None)).startswith("mcore_batching"):
                raise
            continue
        for kind in vars(module).values():
            is_error = isinstance(kind, type) and issubclass(kind, BaseException)
            if is_error and kind.__module__.startswith("mcore_batching"):
                found[kind] = None
    return list(found)


def test_errors_have_one_root_and_a_name_each_and_survive_pickling() -> None:
    found = exception_classes()
    assert len({kind.__name__ for kind in found}) == len(found) >= 10
    for kind in found:
        parameters = inspect.signature(kind).parameters.values()
        given = {each.name: VALUES[each.annotation](at) for at, each in enumerate(parameters)}
        error = kind(**given)
        assert isinstance(error, MCoreBatchingError)
        if kind is not MCoreBatchingError:
            assert isinstance(error, ValueError | RuntimeError | OSError | LookupError | TypeError)
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert str(again) == str(error) != ""
        assert vars(again) == vars(error)
        for each in parameters:
            if each.kind is each.KEYWORD_ONLY and each.name != "advice":
                assert getattr(again, each.name) == given[each.name]


def test_errors_of_several_ranks_list_them_in_order() -> None:
    kind = pytest.importorskip("mcore_batching.megatron.errors").CollectiveError
    text = str(kind(FAILURES))
    assert text.index("rank 1: no memory") < text.index("rank 3: KeyError")
