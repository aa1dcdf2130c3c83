"""Token ids of a sample and which of them are trained, by any of Megatron's tokenizers.

Trained are the completion, or the assistant's messages, and the end token after each. A sample
without a prompt begins with the tokenizer's begin token or, without one, with the end-of-document
token. Conversations are written by the tokenizer's chat template, if it has one; by an
``SFTTokenizer`` in its own way; and otherwise, with ``EOD`` for that token, as

    <|user|>
    the message
    <|assistant|>
    the answerEOD
    <|user|>
    ...
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from mcore_batching.integrations.megatron_lm.sft.records import (
    TRAINED_ROLE,
    Completion,
    Conversation,
    SftDataError,
)

IGNORED_TARGET = -100  # an SFTTokenizer's, where a token is not trained

_Piece = tuple[list[int], bool]  # token ids, and True if they are trained


@dataclasses.dataclass(frozen=True)
class SampleTokens:
    """A sample's token ids, int32 ``[tokens]``, and which of them the model learns to predict, bool
    ``[tokens]``; never the first."""

    ids: np.ndarray[Any, np.dtype[np.int32]]
    trained: np.ndarray[Any, np.dtype[np.bool_]]

    @property
    def length(self) -> int:
        """In next-token prediction: one less than the tokens."""
        return len(self.ids) - 1


class SampleTokenizer:
    """Writes samples as tokens, by what ``megatron.training.get_tokenizer()`` returns: it has
    ``tokenize`` and ``eod``, else a `SftDataError`, and perhaps a ``chat_template``."""

    def __init__(self, tokenizer: Any) -> None:
        end = _optional(tokenizer, "eod")
        if end is None:
            raise SftDataError(
                f"{type(tokenizer).__name__} has no end-of-document token: set another "
                "--tokenizer-type"
            )
        self.end: int = end
        self._tokenizer = tokenizer
        self._before, self._behind = _added_to_every_text(tokenizer, end)

    def __call__(self, sample: Completion | Conversation) -> SampleTokens:
        """Tokens of one sample."""
        try:
            pieces = self._pieces(sample)
        except SftDataError:
            raise
        except Exception as error:  # tokenizers and templates raise anything
            raise SftDataError(
                f"{type(self._tokenizer).__name__} cannot write it: {type(error).__name__}: {error}"
            ) from error
        ids = [token for piece, _ in pieces for token in piece]
        trained = [learnt for piece, learnt in pieces for _ in piece]
        if not any(trained):
            raise SftDataError("no token of it would be trained: leave the line out")
        if trained[0]:  # the first trained token needs one that it is predicted from
            ids, trained = [self.end, *ids], [False, *trained]
        return SampleTokens(np.array(ids, np.int32), np.array(trained, np.bool_))

    def _pieces(self, sample: Completion | Conversation) -> list[_Piece]:
        # Trained and untrained text apart, as at inference: no token is then partly trained.
        if isinstance(sample, Completion):
            return [
                (self._before, False),
                (self._ids(sample.prompt), False),
                ([*self._ids(sample.completion), self.end], True),
            ]
        messages = list(sample.messages)
        # It has a chat template as well, but marks itself what is trained.
        if _optional(self._tokenizer, "library") == "sft":
            ids, targets = self._tokenizer.tokenize_conversation(
                messages, return_target=True, add_generation_prompt=False
            )
            both = zip(ids, targets, strict=True)
            return [([int(token)], bool(target != IGNORED_TARGET)) for token, target in both]
        if _optional(self._tokenizer, "chat_template") is not None:
            return self._by_chat_template(messages)
        return [(self._before, False), *self._plainly(messages)]

    def _ids(self, text: str) -> list[int]:
        """A text's tokens, without what the tokenizer adds to every text."""
        # A text is tokenized in pieces: begin and end marks would stand between them.
        ids = list(self._tokenizer.tokenize(text))
        if self._before and ids[: len(self._before)] == self._before:
            ids = ids[len(self._before) :]
        if self._behind and ids[-len(self._behind) :] == self._behind:
            ids = ids[: -len(self._behind)]
        return ids

    def _plainly(self, messages: list[dict[str, Any]]) -> list[_Piece]:
        pieces: list[_Piece] = []
        lead = ""
        for message in messages:
            lead += f"<|{message['role']}|>\n"
            if message["role"] == TRAINED_ROLE:
                pieces.append((self._ids(lead), False))
                pieces.append(([*self._ids(message["content"]), self.end], True))
                lead = "\n"
            else:
                lead += f"{message['content']}\n"
        return pieces

    def _by_chat_template(self, messages: list[dict[str, Any]]) -> list[_Piece]:
        pieces: list[_Piece] = []
        written = ""
        for number, message in enumerate(messages):
            if message["role"] != TRAINED_ROLE:
                continue
            # The answer's tokens are what the template appends to the text that asks for it.
            asked = self._rendered(messages[:number], add_generation_prompt=True)
            answered = self._rendered(messages[: number + 1], add_generation_prompt=False)
            if not asked.startswith(written) or not answered.startswith(asked):
                raise SftDataError(
                    f"the chat template rewrites what precedes message {number + 1}: give each "
                    "turn as 'prompt' and 'completion', or a --chat-template that only appends"
                )
            pieces.append((self._ids(asked[len(written) :]), False))
            pieces.append((self._ids(answered[len(asked) :]), True))
            written = answered
        return pieces

    def _rendered(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        if not messages:
            return ""
        text: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text


def byte_level_tokenizer() -> Any:
    """megatron.core's byte-level tokenizer, for which ``--tokenizer-type`` has no name.

    Ids 0 to 255 are bytes of UTF-8 text, 256 ends a document, 257 is padding. It needs no file.
    """
    from megatron.core.tokenizers import MegatronTokenizer

    return MegatronTokenizer.from_pretrained(
        metadata_path={"library": "byte-level"},
        # Special tokens get ids from 256 on, in reverse order: <end> 256, <pad> 257.
        vocab_size=256,
        special_tokens=["<pad>", "<end>"],
        _eos_id=256,
        _pad_id=257,
    )


def _added_to_every_text(tokenizer: Any, end: int) -> tuple[list[int], list[int]]:
    """Tokens that a tokenizer adds before and after any text, from its tokens of the empty text."""
    try:
        added = list(tokenizer.tokenize(""))
    except Exception:  # some refuse an empty text
        return [], []
    # What comes from the end token on is added after the text.
    before = next((at for at, token in enumerate(added) if token == end), len(added))
    return added[:before], added[before:]


def _optional(tokenizer: Any, name: str) -> Any:
    """An attribute of the tokenizer; None where it has none, or none for its vocabulary."""
    try:
        return getattr(tokenizer, name)
    except (AttributeError, NotImplementedError):
        return None
