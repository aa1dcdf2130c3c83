"""`install`: the plugin in a stock training script, without a patch.

Without the plugin's flags on the command line nothing is replaced. With others than
``--use-dynamic-batch-size`` only the parser learns them, and ``--dynamic-batch-data`` brings its
datasets, padded as stock code needs them. `Installation` lists what was replaced and undoes it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mcore_batching.flags import PREFIX
from mcore_batching.integrations.megatron_lm.arguments import (
    FLAG,
    add_arguments,
    check_arguments,
    check_training,
    is_on,
)
from mcore_batching.integrations.megatron_lm.forward_backward import wrap_forward_backward
from mcore_batching.integrations.megatron_lm.learnt_costs import take_over_learnt_costs
from mcore_batching.integrations.megatron_lm.script_batches import (
    declare_batch_fields,
    restore_batches,
)
from mcore_batching.integrations.megatron_lm.sft.provider import datasets_provider_for
from mcore_batching.integrations.megatron_lm.step_log import with_batching_statistics
from mcore_batching.megatron import compat
from mcore_batching.megatron.attention.packed_attention import PackedAttention
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.job.options import Options

_installed: Installation | None = None


class Installation:
    """The names that `install` replaced.

    Attributes:
        hooked: dotted names of what was replaced, in order.
    """

    def __init__(self) -> None:
        self.hooked: list[str] = []
        self._parts: set[Callable[[Installation], None]] = set()
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._is_undone = False

    def __str__(self) -> str:
        if not self.hooked:
            return f"mcore_batching: nothing hooked ({FLAG} is not given)"
        return "mcore_batching: hooked " + ", ".join(self.hooked)

    def replace(self, module: Any, name: str, replacement: Any) -> None:
        """Replace a module's name, and remember the original."""
        original = getattr(module, name)
        ours = replacement if inspect.isclass(original) else self._undoable(original, replacement)
        self._replaced.append((module, name, original, ours))
        self.hooked.append(f"{module.__name__}.{name}")
        setattr(module, name, ours)

    def _undoable(self, original: Any, replacement: Any) -> Callable[..., Any]:
        """A function that is the replacement until `undo`, then the original.

        Modules that imported it keep a reference that `undo` cannot reach.
        """

        @functools.wraps(original)
        def current(*arguments: Any, **options: Any) -> Any:
            function = original if self._is_undone else replacement
            return function(*arguments, **options)

        return current

    def _hook(self, parts: Sequence[Callable[[Installation], None]]) -> None:
        """Hook the parts that are not hooked yet: all, or after an error none."""
        before = len(self._replaced)  # what an earlier call hooked stays, even after an error
        missing = [part for part in parts if part not in self._parts]
        try:
            for part in missing:
                part(self)
        except BaseException:
            self._put_back(before)
            raise
        self._parts |= set(missing)

    def undo(self) -> None:
        """Put the originals back. A second call does nothing.

        Where somebody wrapped a replacement since, the wrapper stays and calls Megatron's function.
        """
        global _installed
        self._put_back(0)
        self._is_undone = True
        if _installed is self:
            restore_batches()
            _installed = None

    def _put_back(self, kept: int) -> None:
        while len(self._replaced) > kept:
            module, name, original, ours = self._replaced.pop()
            # Somebody's wrapper stays; ours inside it calls the original once undone.
            if getattr(module, name, None) is ours:
                setattr(module, name, original)
        del self.hooked[kept:]


def install(
    arguments: Sequence[str] | None = None, *, batch_fields: Sequence[str] | None = None
) -> Installation:
    """Hook the plugin into ``megatron.training``, if the command line has its flags.

    Call it in the first lines of a training script, or run the unchanged script by
    ``python -m mcore_batching.run SCRIPT``. A second call hooks what is missing and returns the
    same installation. After an error nothing is hooked.

    Args:
        arguments: the command line; None: this process's.
        batch_fields: names of the values that the script's ``get_batch`` returns, in order; needed
            only if they cannot be read from its forward step.

    Returns:
        the replaced names, to be printed.

    Raises:
        DynamicBatchArgumentError: this Megatron lacks ``megatron.training`` or one of its names;
            the flag is given beside ``--yaml-cfg``.
    """
    global _installed
    # argparse takes --flag=value, too.
    given = [word.split("=", 1)[0] for word in (sys.argv[1:] if arguments is None else arguments)]
    enabled = FLAG in given
    if enabled and "--yaml-cfg" in given:
        raise DynamicBatchArgumentError(
            f"--yaml-cfg overrides the command line, {FLAG} included: unset it, and give flags "
            "instead"
        )
    parts: list[Callable[[Installation], None]] = []
    if enabled or any(word.startswith((PREFIX, "--max-tokens-per-gpu")) for word in given):
        parts.append(_hook_arguments)
    if f"{PREFIX}data" in given:
        parts.append(_hook_datasets)
    if enabled:
        parts.append(_hook_training)
    if enabled and batch_fields is not None:
        declare_batch_fields(batch_fields)
    installation = _installed or Installation()
    installation._hook(parts)
    if installation._parts:
        _installed = installation
    return installation


def _hook_arguments(installation: Installation) -> None:
    arguments = _module("arguments")
    installation.replace(
        arguments,
        "add_megatron_arguments",
        _then(_original(arguments, "add_megatron_arguments"), add_arguments),
    )
    validate = _original(arguments, "validate_args")

    @functools.wraps(validate)
    def validate_args(args: Any, *rest: Any, **options: Any) -> Any:
        validated = validate(args, *rest, **options)
        check_arguments(args)
        # Only now the arguments say whether costs are learnt. Some jobs validate them twice.
        checkpointing = _module("checkpointing")
        name = f"{checkpointing.__name__}.check_checkpoint_args"
        if Options.of(args).learns_cost_model and is_on(args) and name not in installation.hooked:
            check = _original(checkpointing, "check_checkpoint_args")

            @functools.wraps(check)
            def check_checkpoint_args(saved: Any, *rest: Any, **options: Any) -> Any:
                checked = check(saved, *rest, **options)
                take_over_learnt_costs(args, saved)
                return checked

            installation.replace(checkpointing, "check_checkpoint_args", check_checkpoint_args)
        return validated

    for module in compat.scripts.modules_with_validate_args(arguments, _module("initialize")):
        installation.replace(module, "validate_args", validate_args)


def _hook_datasets(installation: Installation) -> None:
    training = _module("training")
    build = _original(training, "build_train_valid_test_data_iterators")

    @functools.wraps(build)
    def build_train_valid_test_data_iterators(provider: Any) -> Any:
        from megatron.training import get_args

        return build(datasets_provider_for(get_args(), provider))

    installation.replace(
        training, "build_train_valid_test_data_iterators", build_train_valid_test_data_iterators
    )


def _hook_training(installation: Installation) -> None:
    training = _module("training")
    installation.replace(
        training,
        "get_forward_backward_func",
        _then(_original(training, "get_forward_backward_func"), wrap_forward_backward),
    )
    for name in ("train", "evaluate"):
        installation.replace(training, name, _checked(_original(training, name)))
    log = _original(training, "training_log")

    @functools.wraps(log)
    def training_log(loss_dict: Any, *rest: Any, **options: Any) -> Any:
        return log(with_batching_statistics(loss_dict), *rest, **options)

    installation.replace(training, "training_log", training_log)
    # Megatron's attention without Transformer Engine would let tokens see other samples of a row.
    installation.replace(*compat.layers.local_core_attention_name(), PackedAttention)


def _then(function: Callable[..., Any], after: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def composed(*arguments: Any, **options: Any) -> Any:
        return after(function(*arguments, **options))

    return composed


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """``train`` or ``evaluate``, behind a check of the script."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*arguments: Any, **options: Any) -> Any:
        given = signature.bind(*arguments, **options).arguments
        check_training(given["forward_step_func"], given.get("process_non_loss_data_func"))
        return function(*arguments, **options)

    return checked


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"megatron.training.{name}")
    except ImportError as error:
        raise DynamicBatchArgumentError(
            f"cannot import megatron.training ({error}): install megatron-core 0.19 or later, or "
            "put a Megatron-LM checkout on PYTHONPATH"
        ) from error


def _original(module: Any, name: str) -> Callable[..., Any]:
    if not hasattr(module, name):
        raise DynamicBatchArgumentError(
            f"{module.__name__} has no {name}: use Megatron-LM 0.16 to 0.19, or hook it by hand as "
            "in patches/"
        )
    original: Callable[..., Any] = getattr(module, name)
    return original
