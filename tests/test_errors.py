"""Errors of the package have one root and a built-in kind, one name each, and survive pickling."""

from __future__ import annotations

import importlib
import pickle
import pkgutil

import pytest

import mcore_batching
from mcore_batching import MCoreBatchingError

MADE_FROM = {
    "CollectiveError": ({3: "KeyError: 'tokens'", 1: "no memory"},),
    "InvariantError": ("cap", "too much"),
}
"""Arguments of those that a text alone does not make; below, by keyword."""
KEYWORDS = {
    "InvariantError": {"indices": (3, 4), "step": 1, "rank": 2, "slot": 0},
    "LengthError": {"index": 3},
    "OrderError": {"missing": (1,), "doubled": (2, 3), "extra": (9,)},
    "OversizeSampleError": {
        "index": 4,
        "length": 9,
        "padded_length": 12,
        "cap": 8,
        "needed_max_tokens_per_gpu": 6,
        "num_oversize": 2,
    },
    "SchemaError": {"expected": "this", "found": "that", "sample_index": 2, "declaration": "x"},
}
NO_TEXT = {"OversizeSampleError"}


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


def make(kind: type[Exception]) -> Exception:
    for each in kind.__mro__:
        if each.__name__ in MADE_FROM.keys() | KEYWORDS.keys():
            texts = () if each.__name__ in NO_TEXT else ("what is wrong",)
            arguments = MADE_FROM.get(each.__name__, texts)
            return kind(*arguments, **KEYWORDS.get(each.__name__, {}))
    return kind("what is wrong")


def test_errors_have_one_root_and_a_name_each_and_survive_pickling() -> None:
    found = exception_classes()
    names = [kind.__name__ for kind in found]
    assert len(set(names)) == len(names) >= 10
    assert not (KEYWORDS.keys() - set(names)) or "CollectiveError" not in names
    for kind in found:
        error = make(kind)
        assert isinstance(error, MCoreBatchingError)
        if kind is not MCoreBatchingError:
            assert isinstance(error, ValueError | RuntimeError | OSError | LookupError | TypeError)
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert str(again) == str(error) != ""
        assert vars(again) == vars(error)
        for attribute, value in KEYWORDS.get(kind.__name__, {}).items():
            assert getattr(again, attribute) == value


def test_errors_of_several_ranks_list_them_in_order() -> None:
    text = str(make(pytest.importorskip("mcore_batching.megatron.errors").CollectiveError))
    assert text.index("rank 1: no memory") < text.index("rank 3: KeyError")
