"""Records of fine-tuning data: conversations, and prompts with their completions.

| record | trained |
|---|---|
| ``{"messages": [{"role": ..., "content": ...}, ...]}`` | every message of the assistant |
| ``{"prompt": ..., "completion": ...}`` | the completion |
| ``{"question": ..., "answer": ...}`` | the answer; a line break is put behind the question |

Other keys are ignored. A record with the keys of several kinds is of the first. Texts are used
unchanged, white space included.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mcore_batching.integrations.megatron_lm.sft.jsonl import SftDataError

ROLES = ("system", "user", "assistant", "tool")
TRAINED_ROLE = "assistant"

_KINDS = (
    '{"messages": [{"role": ..., "content": ...}]}, {"prompt": ..., "completion": ...} or '
    '{"question": ..., "answer": ...}'
)


@dataclasses.dataclass(frozen=True)
class Completion:
    """A text and its continuation. The model is trained on the continuation."""

    prompt: str
    completion: str


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages in turn. The model is trained on those of the assistant.

    Attributes:
        messages: each with a ``role`` of `ROLES` and a ``content``; other keys are left to the chat
            template.
    """

    messages: tuple[dict[str, Any], ...]


def parse_record(record: Any) -> Completion | Conversation:
    """The sample in a record.

        parse_record({"question": "2+2?", "answer": "4"})  # Completion("2+2?\\n", "4")

    Args:
        record: as ``json.loads`` returned it.

    Raises:
        SftDataError: the record is of none of the three kinds.
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
