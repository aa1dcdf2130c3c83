"""Lines of supervised fine-tuning data: found, parsed, refused."""

import pickle

import pytest
from sft_cases import BYTES, trained_text

from mcore_batching.integrations.megatron_lm.sft import SftDataError
from mcore_batching.integrations.megatron_lm.sft.conversations import (
    Completion,
    Conversation,
    parse_record,
)
from mcore_batching.integrations.megatron_lm.sft.dataset import TokenizedLines
from mcore_batching.integrations.megatron_lm.sft.jsonl import JsonLines


def test_records_are_found_over_files_and_blank_lines(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_bytes(b'\xef\xbb\xbf{"n": 0}\r\n\n   \n{"n": 1}\n')
    second.write_bytes(b'\n{"n": "' + b"x" * 300_000 + b'"}\n{"n": 3}')
    lines = JsonLines([str(first), str(second)])
    assert len(lines) == 4
    assert [lines[index]["n"] for index in range(4)] == [0, 1, "x" * 300_000, 3]
    assert lines[1] == {"n": 1}
    assert lines.files == [range(2), range(2, 4)]
    assert pickle.loads(pickle.dumps(lines))[3] == {"n": 3}
    with pytest.raises(IndexError):
        lines[4]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"prompt": "a"', "not a line of JSON"),
        (b"\xff", "not a line of JSON"),
        (b"[1]", "expected {.*}, got list"),
        (b'{"prompt": "a"}', "got an object with the keys 'prompt'"),
        (b"{}", "got an object with the keys none"),
        (b'{"prompt": 3, "completion": "a"}', "prompt must be a text, got int 3"),
        (b'{"question": "a", "answer": null}', "answer must be a text, got NoneType"),
        (b'{"messages": "a"}', "'messages' must be a list of messages, got str"),
        (b'{"messages": []}', "'messages' must be a list of messages, got list"),
        (b'{"messages": [{"role": "user"}]}', 'message 1 must be {"role"'),
        (b'{"messages": [{"role": "bot", "content": "a"}]}', "must be one of system, user"),
        (b'{"messages": [{"role": ["user"], "content": "a"}]}', "must be one of system, user"),
        (
            b'{"messages": [{"role": "assistant", "content": [1]}]}',
            "content of message 1 must be a text, got list",
        ),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "trains nothing"),
        (b'{"prompt": "a", "completion": "\\ud800"}', "cannot write this sample: Unicode"),
    ],
)
def test_bad_lines_are_named_with_file_line_and_what_came(tmp_path, line, problem):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "a", "completion": "b"}\n\n' + line + b"\n")
    samples = TokenizedLines(JsonLines([str(path)]), BYTES)
    assert trained_text(samples[0]) == "b$"
    with pytest.raises(SftDataError, match=problem) as raised:
        samples[1]
    assert (raised.value.path, raised.value.line) == (str(path), 3)
    assert str(raised.value).startswith(f"{path}:3: ")
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (str(copy), copy.path, copy.line) == (str(raised.value), str(path), 3)


def test_files_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(SftDataError, match=r"absent\.jsonl: cannot be read: No such file"):
        JsonLines([str(tmp_path / "absent.jsonl")])
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(SftDataError, match=r"empty\.jsonl: holds no record"):
        JsonLines([str(tmp_path / "empty.jsonl")])


def test_the_three_kinds_of_record():
    assert parse_record({"prompt": "a ", "completion": " b", "id": 1}) == Completion("a ", " b")
    assert parse_record({"question": "a", "answer": "b"}) == Completion("a\n", "b")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "x": 1}]
    assert parse_record({"messages": messages, "prompt": ""}) == Conversation(tuple(messages))
    with pytest.raises(SftDataError):
        parse_record({"prompt": "a", "answer": "b"})
