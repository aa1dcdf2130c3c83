"""Keyword arguments of a model's forward pass: changed from outside, and joined over samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def changed_inputs(
    modules: Sequence[Any], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> Iterator[None]:
    """Change what forward passes of these modules are given, inside a ``with`` block.

        with changed_inputs([model], lambda inputs: inputs | {"position_ids": None}):
            model(input_ids=tokens, position_ids=positions)  # called with None

    Args:
        modules: those whose calls are changed.
        change: from the keyword arguments of a call to those that the module gets.
    """

    def before_forward(
        module: Any, arguments: Any, inputs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        del module
        return arguments, change(inputs)

    with contextlib.ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_pre_hook(before_forward, with_kwargs=True))
        yield


def joined_multimodal_inputs(inputs: Sequence[Mapping[str, Tensor] | None]) -> dict[str, Tensor]:
    """Multimodal inputs of all samples, concatenated name by name.

        {"pixels": [2, 3]}, None, {"pixels": [1, 3]}  ->  {"pixels": [3, 3]}   (shapes)

    Args:
        inputs: for each sample its inputs by name, or None.
    """
    gathered: dict[str, list[Tensor]] = {}
    for sample in inputs:
        # None for a sample without images, beside others that have some.
        for name, tensor in (sample or {}).items():
            gathered.setdefault(name, []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in gathered.items()}
