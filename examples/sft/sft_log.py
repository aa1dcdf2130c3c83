"""Loss, time and tokens computed of every iteration, read from a Megatron job's log.

Values are each iteration's own. Megatron prints the first iteration without clearing its sums, so
that its second line holds the mean of both; that is undone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

_ITERATION = re.compile(r" iteration +(\d+)/ +\d+ \|(.*\|)")
_ARGUMENT = re.compile(r"^ +(\w+) \.{3,} (.*)$", re.MULTILINE)
_RUNNING_MEANS = ("elapsed time per iteration (ms)", "lm loss")
_BATCHING = "batching/"


class LogError(ValueError):
    """A log without iterations, with gaps, or without a value that is needed."""


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One optimizer step.

    Attributes:
        number: counted from 1.
        consumed_samples: since training began, this step's included.
        loss: mean over the step's trained tokens.
        seconds: wall time.
        computed_tokens: tokens that the model was run on, padding included, over all data-parallel
            ranks. Placeholders, of a token or little more, are not counted.
    """

    number: int
    consumed_samples: int
    loss: float
    seconds: float
    computed_tokens: float


def read_log(path: Path) -> list[Iteration]:
    """The iterations of a job with ``--log-interval 1``, from its standard output.

    Raises:
        LogError: the file has no iteration, lacks some, or lacks the list of arguments.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    arguments = dict(_ARGUMENT.findall(text))
    lines = [(int(number), _values(rest)) for number, rest in _ITERATION.findall(text)]
    if not lines:
        raise LogError(f"{path} has no iteration: the job ended before its first one")
    numbers = [number for number, _ in lines]
    expected = list(range(numbers[0], numbers[0] + len(numbers)))
    if numbers != expected:
        raise LogError(
            f"{path} has iterations {numbers}, expected {expected}: run the job with "
            "--log-interval 1, and into a log of its own"
        )
    if len(lines) > 1:
        lines[1] = (numbers[1], _second_alone(lines[0][1], lines[1][1]))
    try:
        return [
            Iteration(
                number=number,
                consumed_samples=int(values["consumed samples"]),
                loss=values["lm loss"],
                seconds=values["elapsed time per iteration (ms)"] / 1000,
                computed_tokens=_computed_tokens(values, arguments),
            )
            for number, values in lines
        ]
    except KeyError as error:
        raise LogError(f"{path} does not tell {error.args[0]!r}") from None


def _values(line: str) -> dict[str, float]:
    """``name: number |`` for every part of a log line."""
    parts = (part.rsplit(":", 1) for part in line.split("|") if ":" in part)
    return {name.strip(): float(value) for name, value in parts}


def _second_alone(first: Mapping[str, float], both: Mapping[str, float]) -> dict[str, float]:
    return {
        name: 2 * mean - first[name]
        if name in _RUNNING_MEANS or name.startswith(_BATCHING)
        else mean
        for name, mean in both.items()
    }


def _computed_tokens(values: Mapping[str, float], arguments: Mapping[str, str]) -> float:
    if f"{_BATCHING}fill" not in values:
        return values["global batch size"] * int(arguments["seq_length"])
    offered = values[f"{_BATCHING}micro-batches a rank"] * int(arguments["data_parallel_size"])
    cap = int(arguments["max_tokens_per_gpu"]) * int(arguments["context_parallel_size"])
    real = values[f"{_BATCHING}fill"] * offered * cap
    return real / (1 - values[f"{_BATCHING}padding"])
