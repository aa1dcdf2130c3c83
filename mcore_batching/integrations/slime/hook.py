"""`hook`: the engine in slime, miles, or a framework with the same three functions.

    import slime.backends.megatron_utils.data as data
    import slime.backends.megatron_utils.model as model

    hooked = mcore_batching.hook(data, model)   # get_data_iterator; forward_only
    print(hooked)                               # the names that were replaced
    hooked.undo()                               # or: with mcore_batching.hook(data, model): ...

Versions that plan in the rollout manager are hooked there as well, by `hook_schedule`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mcore_batching.flags import LEARNT
from mcore_batching.integrations.replacements import (
    Function,
    Hook,
    HookError,
    Replacement,
    in_place_of,
    refuse_hooked,
)
from mcore_batching.integrations.slime.rollout_manager import framework, planning_modules

if TYPE_CHECKING:
    from mcore_batching.batch import Schema

# First parameters of the functions of slime and miles.
LEADING = {
    "get_data_iterator": (("rollout_data",), ("args", "model", "rollout_data")),
    "forward_only": (("f", "args", "model", "data_iterator", "num_microbatches"),),
    "get_batch": (("data_iterator", "keys"),),
}
NAMES = tuple(LEADING)

_DATA = {"slime": "backends.megatron_utils.data", "miles": "backends.training_utils.data"}
_MODEL = "backends.megatron_utils.model"


def init(args: Any) -> None:
    """`hook` the modules of slime or miles: for ``--custom-megatron-init-path``.

    Under ``dynamic_batch_cost_model: auto`` it also times forward passes: see `.learning`.
    """
    name = framework(_MODEL)
    if name == "miles":  # raises for an older one, which would silently train by its own plan
        planning_modules([name])
    modules = (f"{name}.{each}" for each in (_DATA[name], _MODEL))
    hooked = hook(*map(importlib.import_module, modules))
    if getattr(args, "dynamic_batch_cost_model", None) == LEARNT:
        from mcore_batching.integrations.slime.trainer import timing_passes

        hooked.add(timing_passes(args))
    print(hooked, flush=True)


def hook(*modules: ModuleType, schema: Schema | None = None) -> Hook:
    """Replace ``get_data_iterator`` and ``forward_only`` in a framework.

    Signatures (further parameters are passed on)::

        get_data_iterator(args, model, rollout_data) or (rollout_data)
        forward_only(f, args, model, data_iterator, num_microbatches, ...)
        get_batch(data_iterator, keys, ...)

    The second ``get_data_iterator`` (slime since its pull request 1926) and a ``forward_only`` with
    ``rollout_id`` (miles since 1927) plan in the rollout manager. ``get_batch``, the forward step,
    loss and log-prob functions stay the framework's: see `.trainer`.

    Args:
        modules: those that have the functions, all three between them; beside the first
            ``get_data_iterator`` its class ``DataIterator``.
        schema: the kind of every field that ``get_batch`` reads, your own added by
            `Schema.declare`; None: `mcore_batching.batch.DEFAULT_SCHEMA`.

    Returns:
        the replaced functions; its ``undo``, and the end of its ``with`` block, put the originals
        back.

    Raises:
        HookError: a function is missing, is hooked already, or has another signature.
    """
    # Here, since the rollout manager's process needs neither torch nor Megatron.
    from mcore_batching.batch import DEFAULT_SCHEMA
    from mcore_batching.integrations.slime import trainer

    # All are checked before any is replaced, and replaced together: the framework's own
    # forward_only would take placeholders' outputs for samples'.
    holders = _checked_holders(modules)
    # By parameters, not versions: checkouts are rarely of a release.
    takes = {name: _parameters(getattr(found[0], name)) for name, found in holders.items()}
    is_planned = takes["get_data_iterator"] == ("rollout_data",)
    is_planned |= "rollout_id" in takes["forward_only"]
    given: dict[str, Any] = {"schema": DEFAULT_SCHEMA if schema is None else schema}
    iterators: Function = functools.partial(trainer.get_data_iterator, **given)
    if not is_planned:
        own = getattr(holders["get_data_iterator"][0], "DataIterator", None)
        if own is None:
            raise HookError(
                "DataIterator is not where get_data_iterator is: hook a version of slime that "
                "has it, since September 2025"
            )
        iterators = functools.partial(trainer.planned_data_iterator, **given, iterator=own)
    # get_batch stays: placeholders come out of the iterator as samples that it can pack.
    ours = {"get_data_iterator": iterators, "forward_only": trainer.forward_only}
    found = []
    for name, function in ours.items():
        for module in holders[name]:
            original = getattr(module, name)
            bound = functools.partial(function, original)
            found.append(Replacement(name, original, in_place_of(original, bound)))
    return Hook(modules, found)


def _checked_holders(modules: Sequence[ModuleType]) -> dict[str, list[ModuleType]]:
    """The modules that have each function; one that is hooked, or has other first parameters than
    the known ones, is refused."""
    others = [module for module in modules if not isinstance(module, ModuleType)]
    if others:
        raise HookError(f"expected modules, got {others[0]!r}: import it first")
    holders = {name: [each for each in modules if hasattr(each, name)] for name in NAMES}
    for name, found in holders.items():
        if not found:
            given = ", ".join(module.__name__ for module in modules) or "none was given"
            raise HookError(
                f"{name} is in none of the modules given ({given}): call hook(data, model) with "
                f"those that have {', '.join(NAMES)}"
            )
        for module in found:
            original, where = getattr(module, name), f"{module.__name__}.{name}"
            refuse_hooked(where, original)
            names = _parameters(original)
            if any(names[: len(each)] == each for each in LEADING[name]):
                continue
            known = " or ".join(f"{name}({', '.join(each)}, ...)" for each in LEADING[name])
            shown = f"a {type(original).__name__}"
            if callable(original):
                shown = f"{name}{inspect.signature(original)}"
            raise HookError(
                f"{where} is of an unknown version of slime or miles: expected {known}, found "
                f"{shown}; mcore_batching/integrations/slime/README.md lists versions"
            )
    return holders


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters) if callable(function) else ()
