"""The command's report: every row of a part is in the table, whatever goes wrong is a miss."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import run_parts
from run_parts import PARTS, Part, run, table

GOOD = """print('ROW {"what": "w", "found": "1", "wanted": "2", "ok": true}')"""
BAD = GOOD.replace("true", "false")


@pytest.mark.parametrize(
    ("program", "found", "oks"),
    [
        (GOOD, ["1"], [True]),
        (BAD, ["1"], [False]),
        (f"{GOOD}; raise SystemExit(3)", ["1", "with status 3"], [True, False]),
        ("print('2 passed in 1.0s')", ["2 passed in 1.0s"], [True]),
        ("print('3 skipped in 1.0s')", ["3 skipped in 1.0s"], [False]),
        ("print('1 failed, 2 passed'); raise SystemExit(1)", ["1 failed, 2 passed"], [False]),
        ("raise SystemExit(1)", ["failed"], [False]),
        ("import time; time.sleep(60)", ["failed"], [False]),
    ],
)
def test_rows_of_a_part(
    monkeypatch: pytest.MonkeyPatch, program: str, found: list[str], oks: list[bool]
) -> None:
    monkeypatch.setattr(run_parts, "SECONDS", 3.0)
    rows = run(Part("one", "shows", ("-c", program)), 0, None)
    assert [row["found"] for row in rows] == found
    assert [row["ok"] for row in rows] == oks
    assert len(table(rows, 0).splitlines()) == 4 + len(rows)
    assert ("**missed**" in table(rows, 0)) == (not all(oks))


def test_the_exactness_tests_that_are_chosen_exist() -> None:
    """Seeds that cover every pair are drawn anew now and then."""
    text = (run_parts.ROOT / run_parts.EXACTNESS).read_text()
    expressions = [part.command[-1] for part in PARTS if run_parts.EXACTNESS in part.command]
    names = [name.partition("-")[2] for each in expressions for name in each.split(" or ")]
    assert len(names) == 5
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []
