"""The command's report: every row of a part is in the table, whatever goes wrong is a miss."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import run_parts
from run_parts import PARTS, Part, environment, main, run, table

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


def test_the_exit_status_says_whether_all_was_met(monkeypatch: pytest.MonkeyPatch) -> None:
    for program, status in ((GOOD, 0), (BAD, 1)):
        monkeypatch.setattr(run_parts, "PARTS", [Part("one", "shows", ("-c", program))])
        monkeypatch.setattr(sys, "argv", ["run_parts.py"])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == status


def test_the_exactness_tests_that_are_chosen_exist() -> None:
    """Seeds that cover every pair are drawn anew now and then."""
    text = (run_parts.ROOT / run_parts.EXACTNESS).read_text()
    expressions = [part.command[-1] for part in PARTS if run_parts.EXACTNESS in part.command]
    names = [name.partition("-")[2] for each in expressions for name in each.split(" or ")]
    assert len(names) == 5
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_without_a_gpu_it_says_what_it_would_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_parts.py", "--list"])
    main()
    printed = capsys.readouterr().out
    assert all(part.shows in printed for part in PARTS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "no part nothing: choose from kernel"),
        (["--lengths", "/gone"], "--lengths /gone: no such file"),
    ],
)
def test_wrong_words_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_parts.py", *words])
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err


def test_ranks_share_a_gpu_only_where_there_are_too_few() -> None:
    four = next(part for part in PARTS if part.processes == 4)

    def variables(gpus: int) -> dict[str, Any]:
        return environment(four, gpus)

    assert variables(1)["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in variables(4)
    assert variables(0)["MCORE_BATCHING_CPU"] == "1"
    assert variables(4)["PYTHONPATH"].startswith(str(Path(run_parts.__file__).parent))
