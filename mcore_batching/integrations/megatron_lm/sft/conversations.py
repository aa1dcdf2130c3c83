"""What a line of supervised fine-tuning data says: a conversation, or a prompt and its completion.

Guarantees: a record that is none of the three kinds below is refused with what was expected and
what came; text is taken as it stands, to the last space.

| record | meaning |
|---|---|
| ``{"messages": [{"role": ..., "content": ...}, ...]}`` | a conversation |
| ``{"prompt": ..., "completion": ...}`` | trained on the completion |
| ``{"question": ..., "answer": ...}`` | the same, with a line break behind the question |

Other keys are passed over. Where a record has several of these, the first kind counts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
TRAINED_ROLE = "assistant"

_KINDS = (
    '{"messages": [{"role": ..., "content": ...}]}, {"prompt": ..., "completion": ...} or '
    '{"question": ..., "answer": ...}'
)


@dataclasses.dataclass(frozen=True)
class Completion:
    """A text, and how it goes on. The model is trained on the latter."""

    prompt: str
    completion: str


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages in turn. The model is trained on those of the assistant.

    Attributes:
        messages: each with a ``role`` of `ROLES` and a ``content``; other keys are the chat
            template's business.
    """

    messages: tuple[dict[str, Any], ...]


class RecordError(ValueError):
    """A record that is no sample of supervised fine-tuning data."""


def parse_record(record: Any) -> Completion | Conversation:
    """What a record means.

    Args:
        record: as ``json.loads`` returned it.

    Raises:
        RecordError: saying what was expected and what came.
    """
    if not isinstance(record, dict):
        raise RecordError(f"expected {_KINDS}, got {_shown(record)}")
    if "messages" in record:
        return _conversation(record["messages"])
    for prompt, completion, separator in (
        ("prompt", "completion", ""),
        ("question", "answer", "\n"),
    ):
        if prompt in record and completion in record:
            return Completion(
                _text(record[prompt], prompt) + separator, _text(record[completion], completion)
            )
    keys = ", ".join(map(repr, record)) or "none"
    raise RecordError(f"expected {_KINDS}, got an object with the keys {keys:.200}")


def _conversation(messages: Any) -> Conversation:
    if not isinstance(messages, list) or not messages:
        raise RecordError(f"'messages' must be a list of messages, got {_shown(messages)}")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise RecordError(
                f'message {number} must be {{"role": ..., "content": ...}}, got {_shown(message)}'
            )
        if message["role"] not in ROLES:
            raise RecordError(
                f"the role of message {number} must be one of {', '.join(ROLES)}, got "
                f"{_shown(message['role'])}"
            )
        _text(message["content"], f"the content of message {number}")
    if all(message["role"] != TRAINED_ROLE for message in messages):
        raise RecordError(
            f"a conversation without a message of the {TRAINED_ROLE} has nothing to train on: "
            "leave it out"
        )
    return Conversation(tuple(messages))


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise RecordError(f"{what} must be a text, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.80}"
