"""Lines of fine-tuning data: conversations, and prompts with their completions.

| record | trained |
|---|---|
| ``{"messages": [{"role": ..., "content": ...}, ...]}`` | every message of the assistant |
| ``{"prompt": ..., "completion": ...}`` | the completion |
| ``{"question": ..., "answer": ...}`` | the answer; a line break is put behind the question |

Other keys are ignored. A record with the keys of several kinds is of the first. Texts are used
unchanged, white space included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from mcore_batching.planning.errors import MCoreBatchingError
from mcore_batching.planning.files import parse_json

ROLES = ("system", "user", "assistant", "tool")
TRAINED_ROLE = "assistant"

_KINDS = (
    '{"messages": [{"role": ..., "content": ...}]}, {"prompt": ..., "completion": ...} or '
    '{"question": ..., "answer": ...}'
)


class SftDataError(MCoreBatchingError, ValueError):
    """Data that cannot be trained on.

    Attributes: `path` of the file and its `line`, counted from 1; None if not of a single one.
    """

    def __init__(self, problem: str, path: str | None = None, line: int | None = None) -> None:
        where = ":".join(str(part) for part in (path, line) if part is not None)
        super().__init__(f"{where}: {problem}" if where else problem)
        self.path = path
        self.line = line


class Completion(NamedTuple):
    """A text and its continuation. The model is trained on the continuation."""

    prompt: str
    completion: str


class Conversation(NamedTuple):
    """Messages with a ``role`` of `ROLES` and a ``content``; trained are those of the assistant."""

    messages: tuple[dict[str, Any], ...]  # further keys are left to the chat template


def records_of(path: str) -> Iterator[tuple[int, Any]]:
    """Line number, from 1, and value of each line of a UTF-8 file that is not blank."""
    try:
        with open(path, "rb") as file:
            # Not by text mode's lines, which end at a carriage return inside a text, too.
            lines = file.read().split(b"\n")
    except OSError as error:
        raise SftDataError(
            f"cannot be read: {error.strerror}; give --dynamic-batch-data JSON-lines files", path
        ) from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, parse_json(line.decode())
            except ValueError as error:
                raise SftDataError(f"not a line of JSON: {error}", path, number) from None


def parse_record(record: Any) -> Completion | Conversation:
    """The sample in a record; a `SftDataError` where it is of none of the three kinds.

    parse_record({"question": "2+2?", "answer": "4"})  # Completion("2+2?\\n", "4")
    """
    keys = record.keys() if isinstance(record, dict) else set()
    if "messages" in keys:
        return _conversation(record["messages"])
    if {"prompt", "completion"} <= keys:
        return Completion(_text(record, "prompt"), _text(record, "completion"))
    if {"question", "answer"} <= keys:
        return Completion(_text(record, "question") + "\n", _text(record, "answer"))
    raise SftDataError(f"expected {_KINDS}, got {record!r:.80}")


def _conversation(messages: Any) -> Conversation:
    if not isinstance(messages, list) or not messages:
        raise SftDataError(f"'messages' must be a list of messages, got {messages!r:.80}")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise SftDataError(
                f"message {number} must have a role of {', '.join(ROLES)}, got {message!r:.80}"
            )
        _text(message, "content", f" of message {number}")
    if all(message["role"] != TRAINED_ROLE for message in messages):
        raise SftDataError(f"no message of the {TRAINED_ROLE} to train on: leave the line out")
    return Conversation(tuple(messages))


def _text(values: dict[str, Any], name: str, where: str = "") -> str:
    value = values.get(name)
    if not isinstance(value, str):
        raise SftDataError(f"{name}{where} must be a text, got {value!r:.80}")
    return value
