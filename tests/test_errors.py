"""Errors of the package have one root and a built-in kind, one name each, and survive pickling."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
from typing import Any

import pytest

import mcore_batching
from mcore_batching import MCoreBatchingError

VALUES: dict[str, Any] = {
    "str": "what is wrong",
    "InitVar[str]": "what is wrong",
    "int": 3,
    "int | None": 4,
    "tuple[int, ...]": (5, 6),
    "Mapping[int, str]": {3: "KeyError: 'tokens'", 1: "no memory"},
}
"""Arguments of their constructors, by annotation."""


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
        error = kind(**{each.name: VALUES[each.annotation] for each in parameters})
        assert isinstance(error, MCoreBatchingError)
        if kind is not MCoreBatchingError:
            assert isinstance(error, ValueError | RuntimeError | OSError | LookupError | TypeError)
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert str(again) == str(error) != ""
        assert vars(again) == vars(error)
        for each in parameters:
            if each.kind is each.KEYWORD_ONLY and each.name != "advice":
                assert getattr(again, each.name) == VALUES[each.annotation]


def test_errors_of_several_ranks_list_them_in_order() -> None:
    kind = pytest.importorskip("mcore_batching.megatron.errors").CollectiveError
    text = str(kind(VALUES["Mapping[int, str]"]))
    assert text.index("rank 1: no memory") < text.index("rank 3: KeyError")
