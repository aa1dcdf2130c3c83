"""Where the host waits for the device in a step, by line; none may grow with micro-batches.

PyTorch reports each wait. Without a GPU `tests/device` counts them on a device that is not there.
"""

from __future__ import annotations

import collections
import contextlib
import os
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import megatron.core
import setting
import torch

import mcore_batching
from mcore_batching.megatron import cpu_emulation, get_data_iterator

MOST_SHOWN = 12
ROOTS = [os.path.dirname(str(package.__file__)) for package in (mcore_batching, megatron.core)]
Lines = collections.Counter[str]


def main() -> None:
    """Count waits of a step, and of one over twice as many micro-batches."""
    options, dims = setting.start(__doc__)
    if not setting.on_gpu():
        raise SystemExit("on a CPU waits are counted by tests/device/test_device.py")
    sizes = setting.GPU
    longest = sizes.cap_tokens // 4
    lengths = setting.real_lengths(options.lengths, 48, longest)
    model = setting.bare_model(dims, sizes, options.attention)
    counted = []
    for times in (1, 2):
        args = setting.arguments(longest)
        data = setting.samples(lengths * times, sizes.vocabulary)
        planned = get_data_iterator(args, model, data)
        setting.step(args, model, planned)
        with _waits() as lines:
            setting.step(args, model, planned)
        counted.append((planned[1][0], lines))
    (few, once), (many, twice) = counted
    assert many > few
    ours = {line: n for line, n in once.items() if _is_ours(line)}
    grown = {line: n - once[line] for line, n in twice.items() if n > once[line]}
    for line, number in sorted(grown.items(), key=lambda each: -each[1])[:MOST_SHOWN]:
        mine = _is_ours(line)
        setting.report(
            f"waits at {line}",
            f"{number} more with {many} micro-batches than with {few}",
            "none" if mine else "for information: not this package",
            not mine,
        )
    setting.report(
        "waits of this package that grow with micro-batches",
        sum(number for line, number in grown.items() if _is_ours(line)),
        "none",
        not any(map(_is_ours, grown)),
    )
    setting.report("waits of this package a step", sum(ours.values()), "for information", True)


def _is_ours(line: str) -> bool:
    return line.startswith("mcore_batching/")


def _line() -> str:
    """The innermost line of this package or of Megatron."""
    for frame in reversed(traceback.extract_stack()):
        for root in ROOTS:
            if frame.filename.startswith(f"{root}/") and frame.filename != cpu_emulation.__file__:
                return f"{os.path.relpath(frame.filename, os.path.dirname(root))}:{frame.lineno}"
    return "elsewhere"


@contextlib.contextmanager
def _waits() -> Iterator[Lines]:
    lines: Lines = collections.Counter()

    def note(*unused: Any, **also_unused: Any) -> None:
        lines[_line()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    main()
