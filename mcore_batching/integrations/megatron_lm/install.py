"""`install`: the plugin in a stock training script, without a patch.

Without the plugin's flags on the command line nothing is replaced. With others than
``--use-dynamic-batch-size`` only the parser learns them. The `Hook` lists what was replaced and
undoes it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.models import backends

from mcore_batching.flags import PREFIX, add_dynamic_batch_arguments
from mcore_batching.integrations.megatron_lm.arguments import check_arguments, check_training
from mcore_batching.integrations.megatron_lm.forward_backward import (
    with_batching_statistics,
    wrap_forward_backward,
)
from mcore_batching.integrations.megatron_lm.script_batches import FLAG, installation
from mcore_batching.integrations.replacements import Function, Hook
from mcore_batching.megatron.attention import PackedAttention
from mcore_batching.megatron.errors import DynamicBatchArgumentError


def install(arguments: Sequence[str] | None = None) -> Hook:
    """Hook the plugin into ``megatron.training``, if the command line has its flags.

    Call it in the first lines of a training script, or run the unchanged script by
    ``python -m mcore_batching.run SCRIPT``. A second call hooks what is missing and returns the
    same installation. After an error nothing is hooked.

    Args:
        arguments: the command line; None: this process's.

    Returns:
        the replaced names, to be printed.

    Raises:
        DynamicBatchArgumentError: this Megatron lacks ``megatron.training`` or one of its names;
            the flag is given beside ``--yaml-cfg``.
    """
    # argparse takes --flag=value, too.
    given = [word.split("=", 1)[0] for word in (sys.argv[1:] if arguments is None else arguments)]
    if FLAG in given and "--yaml-cfg" in given:
        raise DynamicBatchArgumentError(
            f"--yaml-cfg overrides the command line, {FLAG} included: give flags instead"
        )
    # All names are looked up before one is replaced: after an error nothing is hooked.
    found = list(_replaced(given))
    for module, name, _ in found:
        if not hasattr(module, name):
            raise DynamicBatchArgumentError(
                f"{module.__name__} has no {name}: use Megatron-LM 0.16 to 0.19, or see patches/"
            )
    for module, name, ours in found:
        if f"{module.__name__}.{name}" not in installation.hooked:
            installation.replace(vars(module), name, ours)
    return installation


def _replaced(given: Sequence[str]) -> Iterator[tuple[Any, str, Any]]:
    """A module, a name in it and what `Hook.replace` takes in its place, for these flags."""
    # A run to compare with leaves FLAG out alone: Megatron's parser would refuse the other flags.
    if any(word.startswith((FLAG, PREFIX, "--max-tokens-per-gpu")) for word in given):
        arguments = _module("arguments")
        add_arguments = functools.partial(_then, add_dynamic_batch_arguments)
        yield arguments, "add_megatron_arguments", add_arguments
        yield arguments, "validate_args", functools.partial(_then, check_arguments)
        initialize = _module("initialize")
        if hasattr(initialize, "validate_args"):  # until 0.17 it imports the function by name
            yield initialize, "validate_args", functools.partial(_then, check_arguments)
    if FLAG in given:
        training = _module("training")
        yield training, "get_forward_backward_func", functools.partial(_then, wrap_forward_backward)
        yield training, "train", _checked
        yield training, "evaluate", _checked
        yield training, "training_log", _training_log
        # Megatron's attention without Transformer Engine would let tokens see other samples.
        yield backends, "DotProductAttention", PackedAttention


def _then(after: Callable[[Any], Any], original: Function, *arguments: Any, **options: Any) -> Any:
    """Call the original, then ``after`` with its result, and return the latter's."""
    return after(original(*arguments, **options))


def _training_log(original: Function, loss_dict: Any, *rest: Any, **options: Any) -> Any:
    return original(with_batching_statistics(loss_dict), *rest, **options)


def _checked(original: Function, *arguments: Any, **options: Any) -> Any:
    """``train`` or ``evaluate``, behind a check of the script."""
    given = inspect.signature(original).bind(*arguments, **options).arguments
    check_training(given["forward_step_func"], given.get("process_non_loss_data_func"))
    return original(*arguments, **options)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"megatron.training.{name}")
    except ImportError as error:
        raise DynamicBatchArgumentError(
            f"cannot import megatron.training ({error}): install megatron-core 0.19 or later, or "
            "put a Megatron-LM checkout on PYTHONPATH"
        ) from error
