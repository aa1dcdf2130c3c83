"""Records of supervised fine-tuning data: conversations, and prompts with their completions.

| record | meaning |
|---|---|
| ``{"messages": [{"role": ..., "content": ...}, ...]}`` | a conversation |
| ``{"prompt": ..., "completion": ...}`` | trained on the completion |
| ``{"question": ..., "answer": ...}`` | the same, with a line break behind the question |

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
    if not isinstance(record, dict):
        raise SftDataError(f"expected {_KINDS}, got {_described(record)}")
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
    raise SftDataError(f"expected {_KINDS}, got an object with the keys {keys:.200}")


def _conversation(messages: Any) -> Conversation:
    if not isinstance(messages, list) or not messages:
        raise SftDataError(f"'messages' must be a list of messages, got {_described(messages)}")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise SftDataError(
                f'message {number} must be {{"role": ..., "content": ...}}, got '
                f"{_described(message)}"
            )
        if message["role"] not in ROLES:
            raise SftDataError(
                f"the role of message {number} must be one of {', '.join(ROLES)}, got "
                f"{_described(message['role'])}"
            )
        _text(message["content"], f"the content of message {number}")
    if all(message["role"] != TRAINED_ROLE for message in messages):
        raise SftDataError(
            f"a conversation without a message of the {TRAINED_ROLE} trains nothing: leave it out"
        )
    return Conversation(tuple(messages))


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise SftDataError(f"{name} must be a text, got {_described(value)}")
    return value


def _described(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.80}"
