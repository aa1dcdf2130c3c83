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
from typing import Any, NamedTuple

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


class Case(NamedTuple):
    """How a framework's names are replaced, and modules that have each; versions of a module, as a
    text before and after a change, and the error."""

    framework: str
    hook: Callable[[], Any]
    hooked: dict[str, Sequence[str]]
    refused: Sequence[tuple[str, str, str, str]]


BACKENDS, BALANCING = "slime.backends.megatron_utils", "verl.utils.seqlen_balancing"
TRAINER = ("get_data_iterator", "forward_only")
VERL = ("rearrange_micro_batches", "restore_dynamic_batch")
CLASS, PACKER = ("TokenBasedBatchIterator",), ("get_packer",)
ITERATOR = f"{WORKERS}.worker_utils"
CASES = {
    "slime": Case(
        "slime",
        hook_slime,
        {
            f"{BACKENDS}.data": TRAINER[:1],
            f"{BACKENDS}.model": TRAINER[1:],
            f"{BACKENDS}.actor": TRAINER,
        },
        [
            (
                f"{BACKENDS}.data",
                "get_data_iterator(rollout_data)",
                "get_data_iterator(args, model, batch)",
                r"data\.get_data_iterator cannot be replaced: expected get_data_iterator\(args, "
                r"model, rollout_data\), found get_data_iterator\(args, model, batch\); hook a ver",
            ),
            (
                f"{BACKENDS}.data",
                "def get_data_iterator(",
                "del DataIterator\n\ndef get_data_iterator(args, model, ",
                "DataIterator is not where get_data_iterator is",
            ),
            (
                f"{BACKENDS}.model",
                "(f, args,",
                "(args, f,",
                r"expected forward_only\(f, args, model, data_iterator, num_microbatches, \*arg",
            ),
            (
                f"{BACKENDS}.model",
                "def forward_only",
                "def other",
                r"^forward_only is in none of the modules given \(slime.*data, slime.*model\): call"
                r" hook\(data, model\) with those that have get_data_iterator, forward_only$",
            ),
        ],
    ),
    "miles": Case(
        "miles",
        hook_miles,
        {
            "miles.backends.training_utils.data": TRAINER[:1],
            "miles.backends.megatron_utils.model": TRAINER[1:],
        },
        [
            (
                "miles.backends.training_utils.data",
                "get_data_iterator(args,",
                "get_data_iterator(",
                r"expected get_data_iterator\(args, model, rollout_data\), found get_data_itera",
            ),
        ],
    ),
    "rollout manager": Case(
        "slime",
        hook_schedule,
        dict.fromkeys(("slime.utils.dp_schedule", "slime.ray.rollout"), ("build_dp_schedule",)),
        [
            (
                "slime.utils.dp_schedule",
                "total_lengths, *, ",
                "total_lengths, ",
                r"dp_schedule cannot be replaced: .* found build_dp_schedule\(args, train",
            )
        ],
    ),
    "verl": Case(
        "verl",
        verl.hook,
        {BALANCING: VERL, "verl.workers.engine.utils": VERL},
        [
            (
                BALANCING,
                "min_num_micro_batch=None",
                "least=None",
                "found rearrange_micro_batches.*, least=None",
            ),
        ],
    ),
    "skyrl": Case(
        "skyrl",
        skyrl.hook,
        {ITERATOR: CLASS, f"{WORKERS}.megatron_worker": CLASS},
        [
            (ITERATOR, *change)
            for change in (
                ("TokenBased", "Other", "there is none in this version"),
                ("data, max_tokens_per_microbatch):", "data, cap):", "found __init__.*, cap"),
                ("num_microbatches(self):", "num_microbatches(self, group):", "sync.*group"),
                ("self._token_counts", "self._lengths", "in this order; hook a version"),
                ("batches(self, batches):", "batches(self, outputs):", "batches.*, outputs"),
            )
        ],
    ),
    "nemo_rl": Case(
        "nemo_rl",
        nemo_rl.hook,
        {PACKING: PACKER, f"{PACKING}.algorithms": PACKER},
        [(f"{PACKING}.algorithms", "bin_capacity, collect", "cap, collect", r"found get_pa.*\(al")],
    ),
}


def names_of(module: ModuleType) -> dict[str, Any]:
    """A module's names; without __builtins__, by which copies of globals are found."""
    return {name: value for name, value in vars(module).items() if name != "__builtins__"}


@pytest.mark.parametrize("name", CASES)
def test_names_are_replaced_everywhere_and_put_back(name: str, small: Small, capfd: Any) -> None:
    case = CASES[name]
    small(case.framework)
    modules = [importlib.import_module(each) for each in case.hooked]
    before = list(map(names_of, modules))
    # Ray makes some of the globals of the rollout manager's class.
    copies = [dict(vars(module)) for module in modules]
    with case.hook() as hooked:
        for module, own, names in zip(modules, before, case.hooked.values(), strict=True):
            assert {each for each in own if vars(module)[each] is not own[each]} == {*names}
        names = [f"{module}.{each}" for module, of in case.hooked.items() for each in of]
        assert sorted(hooked.hooked) == sorted(names * (1 + (name == "rollout manager")))
        if name == "rollout manager":  # every process's start may call it
            assert capfd.readouterr().out.strip() == str(hooked)
            assert case.hook() is None
        else:
            with pytest.raises(HookError, match="hooked already"):
                case.hook()
    assert list(map(names_of, modules)) == before
    assert [{**copy, **own} for copy, own in zip(copies, before, strict=True)] == copies


@pytest.mark.parametrize(
    ("name", "fault"), [(name, i) for name, case in CASES.items() for i in range(len(case.refused))]
)
def test_other_versions_are_refused_by_name(name: str, fault: int, small: Small) -> None:
    """Before anything is replaced."""
    case = CASES[name]
    module, before, after, message = case.refused[fault]
    changed = rewrite(module, small(case.framework), before, after)
    modules = [importlib.import_module(each) for each in case.hooked]
    own = list(map(names_of, (changed, *modules)))
    with pytest.raises(HookError, match=message) as caught:
        case.hook()
    assert isinstance(caught.value, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert list(map(names_of, (changed, *modules))) == own


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
    assert {case.framework for case in CASES.values()} == {*SMALL}
