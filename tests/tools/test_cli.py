"""The command, its tables and the files of lengths that it reads, in-process; `test_streams` starts
it as a process."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from mcore_batching.flags import FLAGS, OPTIONS, PREFIX, REMOVED_FLAGS, THEMES
from mcore_batching.planning import (
    CostModel,
    MCoreBatchingError,
    ParallelDims,
    Plan,
    PlannerConfig,
    plan_batch,
    step_statistics,
)
from mcore_batching.planning.errors import FLAG_OF
from mcore_batching.tools import plan as plan_command
from mcore_batching.tools import report
from mcore_batching.tools.cli import main
from mcore_batching.tools.lengths_file import read_lengths
from mcore_batching.tools.options import UsageError


def written(tmp_path: Path, text: str, name: str = "lengths.txt") -> str:
    path = tmp_path / name
    path.write_bytes(text.encode("utf-8"))
    return str(path)


@pytest.fixture
def lengths_file(tmp_path: Path) -> str:
    return written(tmp_path, "6\n4\n3\n9\n2\n14\n")


def test_flags_are_printed_by_theme_each_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(name for names in THEMES.values() for name in names) == sorted(OPTIONS)
    assert main(["flags"]) == 0
    printed = capsys.readouterr().out
    titles = [line for line in printed.splitlines() if line.startswith("mcore_batching: ")]
    assert titles == [f"mcore_batching: {theme}:" for theme in THEMES]
    of_lines = [line.split()[0].rstrip(",") for line in printed.splitlines() if line[:4] == "  --"]
    assert sorted(of_lines) == sorted(FLAGS.values())
    assert "micro-batch per sample (default: 1500)" in " ".join(printed.split())
    assert "--help" not in printed  # which is no flag of training


def test_plan_and_check(
    tmp_path: Path, lengths_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*arguments: str) -> list[str]:
        assert main(list(arguments)) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out.splitlines()

    out, cap = str(tmp_path / "plan.json"), ("--max-tokens-per-gpu", "10")
    lines = printed("plan", lengths_file, *cap, "--dp", "2", "--out", out)
    plan = Plan.from_json(Path(out).read_text())
    assert lines[0] == "6 samples in 1 step, DP2, cap 10 tokens"
    assert lines[1].split("  ")[-3:] == ["rank balance", "slot balance", "time/floor"]
    statistics = step_statistics(plan.steps[0], [6, 4, 3, 9, 2, 14])
    assert lines[3].split() == [
        *("0", "6", "2", "95.0%", "0.0%", "0", "1", "14"),
        *(f"{statistics.rank_balance:.3f}", f"{statistics.slot_balance:.3f}", "1.000"),
    ]
    assert lines[5].split()[0] == "total"
    assert any(line.startswith("token fill    tokens of samples / (cap x") for line in lines)
    assert any("packing under the cap of 10 tokens takes 4 micro-batches" in s for s in lines)
    assert any(line.strip().startswith("held back by: ") for line in lines)
    assert lines[-2:] == [f"digest {plan.digest()}", f"wrote {out}"]
    (advice,) = (at for at, line in enumerate(lines) if line.startswith("  would help: "))
    quiet = printed("plan", lengths_file, *cap, "--dp", "2", "--no-advice")
    assert quiet == [*lines[:advice], lines[-2]]
    text = "".join(f'{{"n": {length}}}\n' for length in (6, 4, 3, 9, 2, 14))
    jsonl = written(tmp_path, text, "a.jsonl")
    assert printed("plan", jsonl, "--column", "n", *cap, "--dp", "2", "--no-advice") == quiet

    text = (
        '{"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 256,'
        ' "num_attention_heads": 4, "vocab_size": 1048576}'
    )
    model = written(tmp_path, text, "config.json")
    sized = printed("plan", lengths_file, *cap, "--model", model)
    (line,) = (line for line in sized if line.startswith("estimated memory"))
    assert line.endswith("first stage 0.00 GiB, last stage 0.25 GiB (0.08 GiB of it for logits)")
    # The output layer alone makes up nearly all of the model's costs.
    printed("compare", lengths_file, *cap, "--pp", "2", "--model", model)
    holds = "6 samples in 1 step, DP2, cap 10 tokens: every invariant holds; digest matches"
    assert printed("check", out, lengths_file) == [f"{out}: {holds}"]


def test_every_option_reaches_the_plan(
    tmp_path: Path, lengths_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dims = ParallelDims(
        data_parallel=2,
        pipeline_parallel=3,
        virtual_pipeline=2,
        context_parallel=2,
        tensor_parallel=4,
        expert_parallel=2,
        microbatch_group_size=5,
    )
    config = PlannerConfig(
        max_tokens_per_gpu=16,
        packing="first-fit",
        balance="none",
        fill="placeholder",
        on_oversize="error",
        max_context_parallel=2,
        plan_effort=7,
        max_samples_per_row=3,
    )
    defaults = asdict(ParallelDims()) | asdict(PlannerConfig(max_tokens_per_gpu=1))
    out, words = tmp_path / "plan.json", ["--sequence-parallel", "--samples-per-step", "4"]
    for name, value in (asdict(dims) | asdict(config)).items():
        words += [FLAG_OF[name], str(value)] if value != defaults[name] else []
    assert main(["plan", lengths_file, *words, "--out", str(out)]) == 0
    plan = Plan.from_json(out.read_text())
    assert plan.steps[0].dims == replace(dims, sequence_parallel=True)
    assert plan.steps[0].config == config
    assert [step.num_samples for step in plan.steps] == [4, 2]
    printed = capsys.readouterr().out
    sizes = "DP2 x PP3 x VPP2 x CP2 x TP4 x EP2 with sequence parallel, dynamic CP to 2, "
    assert printed.startswith(f"6 samples in 2 steps, {sizes}")
    # Several steps are summarised.
    assert "plan one step's samples alone to see what holds it back and what would h" in printed
    assert plan.steps[0].num_microbatches == 5


def test_a_plan_that_the_checker_refuses_is_not_written(
    tmp_path: Path,
    lengths_file: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = plan_batch([6, 4, 3], ParallelDims(), PlannerConfig(max_tokens_per_gpu=20))
    monkeypatch.setattr(plan_command, "plan_batch", lambda *_, **__: wrong)
    out = tmp_path / "plan.json"
    assert main(["plan", lengths_file, "--max-tokens-per-gpu", "20", "--out", str(out)]) == 2
    assert "invariant 'exact cover' is broken" in capsys.readouterr().err
    assert not out.exists()


def broken(*ranks: list[list[int]]) -> dict[str, Any]:
    """Changes that give a plan these micro-batches [ranks][slots]."""
    return {"steps": [{"num_microbatches": len(ranks[1]), "ranks": ranks}]}


REVERSED = broken([[2, 4], [5]], [[0, 1], [3]])


@pytest.mark.parametrize(
    ("changes", "lengths", "status", "message"),
    [
        (broken([[0, 1], [3]], [[2, 4], [0, 5]]), "6", 1, "invariant 'exact cover' is broken"),
        (REVERSED, "6", 1, "invariants hold, but its digest is"),
        (REVERSED | {"digest": None}, "6", 0, "every invariant holds; no digest recorded\n"),
        ({}, "5", 1, "made from other lengths than "),  # that fit as well
        ({"lengths_digest": None}, "5", 0, "matches; the plan does not record the lengths"),
        ({"lengths_digest": 7}, "5", 2, '"lengths_digest" must be a string, got 7'),
    ],
)
def test_check_names_what_is_wrong(
    tmp_path: Path,
    lengths_file: str,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    lengths: str,
    status: int,
    message: str,
) -> None:
    path = tmp_path / "plan.json"
    arguments = ["--max-tokens-per-gpu", "10", "--dp", "2", "--out", str(path)]
    assert main(["plan", lengths_file, *arguments]) == 0
    capsys.readouterr()
    document = json.loads(path.read_text()) | changes
    absent = [name for name in ("digest", "lengths_digest") if document[name] is None]
    path.write_text(json.dumps({name: document[name] for name in document if name not in absent}))
    file = Path(lengths_file)
    file.write_text(lengths + file.read_text()[1:])
    assert main(["check", str(path), lengths_file]) == status
    printed = capsys.readouterr()
    said, silent = (printed.err, printed.out) if status else (printed.out, printed.err)
    assert (said.count("\n"), silent) == (1, "")
    assert message in said
    assert status == 2 or f"{path}: " in said


SEARCHED, PLANS = "plan - --max-tokens-per-gpu 9", ("plan", "compare")
TREES = "plan groups.csv --max-tokens-per-gpu 9 --group-column uid"
LARGEST = "max_context_parallel (--dynamic-batch-context-parallel)"
REFUSED = {
    "plan - --max-tokens-per-gpu 0": "max_tokens_per_gpu (--max-tokens-per-gpu) must",
    f"{SEARCHED} --column n": "column (--column) is for .csv",
    f"{SEARCHED} --samples-per-step 0": "(--samples-per-step) must",
    f"{SEARCHED} --dp 0": "data_parallel (--dp) must",
    f"{SEARCHED} --vpp 2": "virtual_pipeline=2 (--vpp 2) needs",
    f"{SEARCHED} --plan-effort 1000000000": "(--dynamic-batch-balance cost)",
    f"{SEARCHED} --on-oversize error": "(--dynamic-batch-on-oversize own-bin)",
    f"{SEARCHED} --dp 4 --dynamic-cp 3": f"set {LARGEST} to 2",
    **{
        f"{SEARCHED} --plot {name}": f"expected a name that ends in .png or .svg, got {name}"
        for name in ("a.pdf", "step.html", "png")
    },
    f"{TREES} --column tokens": "--group-column and --prompt-column need each other",
    f"{TREES} --column tokens --prompt-column no": "there is no column 'no'",
    f"{TREES} --column prompt --prompt-column tokens": "its prompt",
    f"{TREES}s --column tokens --prompt-column prompt": "groups.csv:2: expected a group, text or",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_refused_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("groups.csv").write_text("tokens,prompt,uid,uids\n9,8,a,\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("3\n17\n"))
    assert main(line.split()) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith("mcore-batching: ")
    assert REFUSED[line] in printed.err


USAGE = dict.fromkeys(("", "plan", "plan -", "check plan.json"), "required") | {
    "plan - --max-tokens-per-gpu many": "invalid int value: 'many'",
    "plan - --max-tokens 10": "--max-tokens-per-gpu",  # no abbreviation
    f"{SEARCHED} --fill pad": "invalid choice: 'pad'",
}
for flag, instead in REMOVED_FLAGS.items():
    own = flag.replace(PREFIX, "--")
    USAGE |= {f"{n} - --max-tokens-per-gpu 9 {own} 5": f"{own} is gone: {instead}" for n in PLANS}


@pytest.mark.parametrize("line", USAGE)
def test_bad_usage_exits_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2
    usage, _, said = capsys.readouterr().err.strip().rpartition("\n")
    assert usage.startswith("usage: mcore-batching")
    assert USAGE[line] in said


def test_groups_with_a_prompt_in_common_are_planned_as_trees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, plan = str(tmp_path / "groups.csv"), str(tmp_path / "plan.json")
    rows = [f"{9000 - i},8000,{i % 2}" for i in range(8)]
    Path(table).write_text("\n".join(["tokens,prompt,uid", *rows]))
    given = ("plan", table, "--max-tokens-per-gpu", "20000", "--group-column", "uid")
    columns = ("--column", "tokens", "--prompt-column", "prompt")
    assert main([*given, *columns, "--out", plan]) == 0
    text = capsys.readouterr().out
    assert "71,972 tokens of samples computed as 23,978: 3.0x fewer, 3.7 keys per token" in text
    assert "longest: the tree of samples 0, 2, 4, 6 (11991 tokens)" in text
    assert main(["check", plan, table, "--column", "tokens"]) == 0


def test_plain_text_is_aligned() -> None:
    rows = (("a", "1"), ("longer", "20"))
    table = report.Table(columns=("name", "n"), rows=rows, total=("total", "21"))
    assert str(table) == ("  name   n\n----------\n     a   1\nlonger  20\n----------\n total  21")
    assert str(report.Table(columns=("n",), rows=(("1",),))) == "n\n-\n1"


def test_many_steps_are_cut_in_the_middle_and_totalled_in_full() -> None:
    lengths = [index % 9 + 1 for index in range(100)]
    dims, config = ParallelDims(data_parallel=2), PlannerConfig(max_tokens_per_gpu=10)
    plan = plan_batch(lengths, dims, config, samples_per_step=4)
    statistics = [step_statistics(step, lengths) for step in plan.steps]
    table = report.step_table(statistics)
    assert [row[0] for row in table.rows] == [*"01234567", "…", *map(str, range(17, 25))]
    assert table.rows[8][1] == "(9 steps)"
    assert table.total is not None
    assert table.total[:3] == ("total", "100", str(sum(s.num_microbatches for s in statistics)))
    assert table.total[3] == f"{sum(lengths) / sum(s.offered_tokens for s in statistics):.1%}"
    whole = report.step_table(statistics[:16])
    assert [row[0] for row in whole.rows] == [str(index) for index in range(16)]


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
def test_lengths_that_are_read(
    tmp_path: Path, name: str, text: str, column: str | None, lengths: list[int]
) -> None:
    assert read_lengths(written(tmp_path, text, name), column) == lengths


BAD = "expected a length of 0 to 1099511627776 tokens, got"
NONE_NAMED = "no column is named; set column (--column) to one of"
NO_SUCH = "there is no column 'c'; set column (--column) to"
NO_LENGTHS = {
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


@pytest.mark.parametrize(("name", "column", "text"), NO_LENGTHS)
def test_lengths_that_are_refused(tmp_path: Path, name: str, text: str, column: str | None) -> None:
    path = written(tmp_path, text, name)
    with pytest.raises(UsageError) as caught:
        read_lengths(path, column)
    assert path + NO_LENGTHS[name, column, text] in str(caught.value)


def test_what_a_terminal_would_act_on_is_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In names of files, of columns and of keys."""
    escape, cap = "\x1b[2J\x9b\u202e", ("--max-tokens-per-gpu", "100")
    folder = tmp_path / f"a{escape}"
    folder.mkdir()
    lengths = folder / "é.csv"
    lengths.write_text(f"{escape},b\n1,2\n")
    plan = folder / "plan.json"
    costs = folder / "costs.json"
    costs.write_text(json.dumps({**json.loads(CostModel().to_json()), escape: 1}))
    assert main(["plan", str(lengths), *cap, "--column", "b", "--out", str(plan)]) == 0
    assert main(["check", str(plan), str(lengths), "--column", "b"]) == 0
    assert main(["check", str(plan), str(lengths), "--column", "c"]) == 2
    assert main(["plan", str(folder / "none.txt"), *cap]) == 74
    assert main(["plan", str(lengths), *cap, "--column", "b", "--cost-model", str(costs)]) == 2
    changed = json.loads(plan.read_text())
    changed["config"][escape] = 1
    plan.write_text(json.dumps(changed))
    assert main(["check", str(plan), str(lengths), "--column", "b"]) == 2
    assert main(["replay", str(folder)]) == 2
    with pytest.raises(MCoreBatchingError) as caught:  # as training prints it, too
        Plan.from_json(plan.read_text())
    printed = "".join(capsys.readouterr()) + str(caught.value)
    assert not {"\x1b", "\x9b", "\u202e"} & set(printed)
    assert "a\\x1b[2J\\x9b\\u202e/é.csv" in printed
