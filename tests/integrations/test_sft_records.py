"""Lines of supervised fine-tuning data: found, parsed, refused."""

import pickle

import pytest
from sft_cases import BYTES

from mcore_batching.integrations.megatron_lm.sft import SftDataError
from mcore_batching.integrations.megatron_lm.sft.dataset import read_samples
from mcore_batching.integrations.megatron_lm.sft.records import (
    Completion,
    Conversation,
    parse_record,
    records_of,
)


def test_blank_lines_are_skipped_and_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 0}\r\n\n   \n{"n": "' + b"x" * 300_000 + b'"}\n{"n": 3}')
    expected = [(1, {"n": 0}), (4, {"n": "x" * 300_000}), (5, {"n": 3})]
    assert list(records_of(str(path))) == expected


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"prompt": "a"', "not a line of JSON"),
        (b"\xff", "not a line of JSON"),
        (b"[1]", r"expected {.*}, got \[1\]"),
        (b'{"prompt": "a"}', "expected {.*}, got {'prompt': 'a'}"),
        (b"{}", "expected {.*}, got {}"),
        (b'{"prompt": 3, "completion": "a"}', "prompt must be a text, got 3"),
        (b'{"question": "a", "answer": null}', "answer must be a text, got None"),
        (b'{"messages": "a"}', "'messages' must be a list of messages, got 'a'"),
        (b'{"messages": []}', r"'messages' must be a list of messages, got \[\]"),
        (b'{"messages": ["a"]}', "message 1 must have a role of system, user"),
        (b'{"messages": [{"role": "user"}]}', "content of message 1 must be a text, got None"),
        (b'{"messages": [{"role": "bot", "content": "a"}]}', "must have a role of system, user"),
        (b'{"messages": [{"role": ["user"], "content": "a"}]}', "must have a role of system, user"),
        (
            b'{"messages": [{"role": "assistant", "content": [1]}]}',
            r"content of message 1 must be a text, got \[1\]",
        ),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "no message of the assistant"),
        (b'{"prompt": "a", "completion": "\\ud800"}', "cannot write it: Unicode"),
    ],
)
def test_bad_lines_are_named_with_file_line_and_what_came(tmp_path, line, problem):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "a", "completion": "b"}\n\n' + line + b"\n")
    with pytest.raises(SftDataError, match=problem) as raised:
        read_samples(str(path), BYTES)
    assert (raised.value.path, raised.value.line) == (str(path), 3)
    assert str(raised.value).startswith(f"{path}:3: ")
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (str(copy), copy.path, copy.line) == (str(raised.value), str(path), 3)


def test_files_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(SftDataError, match=r"absent\.jsonl: cannot be read: No such file"):
        list(records_of(str(tmp_path / "absent.jsonl")))


def test_the_three_kinds_of_record():
    assert parse_record({"prompt": "a ", "completion": " b", "id": 1}) == Completion("a ", " b")
    assert parse_record({"question": "a", "answer": "b"}) == Completion("a\n", "b")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "x": 1}]
    assert parse_record({"messages": messages, "prompt": ""}) == Conversation(tuple(messages))
    with pytest.raises(SftDataError):
        parse_record({"prompt": "a", "answer": "b"})
