"""Reading lengths: every accepted form, and every refusal with its file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_batching.tools.lengths_file import read_lengths
from mcore_batching.tools.options import UsageError


def written(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / name
    path.write_bytes(text.encode("utf-8"))
    return str(path)


@pytest.mark.parametrize(
    ("name", "text", "column", "lengths"),
    [
        ("a.txt", "3\n0\n17\n", None, [3, 0, 17]),
        ("a", " 3 \r\n\r\n+5\n\n", None, [3, 5]),
        ("a.txt", "\ufeff3\n4", None, [3, 4]),
        ("a.txt", "", None, []),
        ("a.csv", "id,tokens\na,3\nb,17\n", "tokens", [3, 17]),
        ("a.csv", 'id,tokens\n"two\nlines",3\nb,17\n', "tokens", [3, 17]),
        ("a.csv", "tokens\n3\n17,\n", None, [3, 17]),
        ("a.CSV", "\ufefftokens\n3\n", "tokens", [3]),
        ("a.jsonl", '{"n": 3, "x": "y"}\n\n{"n": "17"}\n', "n", [3, 17]),
        ("a.json", '{"n": 3}\n', "n", [3]),
        ("a.ndjson", '{"n": 3}\n', "n", [3]),
    ],
)
def test_what_is_read(
    tmp_path: Path, name: str, text: str, column: str | None, lengths: list[int]
) -> None:
    assert read_lengths(written(tmp_path, name, text), column) == lengths


BAD = "expected a length of 0 to 1099511627776 tokens, got"


NONE_NAMED = "no column is named; set column (--column) to one of"
NO_SUCH = "there is no column 'c'; set column (--column) to"
REFUSED = {
    ("a.txt", None, "3\n\n-4\n"): f":3: {BAD} '-4'",
    ("a.txt", None, "3\n4.0\n"): f":2: {BAD} '4.0'",
    ("a.txt", None, "٣\n"): f":1: {BAD} '٣'",
    ("a.txt", None, "9" * 5000): f":1: {BAD} '999",
    ("a.txt", None, "1099511627777"): f":1: {BAD} '1099511627777'",
    ("a.csv", None, "a,b\n1,2\n"): f": {NONE_NAMED} 'a', 'b'",
    ("a.csv", "c", "a,b\n1,2\n"): f": {NO_SUCH} one of 'a'",
    ("a.csv", "c", ""): f": {NO_SUCH} one of none",
    ("a.csv", "b", "a,b\n1,2\n1,x\n"): f":3: {BAD} 'x'",
    ("a.csv", "b", "a,b\n1,2\n1\n"): f":3: {BAD} None",
    ("a.csv", None, "n\n1,024\n"): ":2: more cells than the heading's 1; write numbers",
    ("a.csv", "n", "a,n\nx,5\nx,1,024\n"): ":3: more cells than the heading's 2",
    ("a.csv", None, 'n\n"1,024"\n'): f":2: {BAD} '1,024'",
    ("a.jsonl", "n", '{"n": 3}\n{"n": 3.0}\n'): f":2: {BAD} 3.0",
    ("a.jsonl", "n", '{"n": true}\n'): f":1: {BAD} True",
    ("a.jsonl", "n", '{"n": [1, 2]}\n'): f":1: {BAD} [1, 2]",
    ("a.jsonl", "c", '{"c": 3}\n{"m": 3}\n'): f":2: {NO_SUCH}",
    ("a.jsonl", None, '{"n": 3}\n'): f":1: {NONE_NAMED} 'n'",
    ("a.jsonl", "n", '{"n": 3}\n{"n"\n'): ":2: not a line of JSON",
    ("a.jsonl", "n", "[" * 100_000): ":1: not a line of JSON: maximum recursion depth",
    ("a.csv", None, "n\n" + "9" * 200_000): ": field larger than field limit",
    ("a.jsonl", "n", "3\n"): ":1: expected a JSON object, got '3'; give one a line, or a .txt file "
    "of one length a line",
}
"""Names of files, a column and contents: the place and the error that follow the file's path."""


@pytest.mark.parametrize(("name", "column", "text"), REFUSED)
def test_what_is_refused(tmp_path: Path, name: str, text: str, column: str | None) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(UsageError) as caught:
        read_lengths(path, column)
    assert path + REFUSED[name, column, text] in str(caught.value)
