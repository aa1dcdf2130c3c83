"""`mcore_batching.hook` in one process: replacing, refusing, putting back."""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import mcore_batching
from mcore_batching.integrations.replacements import replacing
from mcore_batching.integrations.slime import HookError, trainer
from mcore_batching.integrations.slime.hook import NAMES

SOURCES = {
    "get_data_iterator": "def get_data_iterator(args, model, rollout_data): return 'own'",
    "forward_only": (
        "def forward_only(f, args, model, data_iterator, num_microbatches, store_prefix=''):"
        " return 'own'"
    ),
}


def module(name: str, *names: str, **sources: str) -> ModuleType:
    """A module with functions of these names, as they are expected or as given."""
    made = ModuleType(name)
    made.DataIterator = object  # type: ignore[attr-defined]
    for each in names:
        exec(SOURCES[each], vars(made))
    for source in sources.values():
        exec(source, vars(made))
    return made


@pytest.fixture
def registered() -> Iterator[Callable[[ModuleType], ModuleType]]:
    """Puts modules where imported ones are, until the end of the test."""
    names: list[str] = []

    def register(made: ModuleType) -> ModuleType:
        sys.modules[made.__name__] = made
        names.append(made.__name__)
        return made

    yield register
    for name in names:
        del sys.modules[name]


def test_without_its_flag_the_framework_plans_itself() -> None:
    made = module("rl.batching", *NAMES)
    args = SimpleNamespace(use_dynamic_batch_size=False)
    with mcore_batching.hook(made):
        assert made.get_data_iterator(args, [], {}) == "own"


def test_what_somebody_replaced_since_is_left_alone() -> None:
    """What calls ours gets the framework's own again, which can be hooked again."""
    made = module("rl.batching", *NAMES)
    hooked = mcore_batching.hook(made)
    ours = made.forward_only

    @functools.wraps(ours)
    def wrapper(*arguments: Any) -> Any:
        return ours(*arguments)

    made.forward_only = wrapper
    with pytest.raises(HookError, match="hooked already"):
        mcore_batching.hook(made)
    hooked.undo()
    assert made.forward_only is wrapper
    assert made.forward_only(*[None] * 5) == "own"
    with mcore_batching.hook(made):
        assert made.forward_only is not wrapper
    assert made.forward_only is wrapper
    assert made.get_data_iterator(*[None] * 3) == "own"


def test_second_names_of_the_same_function_are_replaced_and_put_back(
    registered: Callable[[ModuleType], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``from .data import get_batch``, before the hook and while it lasts."""
    monkeypatch.setitem(sys.modules, "rl_lazy", object())  # as some packages' lazy modules are
    data = module("rl.data", "get_data_iterator")
    model = module("rl.model", "forward_only")
    model.get_data_iterator, own = data.get_data_iterator, data.get_data_iterator
    actor = registered(ModuleType("rl_actor"))
    actor.get_data_iterator = own
    actor.forward_only = other = lambda: "another function of that name"
    hooked = mcore_batching.hook(data, model)
    assert model.get_data_iterator is actor.get_data_iterator is data.get_data_iterator is not own
    assert actor.forward_only is other
    assert set(hooked.hooked) == {
        *(f"{each}.get_data_iterator" for each in ("rl.data", "rl.model", "rl_actor")),
        "rl.model.forward_only",
    }
    late = registered(ModuleType("rl_late"))
    late.get_data_iterator = data.get_data_iterator
    hooked.undo()
    assert model.get_data_iterator is data.get_data_iterator is late.get_data_iterator is own
    assert actor.get_data_iterator is own


def test_an_iterator_of_listed_samples_is_needed_to_plan_here() -> None:
    made = module("rl.batching", *NAMES)
    del made.DataIterator
    with pytest.raises(HookError, match="DataIterator is not where get_data_iterator is"):
        mcore_batching.hook(made)
    assert made.forward_only(*[None] * 5) == "own"


@pytest.mark.parametrize("name", NAMES)
def test_both_or_none(name: str) -> None:
    made = module("rl.data", *(each for each in NAMES if each != name))
    before = dict(vars(made))
    with pytest.raises(HookError) as caught:
        mcore_batching.hook(made)
    assert str(caught.value) == (
        f"{name} is in none of the modules given (rl.data): call hook(data, model) with those that "
        "have get_data_iterator, forward_only"
    )
    assert dict(vars(made)) == before


DIFFERENT = {
    "another name": ("get_data_iterator", "(args, model, batch)"),
    "another order": ("forward_only", "(args, f, model, data_iterator, num_microbatches)"),
    "one less": ("get_data_iterator", "(args, model)"),
    "no function": ("forward_only", None),
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_another_signature_is_refused_beside_the_expected_one(difference: str) -> None:
    name, theirs = DIFFERENT[difference]
    source = f"def {name}{theirs}: ..." if theirs else f"import sys as {name}"
    made = module("rl.batching", *(each for each in NAMES if each != name), different=source)
    before = dict(vars(made))
    with pytest.raises(HookError) as caught:
        mcore_batching.hook(made)
    passed_on = "f, args, model, data_iterator, num_microbatches, *arguments, **keywords"
    expected = {"get_data_iterator": "args, model, rollout_data", "forward_only": passed_on}[name]
    found = f"{name}{theirs}" if theirs else "a module"
    assert str(caught.value) == (
        f"rl.batching.{name} cannot be replaced: expected {name}({expected}), found {found}; hook "
        "a version of the framework with that signature"
    )
    assert dict(vars(made)) == before  # nothing was replaced before all were checked
    assert isinstance(caught.value, ValueError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (HookError, str(caught.value))


def taken(original: Any, first: int, second: int = 2, *, third: int = 3) -> None: ...


@pytest.mark.parametrize(
    ("theirs", "is_refused"),
    [
        ("(first, second=2, *, third=3)", False),
        ("(first: str, second: str = 2) -> int", False),  # older, and annotated
        ("(first)", False),
        ("()", True),
        ("(other, second=2)", True),
        ("(first, second=5)", True),
        ("(first, second)", True),
        ("(first, *, second=2)", True),
        ("(first, second=2, *, third=3, more=4)", True),
    ],
)
def test_ours_takes_every_call_that_a_replaced_function_takes(
    theirs: str, is_refused: bool
) -> None:
    made = module("rl", source=f"def function{theirs}: ...")
    refusal = pytest.raises(
        HookError, match=r"rl.function cannot be replaced: expected function\(f"
    )
    with refusal if is_refused else contextlib.nullcontext():
        replacing(made, "function", taken)


def test_a_decorated_function_is_read_through_its_decorator() -> None:
    made = module("rl.batching", *NAMES)
    made.forward_only = torch.no_grad()(made.forward_only)
    with mcore_batching.hook(made):
        assert str(inspect.signature(made.forward_only)) == (
            "(f, args, model, data_iterator, num_microbatches, store_prefix='')"
        )


def test_only_modules_are_taken() -> None:
    with pytest.raises(HookError, match=r"expected modules, got 'slime\.data': import it"):
        mcore_batching.hook("slime.data")  # type: ignore[arg-type]
    with pytest.raises(HookError, match="none was given"):
        mcore_batching.hook()


def test_the_schema_reaches_the_iterators(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        trainer,
        "planned_iterators",
        lambda schema, own, original, args, model, rollout_data: given.extend(
            (args, model, rollout_data, schema, own)
        ),
    )
    schema = mcore_batching.batch.DEFAULT_SCHEMA.declare(
        "bonus", mcore_batching.batch.Kind.PER_SAMPLE
    )
    made = module("rl.batching", *NAMES)
    with mcore_batching.hook(made, schema=schema):
        made.get_data_iterator(None, 2, 3)
    assert given == [None, 2, 3, schema, object]
