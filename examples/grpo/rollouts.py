"""Recorded rollouts from JSONL files.

Two kinds of line are read:

- one rollout: ``uid`` (rollouts with the same uid form a group), ``prompt``, ``response`` and
  ``reward``; optionally ``environment_spans``, ranges ``[start, end)`` of the response's
  characters that the environment wrote and that are not trained on;
- one question of GSM8K's example model solutions: ``question``, ``ground_truth``, and one
  ``{"solution", "is_correct"}`` a model. The question is the prompt and the uid, each solution a
  response, its correctness the reward.

Groups come in the order in which their uids first appear, rollouts in the order of the file.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


class RolloutFileError(ValueError):
    """A file, or a line of it, that is no rollout.

    Attributes:
        path: the file.
        line: number of the line, from 1; None if it is about the file as a whole.
        problem: what was expected, and what is there.
    """

    def __init__(self, path: Path, line: int | None, problem: str) -> None:
        super().__init__(f"{path}{'' if line is None else f':{line}'}: {problem}")
        self.path = path
        self.line = line
        self.problem = problem

    def __reduce__(self) -> tuple[type[RolloutFileError], tuple[Path, int | None, str]]:
        return type(self), (self.path, self.line, self.problem)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One sampled response.

    Attributes:
        uid: names the group.
        prompt: what the policy was given.
        response: what followed.
        reward: how good it was.
        environment_spans: ranges ``[start, end)`` of the response's characters that the
            environment wrote, ascending.
    """

    uid: str
    prompt: str
    response: str
    reward: float
    environment_spans: tuple[tuple[int, int], ...] = ()


def read_groups(path: Path) -> list[list[Rollout]]:
    """The rollouts of a file, those of one uid together.

    Raises:
        RolloutFileError: the file does not exist, has no rollouts, or a line is not one.
    """
    groups: dict[str, list[Rollout]] = {}
    for rollout in _read(path):
        groups.setdefault(rollout.uid, []).append(rollout)
    if not groups:
        raise RolloutFileError(path, None, "no rollouts; expected one JSON object a line")
    return list(groups.values())


def _read(path: Path) -> Iterator[Rollout]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RolloutFileError(
            path, None, f"cannot be read ({error.strerror}); set --rollouts to a JSONL file"
        ) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield from _parse(json.loads(line.decode("utf-8")))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise RolloutFileError(path, number, f"not JSON in UTF-8 ({error})") from error
        except _LineError as error:
            raise RolloutFileError(path, number, str(error)) from error


class _LineError(Exception):
    """A problem of one line, before its number is known."""


def _parse(row: Any) -> Iterable[Rollout]:
    if not isinstance(row, dict):
        raise _LineError(f"expected a JSON object, got {type(row).__name__}")
    if "question" in row and "ground_truth" in row:
        return list(_model_solutions(row))
    return [
        Rollout(
            uid=str(_value(row, "uid", str, int)),
            prompt=_value(row, "prompt", str),
            response=_value(row, "response", str),
            reward=_reward(_value(row, "reward", float, int, bool)),
            environment_spans=_spans(row),
        )
    ]


def _model_solutions(row: dict[str, Any]) -> Iterator[Rollout]:
    question = _value(row, "question", str)
    solutions = [value for value in row.values() if isinstance(value, dict)]
    if not solutions:
        raise _LineError(
            'expected at least one model\'s {"solution", "is_correct"} beside question and '
            f"ground_truth, got only {sorted(row)}"
        )
    for solution in solutions:
        response = _value(solution, "solution", str)
        correct = _value(solution, "is_correct", bool)
        yield Rollout(question, question + "\n", response, float(correct))


def _value(row: dict[str, Any], key: str, *types: type) -> Any:
    expected = " or ".join(each.__name__ for each in types)
    if key not in row:
        raise _LineError(f"lacks {key!r} ({expected}), has {sorted(row)}")
    # A bool is an int to isinstance, and no uid.
    if type(row[key]) not in types:
        raise _LineError(f"{key!r} must be {expected}, got {row[key]!r:.60}")
    return row[key]


def _reward(value: float) -> float:
    if not math.isfinite(value):
        raise _LineError(f"'reward' must be finite, got {value}")
    return float(value)


def _spans(row: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    end_before = 0
    spans = []
    for span in row.get("environment_spans") or ():
        whole = isinstance(span, list) and len(span) == 2 and all(type(x) is int for x in span)
        if not whole or not end_before <= span[0] <= span[1] <= len(row["response"]):
            raise _LineError(
                "'environment_spans' must be ascending pairs [start, end] inside the response of "
                f"{len(row['response'])} characters, got {row['environment_spans']!r:.60}"
            )
        spans.append((span[0], span[1]))
        end_before = span[1]
    return tuple(spans)
