"""The command and its tables, in-process; `test_streams` starts it as a process."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from mcore_batching.flags import FLAGS, OPTIONS, PREFIX, REMOVED_FLAGS, THEMES
from mcore_batching.planning import (
    ParallelDims,
    Plan,
    PlannerConfig,
    plan_batch,
    step_statistics,
)
from mcore_batching.tools import plan as plan_command
from mcore_batching.tools import report
from mcore_batching.tools.cli import main


@pytest.fixture
def lengths_file(tmp_path: Path) -> str:
    path = tmp_path / "lengths.txt"
    path.write_text("6\n4\n3\n9\n2\n14\n")
    return str(path)


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
    jsonl = tmp_path / "a.jsonl"
    jsonl.write_text("".join(f'{{"n": {length}}}\n' for length in (6, 4, 3, 9, 2, 14)))
    assert printed("plan", str(jsonl), "--column", "n", *cap, "--dp", "2", "--no-advice") == quiet

    model = tmp_path / "config.json"
    model.write_text(
        '{"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 256,'
        ' "num_attention_heads": 4, "vocab_size": 1048576}'
    )
    sized = printed("plan", lengths_file, *cap, "--model", str(model))
    (line,) = (line for line in sized if line.startswith("estimated memory"))
    assert line.endswith("first stage 0.00 GiB, last stage 0.25 GiB (0.08 GiB of it for logits)")
    # The output layer alone makes up nearly all of the model's costs.
    printed("compare", lengths_file, *cap, "--pp", "2", "--model", str(model))
    holds = "6 samples in 1 step, DP2, cap 10 tokens: every invariant holds; digest matches"
    assert printed("check", out, lengths_file) == [f"{out}: {holds}"]


def test_every_option_reaches_the_plan(
    tmp_path: Path, lengths_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    arguments = (
        "--max-tokens-per-gpu 16 --dp 2 --pp 3 --vpp 2 --cp 2 --tp 4 --ep 2 --sequence-parallel "
        "--microbatch-group-size 5 --samples-per-step 4 --on-oversize error --fill placeholder "
        "--packing first-fit --balance none --dynamic-cp 2 --plan-effort 7 "
        f"--max-samples-per-row 3 --out {out}"
    )
    assert main(["plan", lengths_file, *arguments.split()]) == 0
    plan = Plan.from_json(out.read_text())
    assert plan.steps[0].dims == ParallelDims(
        data_parallel=2,
        pipeline_parallel=3,
        virtual_pipeline=2,
        context_parallel=2,
        tensor_parallel=4,
        expert_parallel=2,
        sequence_parallel=True,
        microbatch_group_size=5,
    )
    assert plan.steps[0].config == PlannerConfig(
        max_tokens_per_gpu=16,
        packing="first-fit",
        balance="none",
        fill="placeholder",
        on_oversize="error",
        max_context_parallel=2,
        plan_effort=7,
        max_samples_per_row=3,
    )
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
