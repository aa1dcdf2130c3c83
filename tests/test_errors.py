"""Errors of the package have one root and a built-in kind, one name each, and survive pickling."""

from __future__ import annotations

import ast
import importlib
import pickle
from collections import Counter
from pathlib import Path

import pytest

from mcore_batching import MCoreBatchingError

PACKAGE = Path(__file__).resolve().parents[1] / "mcore_batching"
NEEDS = {"batch": "torch", "rl": "torch", "megatron": "megatron.core"}
NEEDS["integrations"] = NEEDS["megatron"]

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


def exception_classes() -> list[tuple[str, str]]:
    """Module and name of every class whose bases, followed by name, end in a built-in exception."""
    bases: dict[tuple[str, str], list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                bases[module.removesuffix(".__init__"), node.name] = names
    known = {name for name, kind in vars(__import__("builtins")).items() if is_exception(kind)}
    found: list[tuple[str, str]] = []
    while True:
        more = [each for each, of in bases.items() if known & set(of) and each not in found]
        if not more:
            return sorted(found)
        found += more
        known |= {name for _, name in more}


def is_exception(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException)


FOUND = exception_classes()


def load(module: str, name: str) -> type[Exception]:
    layer = module.split(".")[1]
    if layer in NEEDS:
        pytest.importorskip(NEEDS[layer])
    kind: type[Exception] = getattr(importlib.import_module(module), name)
    return kind


def make(kind: type[Exception]) -> Exception:
    for each in kind.__mro__:
        if each.__name__ in MADE_FROM.keys() | KEYWORDS.keys():
            texts = () if each.__name__ in NO_TEXT else ("what is wrong",)
            arguments = MADE_FROM.get(each.__name__, texts)
            return kind(*arguments, **KEYWORDS.get(each.__name__, {}))
    return kind("what is wrong")


@pytest.mark.parametrize(("module", "name"), FOUND, ids=[name for _, name in FOUND])
def test_errors_have_one_root_and_survive_pickling(module: str, name: str) -> None:
    kind = load(module, name)
    error = make(kind)
    assert isinstance(error, MCoreBatchingError)
    if kind is not MCoreBatchingError:
        assert isinstance(error, ValueError | RuntimeError | OSError | LookupError | TypeError)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error) != ""
    assert vars(again) == vars(error)
    for attribute, value in KEYWORDS.get(name, {}).items():
        assert getattr(again, attribute) == value


def test_every_name_is_used_once() -> None:
    times = Counter(name for _, name in FOUND)
    assert {name for name, count in times.items() if count > 1} == set()
    assert len(times) > 20
    assert KEYWORDS.keys() <= times.keys()


def test_errors_of_several_ranks_list_them_in_order() -> None:
    kind = load("mcore_batching.megatron.errors", "CollectiveError")
    text = str(make(kind))
    assert text.index("rank 1: no memory") < text.index("rank 3: KeyError")


def test_invariant_error_names_the_place() -> None:
    error = make(load("mcore_batching.planning.errors", "InvariantError"))
    assert str(error) == "invariant 'cap' is broken at step 1, rank 2, slot 0: too much"
