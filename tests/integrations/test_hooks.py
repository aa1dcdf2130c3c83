"""Functions of every framework are replaced wherever they are, refused in other versions, and put
back."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from frameworks import PACKING, SMALL, WORKERS, rewrite

import mcore_batching
from mcore_batching.integrations import nemo_rl, skyrl, verl
from mcore_batching.integrations.replacements import Hook, HookError, replacing
from mcore_batching.integrations.slime import hook_schedule

Small = Callable[..., Path]


def hook_slime() -> Hook:
    data, model = (importlib.import_module(f"{BACKENDS}.{name}") for name in ("data", "model"))
    return mcore_batching.hook(data, model)


def hook_miles() -> Hook:
    data = importlib.import_module("miles.backends.training_utils.data")
    model = importlib.import_module("miles.backends.megatron_utils.model")
    return mcore_batching.hook(data, model)


BACKENDS, BALANCING = "slime.backends.megatron_utils", "verl.utils.seqlen_balancing"
DATA, MODEL = f"{BACKENDS}.data", f"{BACKENDS}.model"
MILES = ("miles.backends.training_utils.data", "miles.backends.megatron_utils.model")
SCHEDULE, ITERATOR, PACKER = "slime.utils.dp_schedule", f"{WORKERS}.worker_utils", PACKING
TRAINER = ("get_data_iterator", "forward_only")
VERL = ("rearrange_micro_batches", "restore_dynamic_batch")
BATCHES, PACKERS = ("TokenBasedBatchIterator",), ("get_packer",)
CASES: dict[str, tuple[str, Callable[[], Any], dict[str, Sequence[str]]]] = {
    "slime": (
        "slime",
        hook_slime,
        {DATA: TRAINER[:1], MODEL: TRAINER[1:], f"{BACKENDS}.actor": TRAINER},
    ),
    "miles": ("miles", hook_miles, {MILES[0]: TRAINER[:1], MILES[1]: TRAINER[1:]}),
    "rollout manager": (
        "slime",
        hook_schedule,
        dict.fromkeys((SCHEDULE, "slime.ray.rollout"), ("build_dp_schedule",)),
    ),
    "verl": ("verl", verl.hook, {BALANCING: VERL, "verl.workers.engine.utils": VERL}),
    "skyrl": ("skyrl", skyrl.hook, {ITERATOR: BATCHES, f"{WORKERS}.megatron_worker": BATCHES}),
    "nemo_rl": ("nemo_rl", nemo_rl.hook, {PACKER: PACKERS, f"{PACKER}.algorithms": PACKERS}),
}
"""The framework, how it is hooked, and the names that are replaced in each module."""
SIGNATURE = (
    r"data\.get_data_iterator cannot be replaced: expected get_data_iterator\(args, model, "
    r"rollout_data\), found get_data_iterator\(args, model, batch\); hook a version"
)
NOWHERE = (
    r"^forward_only is in none of the modules given \(slime.*data, slime.*model\): call"
    r" hook\(data, model\) with those that have get_data_iterator, forward_only$"
)
NO_CLASS = "del DataIterator\n\ndef get_data_iterator(args, model, "
FAULTS = [
    ("slime", DATA, "iterator(rollout_data)", "iterator(args, model, batch)", SIGNATURE),
    ("slime", DATA, "def get_data_iterator(", NO_CLASS, "DataIterator is not where get_data_iter"),
    ("slime", MODEL, "(f, args,", "(args, f,", r"expected forward_only\(f, args, model, data_i"),
    ("slime", MODEL, "def forward_only", "def other", NOWHERE),
    ("miles", MILES[0], "iterator(args,", "iterator(", r"model, rollout_data\), found get_data_it"),
    ("rollout manager", SCHEDULE, "lengths, *, ", "lengths, ", r"dp_schedule cannot.*found build_"),
    ("verl", BALANCING, "min_num_micro_batch=None", "least=None", "found rearrange.*, least=None"),
    ("skyrl", ITERATOR, "TokenBased", "Other", "there is none in this version"),
    ("skyrl", ITERATOR, "data, max_tokens_per_microbatch):", "data, cap):", "found __init__.*cap"),
    ("skyrl", ITERATOR, "num_microbatches(self):", "num_microbatches(self, group):", "sync.*group"),
    ("skyrl", ITERATOR, "self._token_counts", "self._lengths", "in this order; hook a version"),
    ("skyrl", ITERATOR, "batches(self, batches)", "batches(self, outputs)", "batches.*, outputs"),
    ("nemo_rl", f"{PACKER}.algorithms", "bin_capacity, coll", "cap, coll", r"found get_pa.*\(al"),
]
"""A version of a module: a text before and after a change, and the error."""


def names_of(module: ModuleType) -> dict[str, Any]:
    """A module's names; without __builtins__, by which copies of globals are found."""
    return {name: value for name, value in vars(module).items() if name != "__builtins__"}


@pytest.mark.parametrize("name", CASES)
def test_names_are_replaced_everywhere_and_put_back(name: str, small: Small, capfd: Any) -> None:
    framework, hook, replaced = CASES[name]
    small(framework)
    modules = [importlib.import_module(each) for each in replaced]
    before = list(map(names_of, modules))
    # Ray makes some of the globals of the rollout manager's class.
    copies = [dict(vars(module)) for module in modules]
    with hook() as hooked:
        for module, own, names in zip(modules, before, replaced.values(), strict=True):
            assert {each for each in own if vars(module)[each] is not own[each]} == {*names}
        names = [f"{module}.{each}" for module, of in replaced.items() for each in of]
        assert sorted(hooked.hooked) == sorted(names * (1 + (name == "rollout manager")))
        if name == "rollout manager":  # every process's start may call it
            assert capfd.readouterr().out.strip() == str(hooked)
            assert hook() is None
        else:
            with pytest.raises(HookError, match="hooked already"):
                hook()
    assert list(map(names_of, modules)) == before
    assert [{**copy, **own} for copy, own in zip(copies, before, strict=True)] == copies


@pytest.mark.parametrize(("name", "module", "before", "after", "message"), FAULTS)
def test_other_versions_are_refused_by_name(
    name: str, module: str, before: str, after: str, message: str, small: Small
) -> None:
    """Before anything is replaced."""
    framework, hook, replaced = CASES[name]
    changed = rewrite(module, small(framework), before, after)
    modules = [changed, *map(importlib.import_module, replaced)]
    own = list(map(names_of, modules))
    with pytest.raises(HookError, match=message) as caught:
        hook()
    assert isinstance(caught.value, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert list(map(names_of, modules)) == own


def test_only_modules_are_taken() -> None:
    with pytest.raises(HookError, match=r"expected modules, got 'slime\.data': import it"):
        mcore_batching.hook("slime.data")  # type: ignore[arg-type]
    with pytest.raises(HookError, match="none was given"):
        mcore_batching.hook()


def module_of(source: str) -> Any:
    made = ModuleType("rl")
    exec(source, vars(made))
    return made


def ours(original: Any, first: int, second: int = 2, *, third: int = 3) -> Any:
    return "ours", original


def passing_on(original: Any, first: int, *more: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "theirs", "is_refused"),
    [
        (ours, "(first, second=2, *, third=3)", False),
        (ours, "(first: str, second: str = 2) -> int", False),  # older, and annotated
        (ours, "(first)", False),
        (ours, None, True),  # no function
        (ours, "()", True),
        (ours, "(other, second=2)", True),
        (ours, "(first, second=5)", True),
        (ours, "(first, second)", True),
        (ours, "(first, *, second=2)", True),
        (ours, "(first, second=2, *, third=3, more=4)", True),
        (passing_on, "(first, more, less)", False),
        (passing_on, "(second, first)", True),
        (passing_on, "()", True),
    ],
)
def test_ours_takes_every_call_that_a_replaced_function_takes(
    function: Any, theirs: str | None, is_refused: bool
) -> None:
    made = module_of(f"def function{theirs}: ..." if theirs else "import sys as function")
    found = r"function\(" if theirs else "a module"
    refusal = pytest.raises(
        HookError, match=rf"rl.function cannot be replaced: expected function\(.*\), found {found}"
    )
    with refusal if is_refused else contextlib.nullcontext():
        replacing(made, "function", function)


def test_a_decorated_function_is_read_through_its_decorator() -> None:
    made = module_of("def function(first): ...")
    made.function = torch.no_grad()(made.function)
    with Hook([made], [replacing(made, "function", ours)]):
        assert str(inspect.signature(made.function)) == "(first)"


def test_what_somebody_replaced_since_is_left_alone() -> None:
    """A wrapper of ours calls the framework's own again, which can be hooked again."""
    made = module_of("def function(first): return 'own'")
    hooked = Hook([made], [replacing(made, "function", ours)])
    replaced = made.function

    @functools.wraps(replaced)
    def wrapper(first: Any) -> Any:
        return replaced(first)

    made.function = wrapper
    with pytest.raises(HookError, match="hooked already"):
        replacing(made, "function", ours)
    hooked.undo()
    hooked.undo()
    assert made.function is wrapper
    assert made.function(1) == "own"
    with Hook([made], [replacing(made, "function", ours)]):
        assert made.function(1) == ("ours", wrapper)
    assert made.function is wrapper


def test_modules_imported_later_and_copies_of_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    """``from .data import function`` while it is hooked; Ray sends classes by value, with copies of
    their globals."""
    made = module_of("def function(first): return 'own'\ndef call(): return function(1)")
    own, other = made.function, object()
    names = ("rl_actor", "rl_late")
    actor, late = modules = [ModuleType(name) for name in names]
    for name, module in zip(names, modules, strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "rl_lazy", object())  # as some packages' lazy modules are
    actor.function = other  # type: ignore[attr-defined]
    copied = {"function": own, "__name__": "rl", "__builtins__": {}}
    sent = FunctionType(made.call.__code__, copied)
    saved = {"function": own}  # somebody's own note of it
    hooked = Hook([made], [replacing(made, "function", ours)], copies=True)
    assert hooked.hooked == ["rl.function"] * 2
    late.function = made.function  # type: ignore[attr-defined]
    assert sent() == made.call() == ("ours", own)
    assert (actor.function, saved["function"]) == (other, own)
    hooked.undo()
    assert sent() == made.call() == "own"
    assert late.function is made.function is own


def test_every_framework_is_hooked() -> None:
    assert {framework for framework, *_ in CASES.values()} == {*SMALL}
