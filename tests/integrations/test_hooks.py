"""Functions of every framework are replaced wherever they are, refused in other versions, and put
back; frameworks' own tests pass with ours in place."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from frameworks import PACKING, TRAINERS, WORKERS, rewrite, source_of, trainer_of
from kit.stand_ins import forget, module_of

import mcore_batching
from mcore_batching.integrations import nemo_rl, skyrl, verl
from mcore_batching.integrations.replacements import Hook, HookError, replacing
from mcore_batching.integrations.slime import hook_schedule, init

Small = Callable[..., Path]


def hook_trainer(framework: str) -> Hook:
    return mcore_batching.hook(*vars(trainer_of(framework)).values())


BALANCING = "verl.utils.seqlen_balancing"
(DATA, MODEL), (DATA_OF_MILES, MODEL_OF_MILES) = TRAINERS.values()
ACTOR = "slime.backends.megatron_utils.actor"
SCHEDULE, ITERATOR, PACKER = "slime.utils.dp_schedule", f"{WORKERS}.worker_utils", PACKING
TRAINER = ("get_data_iterator", "forward_only")
VERL = ("rearrange_micro_batches", "restore_dynamic_batch")
BATCHES, PACKERS = ("TokenBasedBatchIterator",), ("get_packer",)
CASES: dict[str, tuple[str, Callable[[], Any], dict[str, Sequence[str]]]] = {
    "slime": (
        "slime",
        functools.partial(hook_trainer, "slime"),
        {DATA: TRAINER[:1], MODEL: TRAINER[1:], ACTOR: TRAINER},
    ),
    "miles": (
        "miles",
        functools.partial(hook_trainer, "miles"),
        {DATA_OF_MILES: TRAINER[:1], MODEL_OF_MILES: TRAINER[1:]},
    ),
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
    (
        "miles",
        DATA_OF_MILES,
        "iterator(args,",
        "iterator(",
        r"model, rollout_data\), found get_data_it",
    ),
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
    with pytest.raises(HookError, match=message):
        hook()
    assert list(map(names_of, modules)) == own


def test_only_modules_are_taken() -> None:
    with pytest.raises(HookError, match=r"expected modules, got 'slime\.data': import it"):
        mcore_batching.hook("slime.data")  # type: ignore[arg-type]
    with pytest.raises(HookError, match="none was given"):
        mcore_batching.hook()


def module_from(source: str) -> Any:
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
    made = module_from(f"def function{theirs}: ..." if theirs else "import sys as function")
    found = r"function\(" if theirs else "a module"
    refusal = pytest.raises(
        HookError, match=rf"rl.function cannot be replaced: expected function\(.*\), found {found}"
    )
    with refusal if is_refused else contextlib.nullcontext():
        replacing(made, "function", function)


def test_a_decorated_function_is_read_through_its_decorator() -> None:
    made = module_from("def function(first): ...")
    made.function = torch.no_grad()(made.function)
    with Hook([made], [replacing(made, "function", ours)]):
        assert str(inspect.signature(made.function)) == "(first)"


def test_what_somebody_replaced_since_is_left_alone() -> None:
    """A wrapper of ours calls the framework's own again, which can be hooked again."""
    made = module_from("def function(first): return 'own'")
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
    made = module_from("def function(first): return 'own'\ndef call(): return function(1)")
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


WRAPPER = "mcore_batching.integrations.slime.rollout"


@pytest.mark.parametrize(
    ("framework", "legacy", "default"),
    [
        ("slime", "0", "sglang_rollout"),
        ("miles", "1", "sglang_rollout"),
        ("miles", "0", "inference_rollout.inference_rollout_common"),
    ],
)
def test_the_rollout_function_is_the_default_and_hooks_the_plan_of_its_process(
    small: Small, framework: str, legacy: str, default: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slime is installed, too, where it is miles that imports the rollout function."""
    small("slime", framework)
    monkeypatch.setenv("MILES_USE_LEGACY_ROLLOUT_V1", legacy)
    if framework == "miles":
        importlib.import_module("miles.utils.misc")
    try:
        wrapper = importlib.import_module(WRAPPER)
    finally:
        sys.modules.pop(WRAPPER, None)
    assert hasattr(sys.modules[f"{framework}.utils.dp_schedule"].build_dp_schedule, "__wrapped__")
    assert wrapper.generate_rollout in vars(sys.modules[f"{framework}.rollout.{default}"]).values()
    assert inspect.isclass(wrapper.generate_rollout) == ("inference" in default)


@pytest.mark.parametrize("name", TRAINERS)
def test_the_framework_calls_init(small: Small, capfd: Any, name: str) -> None:
    """Both are installed, but this one is loaded."""
    small(*TRAINERS)
    found = trainer_of(name)
    init(SimpleNamespace())
    assert f"hooked {found.data.__name__}.get_data_iterator" in capfd.readouterr().out
    assert hasattr(found.data.get_data_iterator, "__wrapped__")
    (other,) = {*TRAINERS} - {name}
    assert not [each for each in sys.modules if each.startswith(f"{other}.backends")]
    with pytest.raises(HookError, match="hooked already"):
        init(SimpleNamespace())


def test_all_plans_there_are_are_replaced(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """miles without one would train by its own plan, slime without one plans where it trains."""
    folder = small(*TRAINERS)
    for names in (["miles", "slime"], ["miles"]):
        with hook_schedule() or pytest.fail("nothing is hooked") as hooked:
            replaced = [f"{name}.utils.dp_schedule.build_dp_schedule" for name in names]
            assert sorted(hooked.hooked) == replaced
        (folder / "slime" / "utils" / "dp_schedule.py").unlink(missing_ok=True)
        forget(*TRAINERS)
    (folder / "miles" / "utils" / "dp_schedule.py").unlink()
    leave_out = r"slime\.utils\.dp_schedule .*leave hook_schedule out.*; this miles has no"
    with pytest.raises(HookError, match=leave_out):
        hook_schedule()
    trainer_of("miles")
    with pytest.raises(HookError, match=r"this miles has no miles\.utils\.dp_schedule .*1927"):
        init(SimpleNamespace())
    forget(*TRAINERS)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert hook_schedule() is None
    with pytest.raises(HookError, match=r"neither slime nor miles is installed: for another"):
        init(SimpleNamespace())


OWN_TESTS: dict[str, tuple[Callable[[], Any], str, Sequence[str], int]] = {
    "slime": (hook_schedule, "tests/test_dp_schedule.py", (), 6),
    "miles": (hook_schedule, "tests/fast/utils/test_dp_schedule.py", (), 15),
    "skyrl": (
        skyrl.hook,
        "tests/backends/skyrl_train/test_token_based_batching_utils.py",
        ("TestTokenBasedBatchIterator", "TestBalancedBinpacking"),
        16,
    ),
    "nemo_rl": (
        nemo_rl.hook,
        "tests/unit/data/packing/test_algorithms.py",
        ("TestSequencePacker",),
        1,
    ),
}
"""By framework: its own tests of what is replaced, their classes if any, and their least number;
`test_verl` has verl's."""


@pytest.mark.parametrize("framework", OWN_TESTS)
def test_frameworks_own_tests_pass_with_ours_in_place(
    framework: str, own: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own(framework)
    monkeypatch.setitem(vars(pytest.mark), "unit", lambda test: test)
    hook, tests, classes, least = OWN_TESTS[framework]
    path = source_of(framework) / tests
    if not path.exists():
        pytest.skip(f"{path} is not in the checkout")
    with hook():
        module = module_of(path)
        holders = [getattr(module, name)() for name in classes] or [module]
        found = [getattr(each, name) for each in holders for name in dir(each) if "test_" in name]
        if framework == "nemo_rl":  # the others try its packers one by one
            every = [*importlib.import_module(f"{PACKING}.algorithms").PackingAlgorithm]
            found = [functools.partial(holders[0].test_get_packer, 100, every)]
        assert len(found) >= least
        for test in found:
            test()
