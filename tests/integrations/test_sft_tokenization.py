"""Samples of supervised fine-tuning as tokens: what is trained, how conversations are written."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sft_cases import BYTES, END, Wrapped, conversation, trained_text, whole_text

from mcore_batching.integrations.megatron_lm.sft import SftDataError
from mcore_batching.integrations.megatron_lm.sft.records import Completion
from mcore_batching.integrations.megatron_lm.sft.tokenization import (
    SampleTokenizer,
    byte_level_tokenizer,
)


def test_the_byte_level_tokenizer_keeps_its_marks_apart_from_bytes():
    tokenizer = byte_level_tokenizer()
    assert (tokenizer.eod, tokenizer.pad, tokenizer.vocab_size) == (END, 257, 258)
    assert tokenizer.tokenize("\x00é") == [0, 0xC3, 0xA9]
    assert tokenizer.detokenize([104, 105, END, 257]) == "hi"


@given(st.text(), st.text())
def test_trained_is_the_completion_and_the_end_and_nothing_else(prompt, completion):
    sample = BYTES(Completion(prompt, completion))
    expected = [*completion.encode(), END]
    assert [t for t, learnt in zip(sample.ids, sample.trained, strict=True) if learnt] == expected
    assert sample.trained.tolist() == [False] * max(1, len(prompt.encode())) + [True] * len(
        expected
    )
    assert sample.ids[: -len(expected)].tolist() == ([*prompt.encode()] or [END])


@given(st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1), st.data())
def test_without_a_template_assistant_turns_and_their_ends_are_trained(roles, data):
    roles.append("assistant")
    turns = [(role, data.draw(st.text())) for role in roles]
    sample = BYTES(conversation(*turns))
    learnt = [t for t, trained in zip(sample.ids, sample.trained, strict=True) if trained]
    assert learnt == [
        token
        for role, content in turns
        if role == "assistant"
        for token in [*content.encode(), END]
    ]
    assert not sample.trained[0]


def test_the_plain_template():
    sample = BYTES(
        conversation(
            ("system", "Be brief."),
            ("user", "2+2?"),
            ("assistant", "4"),
            ("tool", "ok"),
            ("assistant", "bye"),
            ("user", "never read"),
        )
    )
    assert whole_text(sample) == (
        "<|system|>\nBe brief.\n<|user|>\n2+2?\n<|assistant|>\n4$\n"
        "<|tool|>\nok\n<|assistant|>\nbye$"
    )
    assert trained_text(sample) == "4$bye$"


def appending(messages):
    return "^" + "".join(
        f"{m['role'][0].upper()}:{m['content']}" + ("|" if m["role"] == "assistant" else "/")
        for m in messages
    )


def test_marks_that_the_tokenizer_adds_stand_once_in_front():
    for before, after in ([1], []), ([1], [END]), ([], [END]), ([], []):
        write_sample = SampleTokenizer(Wrapped((before, after)))
        sample = write_sample(Completion("ab", "c"))
        assert sample.ids.tolist() == [*before, *b"abc", END]
        assert sample.trained.tolist() == [False] * len(before) + [False, False, True, True]
        sample = write_sample(Completion("", "c"))
        assert sample.ids.tolist() == [*(before or [END]), *b"c", END]
        sample = write_sample(conversation(("user", "q"), ("assistant", "a")))
        assert sample.ids.tolist() == [*before, *b"<|user|>\nq\n<|assistant|>\na", END]


def test_marks_of_the_empty_text_alone_are_not_cut_off_others():
    class Odd(Wrapped):
        def tokenize(self, text):
            return [*text.encode()] if text else [1, END]

    sample = SampleTokenizer(Odd())(Completion("ab", "cd"))
    assert sample.ids.tolist() == [1, *b"abcd", END]


def test_a_tokenizer_may_refuse_the_empty_text():
    class Refusing(Wrapped):
        def tokenize(self, text):
            if not text:
                raise ValueError("no text")
            return super().tokenize(text)

    sample = SampleTokenizer(Refusing())(Completion("ab", "cd"))
    assert sample.ids.tolist() == [*b"abcd", END]


def test_a_chat_template_is_followed_and_only_answers_are_trained():
    write_sample = SampleTokenizer(Wrapped(([1], [END]), appending))
    turns = ("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")
    sample = write_sample(conversation(*turns, ("user", "unread")))
    assert whole_text(sample) == "^S:s/U:q/A:a|U:r/A:b|"
    assert trained_text(sample) == "a|b|"
    assert whole_text(write_sample(Completion("x", "y"))) == "\x01xy$"


def test_a_conversation_that_the_assistant_begins_begins_with_a_mark_not_trained():
    sample = SampleTokenizer(Wrapped(template=appending))(conversation(("assistant", "a")))
    assert (whole_text(sample), trained_text(sample)) == ("$^A:a|", "^A:a|")


def test_a_template_that_rewrites_earlier_turns_is_refused():
    def forgetful(messages):
        return appending([m | {"content": ""} for m in messages[:-1]] + messages[-1:])

    turns = ("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")
    with pytest.raises(SftDataError, match="rewrites what precedes message 2"):
        SampleTokenizer(Wrapped(template=forgetful))(conversation(*turns))

    def thoughtless(messages):
        last = len(messages) - 1
        return appending(
            [
                m | {"content": ""} if m["role"] == "assistant" and at < last else m
                for at, m in enumerate(messages)
            ]
        )

    assert trained_text(SampleTokenizer(Wrapped(template=thoughtless))(conversation(*turns[:2])))
    with pytest.raises(SftDataError, match=r"message 4: give each turn as 'prompt' and"):
        SampleTokenizer(Wrapped(template=thoughtless))(conversation(*turns))

    def broken(messages):
        raise RuntimeError("roles must alternate")

    with pytest.raises(SftDataError, match=r"Wrapped cannot write it: .* roles must alternate"):
        SampleTokenizer(Wrapped(template=broken))(conversation(*turns))


def test_an_sft_tokenizer_decides_itself_what_is_trained():
    class Sft(Wrapped):
        library = "sft"

        def tokenize_conversation(self, messages, *, return_target, add_generation_prompt):
            assert return_target
            assert not add_generation_prompt
            assert messages[0] == {"role": "user", "content": "q"}
            return np.array([5, 6, 7, 8]), np.array([-100, -100, 7, 8])

    sample = SampleTokenizer(Sft())(conversation(("user", "q"), ("assistant", "a")))
    assert sample.ids.tolist() == [5, 6, 7, 8]
    assert sample.trained.tolist() == [False, False, True, True]


def test_tokenizers_without_an_end_and_samples_with_nothing_trained_are_refused():
    with pytest.raises(SftDataError, match="token: set another --tokenizer-type"):
        SampleTokenizer(SimpleNamespace(tokenize=list))

    class Silent(Wrapped):
        library = "sft"

        def tokenize_conversation(self, *arguments, **keywords):
            return [5, 6], [-100, -100]

    with pytest.raises(SftDataError, match="no token of it would be trained"):
        SampleTokenizer(Silent())(conversation(("assistant", "a")))
