"""Reading lengths: every accepted form, and every refusal with its file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_batching.tools.lengths_file import LengthsFileError, read_lengths


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


@pytest.mark.parametrize(
    ("name", "text", "column", "message"),
    [
        ("a.txt", "3\n\n-4\n", None, f"{{path}}:3: {BAD} '-4'"),
        ("a.txt", "3\n4.0\n", None, f"{{path}}:2: {BAD} '4.0'"),
        ("a.txt", "٣\n", None, f"{{path}}:1: {BAD} '٣'"),
        ("a.txt", "9" * 5000, None, f"{{path}}:1: {BAD} '999"),
        ("a.txt", "1099511627777", None, f"{{path}}:1: {BAD} '1099511627777'"),
        (
            "a.txt",
            "3\n",
            "n",
            "column (--column) is for .csv and .jsonl files; leave it out for {path}",
        ),
        (
            "a.csv",
            "a,b\n1,2\n",
            None,
            "{path}: no column is named; set column (--column) to one of 'a', 'b'",
        ),
        (
            "a.csv",
            "a,b\n1,2\n",
            "c",
            "{path}: there is no column 'c'; set column (--column) to one of 'a'",
        ),
        ("a.csv", "", "c", "{path}: there is no column 'c'; set column (--column) to one of none"),
        ("a.csv", "a,b\n1,2\n1,x\n", "b", f"{{path}}:3: {BAD} 'x'"),
        ("a.csv", "a,b\n1,2\n1\n", "b", f"{{path}}:3: {BAD} None"),
        ("a.csv", "n\n1,024\n", None, "{path}:2: more cells than the heading's 1; write numbers"),
        ("a.csv", "a,n\nx,5\nx,1,024\n", "n", "{path}:3: more cells than the heading's 2"),
        ("a.csv", 'n\n"1,024"\n', None, f"{{path}}:2: {BAD} '1,024'"),
        ("a.jsonl", '{"n": 3}\n{"n": 3.0}\n', "n", f"{{path}}:2: {BAD} 3.0"),
        ("a.jsonl", '{"n": true}\n', "n", f"{{path}}:1: {BAD} True"),
        ("a.jsonl", '{"n": [1, 2]}\n', "n", f"{{path}}:1: {BAD} [1, 2]"),
        (
            "a.jsonl",
            '{"n": 3}\n{"m": 3}\n',
            "n",
            "{path}:2: there is no column 'n'; set column (--column) to",
        ),
        (
            "a.jsonl",
            '{"n": 3}\n',
            None,
            "{path}:1: no column is named; set column (--column) to one of 'n'",
        ),
        ("a.jsonl", '{"n": 3}\n{"n"\n', "n", "{path}:2: not a line of JSON"),
        (
            "a.jsonl",
            "3\n",
            "n",
            "{path}:1: expected a JSON object, got '3'; give one a line, or a .txt file "
            "of one length a line",
        ),
    ],
)
def test_what_is_refused(
    tmp_path: Path, name: str, text: str, column: str | None, message: str
) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(LengthsFileError) as caught:
        read_lengths(path, column)
    assert message.format(path=path) in str(caught.value)
