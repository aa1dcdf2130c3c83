"""`hook`: the engine in slime, miles, or a framework with the same three functions.

    import slime.backends.megatron_utils.data as data
    import slime.backends.megatron_utils.model as model

    hooked = mcore_batching.hook(data, model)   # get_data_iterator, get_batch; forward_only
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
    replacing,
)
from mcore_batching.integrations.slime.rollout_manager import framework, planning_modules

if TYPE_CHECKING:
    from mcore_batching.batch import Schema

NAMES = ("get_data_iterator", "forward_only", "get_batch")
# First parameters of the functions of slime and miles where the rollout manager plans.
LEADING = {
    "get_data_iterator": (("rollout_data",), ("args", "model", "rollout_data")),
    "forward_only": (("f", "args", "model", "data_iterator", "num_microbatches"),),
    "get_batch": (("data_iterator", "keys"),),
}

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
    """Replace ``get_data_iterator``, ``forward_only`` and ``get_batch`` in a framework.

    Signatures (parameters with a default may be missing, as in older versions)::

        get_data_iterator(args, model, rollout_data)
        forward_only(f, args, model, data_iterator, num_microbatches, store_prefix="")
        get_batch(data_iterator, keys, pad_multiplier=128, qkv_format="thd", allgather_cp=False)

    or ``get_data_iterator(rollout_data)`` (slime since its pull request 1926) or
    ``forward_only(..., rollout_id)`` (miles since 1927), which plan in the rollout manager; then
    ``get_batch`` stays the framework's, and further parameters are passed on. The framework's
    forward step, loss and log-prob functions stay in all: see `.before_1860` and `.trainer`.

    Args:
        modules: those that have the functions, all three between them.
        schema: the kind of every field that ``get_batch`` reads, your own added by
            `Schema.declare`; None: `mcore_batching.batch.DEFAULT_SCHEMA`.

    Returns:
        the replaced functions; its ``undo``, and the end of its ``with`` block, put the originals
        back.

    Raises:
        HookError: a function is missing, is hooked already, or has another signature.
    """
    from mcore_batching.batch import DEFAULT_SCHEMA

    schema = DEFAULT_SCHEMA if schema is None else schema
    holders = _holders(modules)
    # By parameters, not versions: checkouts are rarely of a release.
    takes = {name: _parameters(getattr(found[0], name)) for name, found in holders.items()}
    is_planned = takes["get_data_iterator"] == ("rollout_data",)
    is_planned |= "rollout_id" in takes["forward_only"]
    in_place = _of_manager if is_planned else _of_trainer
    # All are checked before any is replaced, and replaced together: the framework's own
    # forward_only would take placeholders' outputs for samples'.
    found = [in_place(name, module, schema) for name in NAMES for module in holders[name]]
    return Hook(modules, [each for each in found if each is not None])


def _holders(modules: Sequence[ModuleType]) -> dict[str, list[ModuleType]]:
    others = [module for module in modules if not isinstance(module, ModuleType)]
    if others:
        raise HookError(f"expected modules, got {others[0]!r}: import it first")
    found = {name: [each for each in modules if hasattr(each, name)] for name in NAMES}
    for name, holders in found.items():
        if not holders:
            given = ", ".join(module.__name__ for module in modules) or "none was given"
            raise HookError(
                f"{name} is in none of the modules given ({given}): call hook(data, model) with "
                f"those that have {', '.join(NAMES)}"
            )
    return found


def _of_trainer(name: str, module: ModuleType, schema: Schema) -> Replacement:
    """For a framework that plans where it trains."""
    from mcore_batching.integrations.slime import before_1860

    ours: Function = getattr(before_1860, name)
    if name == "get_data_iterator":
        ours = functools.partial(ours, schema)
    return replacing(
        module, name, lambda original, *given, **by_name: ours(*given, **by_name), like=ours
    )


def _of_manager(name: str, module: ModuleType, schema: Schema) -> Replacement | None:
    """For a framework that plans in its rollout manager; None: its own stays."""
    from mcore_batching.integrations.slime import trainer

    original, where, known = getattr(module, name), f"{module.__name__}.{name}", LEADING[name]
    refuse_hooked(where, original)
    names = _parameters(original)
    if not any(names[: len(each)] == each for each in known):
        expected = " or ".join(f"{name}({', '.join(each)}, ...)" for each in known)
        found = str(inspect.signature(original)) if callable(original) else type(original).__name__
        raise HookError(
            f"{where} is of an unknown version of slime or miles: expected {expected}, found "
            f"{found}; mcore_batching/integrations/slime/README.md lists versions"
        )
    # Placeholders come out of the iterator as samples that its own can pack.
    if name == "get_batch":
        return None
    ours = functools.partial(getattr(trainer, name), original)
    if name == "get_data_iterator":
        ours = functools.partial(ours, schema=schema)
    return Replacement(
        name, original, in_place_of(original, trainer.checking_model(original, ours))
    )


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters) if callable(function) else ()
