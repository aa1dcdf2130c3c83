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
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mcore_batching.flags import LEARNT
from mcore_batching.integrations.replacements import (
    Function,
    Hook,
    HookError,
    parameters_of,
    replacing,
)
from mcore_batching.integrations.slime.rollout_manager import (
    framework,
    hook_schedule,
    planning_modules,
)

if TYPE_CHECKING:
    from mcore_batching.batch import Schema

__all__ = ["Hook", "HookError", "hook", "hook_schedule", "init"]

NAMES = ("get_data_iterator", "forward_only")

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
        from megatron.core.pipeline_parallel import schedules

        from mcore_batching.integrations.slime.trainer import PassTimes

        hooked.add(replacing(schedules, "forward_step", PassTimes(args).forward_step))
    print(hooked, flush=True)


def hook(*modules: ModuleType, schema: Schema | None = None) -> Hook:
    """Replace ``get_data_iterator`` and ``forward_only`` in a framework.

    Signatures, which distinguish versions::

        get_data_iterator(rollout_data)                     slime since its pull request 1926
        get_data_iterator(args, model, rollout_data)
        forward_only(f, args, model, data_iterator, num_microbatches, rollout_id, ...)  miles
        forward_only(f, args, model, data_iterator, num_microbatches, ...)

    Slime since 1926 and miles since 1927 plan in the rollout manager. ``get_batch``, the forward
    step, loss and log-prob functions stay the framework's: see `.trainer`.

    Args:
        modules: those that have the functions, both between them; beside the second
            ``get_data_iterator`` its class ``DataIterator``, unless it is miles'.
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

    data, model = (_module_with(name, modules) for name in NAMES)
    declared = DEFAULT_SCHEMA if schema is None else schema
    # By parameters, not versions: checkouts are rarely of a release.
    taken, passed = (
        [each.name for each in parameters_of(getattr(module, name))]
        for module, name in zip((data, model), NAMES, strict=True)
    )
    if taken[:1] == ["rollout_data"]:
        iterators: Function = functools.partial(trainer.listed_iterators, declared)
    elif "rollout_id" in passed:
        iterators = functools.partial(trainer.miles_iterators, declared)
    elif hasattr(data, "DataIterator"):
        iterators = functools.partial(trainer.planned_iterators, declared, data.DataIterator)
    else:
        raise HookError(
            "DataIterator is not where get_data_iterator is: hook a version of slime that has it, "
            "since September 2025"
        )
    # Both are checked before either is replaced, and replaced together: the framework's own
    # forward_only would take placeholders' outputs for samples'. get_batch stays: placeholders
    # come out of the iterator as samples that it can pack.
    ours = iterators, trainer.forward_only
    return Hook(modules, list(map(replacing, (data, model), NAMES, ours)))


def _module_with(name: str, modules: Sequence[ModuleType]) -> Any:
    """The first of the modules that has a function."""
    for module in modules:
        if not isinstance(module, ModuleType):
            raise HookError(f"expected modules, got {module!r}: import it first")
        if hasattr(module, name):
            return module
    given = ", ".join(module.__name__ for module in modules) or "none was given"
    raise HookError(
        f"{name} is in none of the modules given ({given}): call hook(data, model) with those that "
        f"have {', '.join(NAMES)}"
    )
