"""Programs of `test_install`: each runs in a process of its own, where Megatron's modules are
patched, forked off one that has imported them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import json
import os
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

# isort: split
from mcore_batching.integrations.megatron_lm import install
from mcore_batching.megatron import DynamicBatchArgumentError

# isort: split
from megatron.training import arguments, global_vars, initialize, training
from megatron.training.argument_utils import ArgumentGroupFactory

# Every parser reads the sources of Megatron's dataclasses for its help texts, half a second each.
_read = ArgumentGroupFactory._get_field_docstrings
_texts = functools.cache(lambda of: _read(ArgumentGroupFactory.__new__(ArgumentGroupFactory), of))
ArgumentGroupFactory._get_field_docstrings = lambda self, of: _texts(of)

FLAG = "--use-dynamic-batch-size"
MODULES = [
    importlib.import_module(f"megatron.{name}")
    for name in (
        *("training", "training.arguments", "training.checkpointing", "training.initialize"),
        *("training.training", "training.global_vars", "training.utils", "core.models.backends"),
        *("core.models.gpt.gpt_layer_specs", "core.pipeline_parallel.schedules"),
        *("core.num_microbatches_calculator", "core.transformer.dot_product_attention"),
    )
]


def names() -> dict[str, int]:
    return {f"{m.__name__}.{n}": id(v) for m in MODULES for n, v in vars(m).items()}


def changed(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    every = {**before, **after}
    return sorted(name for name in every if before.get(name) != after.get(name))


def refused(text: str, words: list[str]) -> None:
    with pytest.raises(DynamicBatchArgumentError, match=text):
        install(words)


def hooking() -> None:
    """What is hooked by which flags, once, all or nothing, and put back."""
    before, log = names(), training.training_log
    assert install(["--num-layers", "4"]).hooked == []
    assert "nothing hooked" in str(install([]))
    without_log_function(log)
    assert names() == before
    # Of other flags the parser alone learns; a later call hooks the rest.
    installation = install(["--max-tokens-per-gpu=64"])
    assert changed(before, names()) == sorted(installation.hooked)
    assert all(name.startswith("megatron.training.arguments.") for name in installation.hooked)
    of_flags = names()
    without_log_function(log)
    assert names() == of_flags
    assert install([FLAG]) is installation
    expected = [
        "megatron.core.models.backends.DotProductAttention",
        "megatron.training.arguments.add_megatron_arguments",
        "megatron.training.arguments.validate_args",
        "megatron.training.training.evaluate",
        "megatron.training.training.get_forward_backward_func",
        "megatron.training.training.train",
        "megatron.training.training.training_log",
    ]
    assert changed(before, names()) == sorted(installation.hooked) == expected
    assert all(name in str(installation) for name in installation.hooked)
    hooked = names()
    assert install([]) is install([FLAG]) is installation
    assert names() == hooked
    for _ in range(2):
        installation.undo()
        assert names() == before
    for word in ("--yaml-cfg", "--yaml-cfg=job.yaml"):
        refused("--yaml-cfg overrides", [FLAG, word])
        assert install([word]).hooked == []  # without the flag it is not read
    assert names() == before
    initialize.validate_args = arguments.validate_args  # as until 0.17
    (late,) = install(["--max-tokens-per-gpu=64"]).hooked[2:]
    assert late == "megatron.training.initialize.validate_args"


def without_log_function(log: Any) -> None:
    """Twice: the second call returned what the first had hooked until it raised."""
    del training.training_log
    for _ in range(2):
        refused("has no training_log: use Megatron-LM 0", [FLAG])
    training.training_log = log


def lines(given: str) -> dict[str, Any]:
    """What becomes of each command line, and of calls of hooked functions."""
    install([FLAG])
    found: dict[str, Any] = {line: _outcome(words) for line, words in json.loads(given).items()}
    for name in ("train", "evaluate"):
        for on in (True, False):
            found[f"{name} {on} script"] = _called(name, on)
            found[f"{name} {on} non-loss"] = _called(name, on, process_non_loss_data_func=print)
    return found


def _outcome(words: list[str]) -> str:
    """Words with "=" are the rank, and settings that this Megatron's parser has no flags of."""
    settings = dict(word.split("=") for word in words if "=" in word)
    os.environ["RANK"] = settings.pop("RANK", "0")
    sys.argv = ["script.py", *(word for word in words if "=" not in word)]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            args = arguments.parse_args()
            vars(args).update(settings)
            arguments.validate_args(args)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    messages = [line for line in said.getvalue().splitlines() if line.startswith("mcore_batching")]
    return "; ".join(["accepted", *messages])


def _called(name: str, on: bool, **given: Any) -> str | None:
    """The error of the hooked function before it does anything, which it cannot with None."""
    global_vars._GLOBAL_ARGS = SimpleNamespace(use_dynamic_batch_size=on)
    hooked = getattr(training, name)
    options = dict.fromkeys(inspect.signature(hooked).parameters) | given
    try:
        hooked(**options | {"forward_step_func": _no_get_batch})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _no_get_batch(data_iterator: Any, model: Any) -> Any:
    return model(data_iterator)


def main() -> None:
    """Run the program that is named; its result is the last line."""
    _, program, *words = sys.argv
    os.environ |= {"WORLD_SIZE": "4", "RANK": "0"}
    print(json.dumps(globals()[program](*words)))
