"""`mcore_batching.hook` in one process: replacing, refusing, putting back."""

from __future__ import annotations

import functools
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from kit.patience import patience

import mcore_batching
from mcore_batching.integrations.slime import HookError, before_1860
from mcore_batching.integrations.slime.hook import NAMES

SOURCES = {
    "get_data_iterator": "def get_data_iterator(args, model, rollout_data): return 'own'",
    "forward_only": (
        "def forward_only(f, args, model, data_iterator, num_microbatches, store_prefix=''):"
        " return 'own'"
    ),
    "get_batch": (
        "def get_batch(data_iterator: object, keys: list[str], pad_multiplier: int = 128,"
        " qkv_format: str = 'thd', allgather_cp: bool = False) -> dict: return 'own'"
    ),
}


def module(name: str, *names: str, **sources: str) -> ModuleType:
    """A module with functions of these names, as they are expected or as given."""
    made = ModuleType(name)
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


def test_the_replacements_are_the_engines() -> None:
    made = module("rl.batching", *NAMES)
    with mcore_batching.hook(made), pytest.raises(ValueError, match="qkv_format='bshd'"):
        made.get_batch(None, [], qkv_format="bshd")
    with mcore_batching.hook(made), pytest.raises(ValueError, match="expected an iterator"):
        made.forward_only(None, None, [], [[]], [])
    assert made.get_batch(None, []) == "own"


def test_what_somebody_replaced_since_is_left_alone() -> None:
    """What calls ours gets the framework's own again, which can be hooked again."""
    made = module("rl.batching", *NAMES)
    hooked = mcore_batching.hook(made)
    ours = made.get_batch

    @functools.wraps(ours)
    def wrapper(*arguments: Any) -> Any:
        return ours(*arguments)

    made.get_batch = wrapper
    with pytest.raises(HookError, match="hooked already"):
        mcore_batching.hook(made)
    hooked.undo()
    assert made.get_batch is wrapper
    assert made.get_batch(None, []) == "own"
    with mcore_batching.hook(made):
        assert made.get_batch is not wrapper
    assert made.get_batch is wrapper
    assert made.forward_only(*[None] * 5) == "own"


def test_second_names_of_the_same_function_are_replaced_and_put_back(
    registered: Callable[[ModuleType], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``from .data import get_batch``, before the hook and while it lasts."""
    monkeypatch.setitem(sys.modules, "rl_lazy", object())  # as some packages' lazy modules are
    data = module("rl.data", "get_data_iterator", "get_batch")
    model = module("rl.model", "forward_only")
    model.get_batch = data.get_batch
    actor = registered(ModuleType("rl_actor"))
    actor.get_data_iterator, actor.forward_only = data.get_data_iterator, model.forward_only
    actor.get_batch = other = lambda: "another function of that name"
    own = data.get_batch
    hooked = mcore_batching.hook(data, model)
    assert model.get_batch is data.get_batch is not own
    assert actor.get_data_iterator is data.get_data_iterator
    assert actor.forward_only is model.forward_only
    assert actor.get_batch is other
    assert set(hooked.hooked) == {
        *("rl.data.get_data_iterator", "rl_actor.get_data_iterator"),
        *("rl.model.forward_only", "rl_actor.forward_only"),
        *("rl.data.get_batch", "rl.model.get_batch"),
    }
    late = registered(ModuleType("rl_late"))
    late.get_batch = data.get_batch
    hooked.undo()
    assert model.get_batch is data.get_batch is late.get_batch is own
    assert actor.get_data_iterator is data.get_data_iterator
    assert actor.get_data_iterator(None, None, None) == "own"


@pytest.mark.parametrize("name", NAMES)
def test_all_three_or_none(name: str) -> None:
    made = module("rl.data", *(each for each in NAMES if each != name))
    before = dict(vars(made))
    with pytest.raises(HookError) as caught:
        mcore_batching.hook(made)
    assert str(caught.value) == (
        f"{name} is in none of the modules given (rl.data): call hook(data, model) with those that "
        "have get_data_iterator, forward_only, get_batch"
    )
    assert dict(vars(made)) == before


DIFFERENT = {
    "another name": ("get_data_iterator", "(args, model, batch)"),
    "another order": (
        "forward_only",
        "(args, f, model, data_iterator, num_microbatches, store_prefix='')",
    ),
    "another default": ("get_batch", "(data_iterator, keys, pad_multiplier=64)"),
    "no default": (
        "forward_only",
        "(f, args, model, data_iterator, num_microbatches, store_prefix)",
    ),
    "keyword only": ("get_batch", "(data_iterator, *, keys)"),
    "one more": (
        "get_batch",
        "(data_iterator, keys, pad_multiplier=128, qkv_format='thd', allgather_cp=False, more=1)",
    ),
    "one less": ("get_data_iterator", "(args, model)"),
    "no function": ("get_batch", None),
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_another_signature_is_refused_beside_the_expected_one(difference: str) -> None:
    name, theirs = DIFFERENT[difference]
    source = f"def {name}{theirs}: ..." if theirs else f"class {name}: ..."
    made = module("rl.batching", *(each for each in NAMES if each != name), different=source)
    before = dict(vars(made))
    with pytest.raises(HookError) as caught:
        mcore_batching.hook(made)
    expected = inspect.signature(getattr(module("expected", name), name))
    expected = expected.replace(
        parameters=[each.replace(annotation=each.empty) for each in expected.parameters.values()],
        return_annotation=inspect.Signature.empty,
    )
    assert str(caught.value) == (
        f"rl.batching.{name} cannot be replaced: expected {name}{expected}, found "
        f"{f'{name}{theirs}' if theirs else 'a type'}; hook a version of the framework with that "
        "signature"
    )
    assert dict(vars(made)) == before  # nothing was replaced before all were checked
    assert isinstance(caught.value, ValueError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (HookError, str(caught.value))


@pytest.mark.parametrize(
    "signature", ["(data_iterator, keys)", "(data_iterator, keys, pad_multiplier=128)"]
)
def test_older_versions_lack_parameters_with_defaults(signature: str) -> None:
    rest = (each for each in NAMES if each != "get_batch")
    made = module("rl.batching", *rest, older=f"def get_batch{signature}: return 'own'")
    with mcore_batching.hook(made) as hooked:
        assert len(hooked.hooked) == 3
    assert made.get_batch(None, []) == "own"


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
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        before_1860,
        "get_data_iterator",
        lambda schema, args, model, rollout_data: given.update(
            arguments=(args, model, rollout_data), schema=schema
        ),
    )
    schema = mcore_batching.batch.DEFAULT_SCHEMA.declare(
        "bonus", mcore_batching.batch.Kind.PER_SAMPLE
    )
    made = module("rl.batching", *NAMES)
    with mcore_batching.hook(made, schema=schema):
        made.get_data_iterator(1, 2, rollout_data=3)
    assert given == {"arguments": (1, 2, 3), "schema": schema}


def test_importing_the_package_does_not_import_what_hook_needs() -> None:
    code = "import sys, mcore_batching; mcore_batching.hook, mcore_batching.install; "
    code += "print([name for name in ('torch', 'megatron') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=True,
    )
    assert done.stdout.strip() == "[]"
