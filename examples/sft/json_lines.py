"""Lines of fine-tuning data as token ids, and which of them are trained.

| line | trained |
|---|---|
| ``{"messages": [...], "tools": [...]}`` | the assistant's messages but those of ``"weight": 0`` |
| ``{"prompt": ..., "completion": ...}`` | the completion |
| ``{"question": ..., "answer": ...}`` | the answer; a line break is put behind the question |

and the end token behind each. The tokenizer's chat template writes messages; without one a message
is ``<|user|>``, a line break, its text. What cannot be written is an error that names its line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROLES = ("system", "user", "assistant", "tool")
# Keys that people send, and that no template is known to write.
UNWRITTEN = (
    *("label", "chosen", "rejected", "system", "input", "context", "images", "audio"),
    *("functions", "function_call", "refusal", "reasoning", "thinking"),
)
NOT_TEXT = {b"\x1f\x8b": "gzip: unpack it first", b"PAR1": "parquet: write it as JSON lines first"}

Piece = tuple[list[int], bool]
"""Token ids, and True if they are trained."""


class DataError(ValueError):
    """A file or a line that cannot be trained on."""


class Sample(NamedTuple):
    """Token ids ``[tokens]``, and which of them the model learns to predict; never the first."""

    ids: np.ndarray
    trained: np.ndarray


def read_samples(path: str, tokenizer: Any) -> list[Sample]:
    """The samples of a file, by one of Megatron's tokenizers.

    Raises:
        DataError: with the file and the line.
    """
    write = Writer(tokenizer)
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    for magic, problem in NOT_TEXT.items():
        if content.startswith(magic):
            raise DataError(f"{path}: it is {problem}")
    samples = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            try:
                samples.append(write(json.loads(line.decode("utf-8-sig"))))
            except Exception as error:  # tokenizers and templates raise anything
                kind = "" if isinstance(error, DataError) else f"{type(error).__name__}: "
                raise DataError(f"{path}:{number}: {kind}{error}") from error
    if not samples:
        raise DataError(f"{path}: no line in it")
    return samples


class Writer:
    """Writes a line's value as a `Sample`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._end: int = tokenizer.eod
        try:
            self._has_template = tokenizer.chat_template is not None
        except (AttributeError, NotImplementedError):
            self._has_template = False
        # Texts are written in pieces, and marks that are added to each would stand between these.
        if len(tokenizer.tokenize("")):
            raise DataError(
                "the tokenizer adds marks to every text: unset "
                "--tokenizer-hf-include-special-tokens"
            )

    def __call__(self, record: Any) -> Sample:
        pieces = list(self._pieces(record))
        ids = [token for piece, _ in pieces for token in piece]
        trained = [learnt for piece, learnt in pieces for _ in piece]
        if not any(trained):
            raise DataError("nothing of it would be trained: leave the line out")
        if trained[0]:  # the first trained token needs one that it is predicted from
            ids, trained = [self._end, *ids], [False, *trained]
        return Sample(np.array(ids, np.int32), np.array(trained))

    def _pieces(self, record: Any) -> Iterator[Piece]:
        if not isinstance(record, dict):
            raise DataError(f"it must be an object, got {record!r:.80}")
        check_keys(record, (*UNWRITTEN, "weight"), "it")
        if "messages" in record:
            messages, tools = checked(record["messages"]), record.get("tools")
            by = self._by_template if self._has_template else self._plainly
            yield from by(messages, tools)
            return
        for before, behind, gap in (("prompt", "completion", ""), ("question", "answer", "\n")):
            if before in record and behind in record:
                check_keys(record, ("tools",), "it")
                yield self._ids(text_of(record, before) + gap), False
                yield [*self._ids(text_of(record, behind)), self._end], True
                return
        raise DataError(
            "it must have messages, prompt and completion, or question and answer, got "
            f"{', '.join(record) or 'no key'}"
        )

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.tokenize(text))

    def _plainly(self, messages: list[dict[str, Any]], tools: Any) -> Iterator[Piece]:
        lead = ""
        for number, message in enumerate([{"tools": tools}, *messages]):
            for key in ("tools", "tool_calls", "reasoning_content"):
                if message.get(key):
                    raise DataError(
                        f"{key} of message {number}: only a chat template can write it, and this "
                        "tokenizer has none"
                    )
            if not number:
                continue
            lead += f"<|{message['role']}|>\n"
            if message["role"] == "assistant":
                yield self._ids(lead), False
                yield [*self._ids(message["content"]), self._end], is_trained(message)
                lead = "\n"
            else:
                lead += f"{message['content']}\n"

    def _by_template(self, messages: list[dict[str, Any]], tools: Any) -> Iterator[Piece]:
        def rendered(*shown: dict[str, Any], asks: bool = False) -> str:
            options = {"tools": tools} if tools else {}
            text: str = self._tokenizer.apply_chat_template(
                list(shown), tokenize=False, add_generation_prompt=asks, **options
            )
            return text

        written, has_end = "", False
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            # The answer is what the template appends to the text that asks for it.
            asked = rendered(*messages[:number], asks=True)
            answered = rendered(*messages[: number + 1])
            if not asked.startswith(written) or not answered.startswith(asked):
                raise DataError(
                    f"the chat template rewrites what precedes message {number + 1}: give each "
                    "turn as a line, or a --chat-template that only appends"
                )
            lead, answer = self._ids(asked[len(written) :]), answered[len(asked) :]
            for text in spoken(message):
                if text not in answer:
                    raise DataError(f"the chat template leaves out {text!r:.60} of the assistant's")
            yield lead[has_end:], False  # without the end mark that is given already
            ids, has_end = self._ids(answer), False
            if self._end not in ids:
                # Some templates write it in front of the next message.
                behind = rendered(*messages[: number + 1], {"role": "user", "content": "?"})
                has_end = self._ids(behind[len(answered) :])[:1] == [self._end]
            yield [*ids, *([self._end] if has_end else [])], is_trained(message)
            written = answered


def checked(messages: Any) -> list[dict[str, Any]]:
    """The messages, with arguments of tool calls as values: templates write them as JSON."""
    if not isinstance(messages, list):
        raise DataError(f"messages must be a list, got {messages!r:.80}")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise DataError(
                f"message {number} must have a role of {', '.join(ROLES)}, got {message!r:.80}"
            )
        check_keys(message, UNWRITTEN, f"message {number}")
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"] or "{}")
        if message.get("content") is not None or not message.get("tool_calls"):
            text_of(message, "content", f" of message {number}")
        if message.get("weight") not in (None, 0, 1):
            raise DataError(f"weight of message {number} must be 0 or 1, got {message['weight']!r}")
    return messages


def check_keys(values: dict[str, Any], unwritten: tuple[str, ...], where: str) -> None:
    for key in unwritten:
        if values.get(key) not in (None, "", [], {}):
            raise DataError(
                f"{where} has {key!r}, which would be ignored: take it out, or leave the line out"
            )


def text_of(values: dict[str, Any], name: str, where: str = "") -> str:
    value = values.get(name)
    if not isinstance(value, str):
        raise DataError(f"{name}{where} must be a text, got {value!r:.80}")
    return value


def is_trained(message: dict[str, Any]) -> bool:
    return message.get("weight") != 0


def spoken(message: dict[str, Any]) -> list[str]:
    """Texts that an answer must hold: names of called tools, and its reasoning."""
    calls = message.get("tool_calls") or ()
    names = [call.get("function", call)["name"] for call in calls]
    return [*names, *filter(None, [(message.get("reasoning_content") or "").strip()])]
