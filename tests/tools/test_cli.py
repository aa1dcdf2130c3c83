"""The command, in-process and as a real process."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.patience import patience

from mcore_batching.flags import FLAGS, OPTIONS, PREFIX, REMOVED_FLAGS, THEMES
from mcore_batching.planning import (
    Argument,
    Plan,
    PlanningError,
    step_statistics,
)
from mcore_batching.tools.cli import main
from mcore_batching.tools.cli.options import CommandParser

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def command(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mcore_batching", *arguments],
        input=stdin,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=patience(60),
    )


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


def test_plan_and_check_as_processes(tmp_path: Path, lengths_file: str) -> None:
    out = str(tmp_path / "plan.json")
    made = command("plan", lengths_file, "--max-tokens-per-gpu", "10", "--dp", "2", "--out", out)
    assert (made.returncode, made.stderr) == (0, "")
    plan = Plan.from_json(Path(out).read_text())
    lines = made.stdout.splitlines()
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
    assert lines[-2:] == [f"digest {plan.digest()}", f"wrote {out}"]

    model = tmp_path / "config.json"
    model.write_text(
        '{"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 256,'
        ' "num_attention_heads": 4, "vocab_size": 1048576}'
    )
    sized = command("plan", lengths_file, "--max-tokens-per-gpu", "10", "--model", str(model))
    (line,) = (line for line in sized.stdout.splitlines() if line.startswith("estimated memory"))
    assert line.endswith("first stage 0.00 GiB, last stage 0.25 GiB (0.08 GiB of it for logits)")
    # The output layer alone makes up nearly all of the model's costs.
    on_stages = command(
        "compare", lengths_file, *["--max-tokens-per-gpu", "10", "--pp", "2", "--model"], str(model)
    )
    assert (on_stages.returncode, on_stages.stderr) == (0, "")

    checked = command("check", out, lengths_file)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout == (
        f"{out}: 6 samples in 1 step, DP2, cap 10 tokens: every invariant holds; digest matches\n"
    )


def test_every_option_reaches_the_plan(tmp_path: Path, lengths_file: str) -> None:
    out = tmp_path / "plan.json"
    arguments = (
        "--max-tokens-per-gpu 16 --dp 2 --pp 3 --vpp 2 --cp 2 --tp 4 --ep 2 --sequence-parallel "
        "--microbatch-group-size 5 --samples-per-step 4 --on-oversize error --fill placeholder "
        f"--packing first-fit --balance none --out {out}"
    )
    assert main(["plan", lengths_file, *arguments.split()]) == 0
    plan = Plan.from_json(out.read_text())
    document = json.loads(out.read_text())
    assert document["layout"] == {
        "data_parallel": 2,
        "pipeline_parallel": 3,
        "virtual_pipeline": 2,
        "context_parallel": 2,
        "tensor_parallel": 4,
        "expert_parallel": 2,
        "sequence_parallel": True,
        "microbatch_group_size": 5,
    }
    assert document["config"] == {
        "max_tokens_per_gpu": 16,
        "packing": "first-fit",
        "balance": "none",
        "fill": "placeholder",
        "on_oversize": "error",
        "pad_each_to": None,
        "pad_total_to": None,
    }
    assert [step.num_samples for step in plan.steps] == [4, 2]
    assert plan.steps[0].num_microbatches == 5


def test_standard_input_csv_and_json_lines(
    tmp_path: Path, lengths_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = Path(lengths_file).read_text().split()
    csv_file, json_file = tmp_path / "a.csv", tmp_path / "a.jsonl"
    csv_file.write_text("id,n\n" + "".join(f"x,{length}\n" for length in lengths))
    json_file.write_text("".join(f'{{"n": {length}}}\n' for length in lengths))
    plain = ["--max-tokens-per-gpu", "10", "--no-advice"]  # which depends on the time it takes
    piped = command("plan", "-", *plain, stdin="\n".join(lengths))
    assert piped.returncode == 0
    for path, column in ((lengths_file, []), (csv_file, ["n"]), (json_file, ["n"])):
        flags = ["--column", *column] if column else []
        assert main(["plan", str(path), *flags, *plain]) == 0
        assert capsys.readouterr().out == piped.stdout


def test_many_steps_are_summarised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("3\n" * 200)
    flags = ["--max-tokens-per-gpu", "10", "--samples-per-step", "2"]
    assert main(["plan", str(lengths), *flags]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) < 40
    assert "(84 steps)" in printed
    assert "200 samples in 100 steps" in printed
    assert (
        "100 micro-batches with samples in all steps, 1.000 x the 100 that no packing takes "
        "fewer than\nplan one step's samples alone to see what holds it back and what would help\n"
    ) in printed


def plan_document(tmp_path: Path, lengths_file: str, capsys: pytest.CaptureFixture[str]) -> dict:
    out = tmp_path / "plan.json"
    arguments = ["--max-tokens-per-gpu", "10", "--dp", "2", "--out", str(out)]
    assert main(["plan", lengths_file, *arguments]) == 0
    capsys.readouterr()
    return json.loads(out.read_text())


BREAKS = {
    "exact cover": [[[0, 1], [3]], [[2, 4], [0, 5]]],
    "cap": [[[0, 3], [1]], [[2, 4], [5]]],
    "equal count": [[[0, 1], [3], []], [[2, 4], [5]]],
    "split before placeholder": [[[0, 1], [], [3]], [[2], [4], [5]]],
}


@pytest.mark.parametrize("invariant", BREAKS)
def test_check_names_the_broken_invariant(
    tmp_path: Path, lengths_file: str, capsys: pytest.CaptureFixture[str], invariant: str
) -> None:
    document = plan_document(tmp_path, lengths_file, capsys)
    ranks = BREAKS[invariant]
    document["steps"] = [{"num_microbatches": len(ranks[1]), "ranks": ranks}]
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(document))
    assert main(["check", str(broken), lengths_file]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert f"{broken}: invariant '{invariant}' is broken" in printed.err


def test_check_finds_a_changed_plan_that_keeps_the_invariants(
    tmp_path: Path, lengths_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = plan_document(tmp_path, lengths_file, capsys)
    document["steps"][0]["ranks"].reverse()
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(document))
    assert main(["check", str(changed), lengths_file]) == 1
    assert "invariants hold, but its digest is" in capsys.readouterr().err
    del document["digest"]
    changed.write_text(json.dumps(document))
    assert main(["check", str(changed), lengths_file]) == 0
    assert capsys.readouterr().out.endswith("holds; no digest recorded\n")


def test_check_against_other_lengths_that_fit_as_well(
    tmp_path: Path, lengths_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = plan_document(tmp_path, lengths_file, capsys)
    plan, other = tmp_path / "plan.json", tmp_path / "other.txt"
    other.write_text("5\n4\n3\n9\n2\n14\n")
    assert main(["check", str(plan), str(other)]) == 1
    assert f"made from other lengths than {other}" in capsys.readouterr().err
    del document["lengths_digest"]  # as releases before it, and other programs, write plans
    plan.write_text(json.dumps(document))
    assert main(["check", str(plan), str(other)]) == 0
    assert "digest matches; the plan does not say from which lengths" in capsys.readouterr().out
    document["lengths_digest"] = 7
    plan.write_text(json.dumps(document))
    assert main(["check", str(plan), str(other)]) == 2
    assert '"lengths_digest" must be a string, got 7' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ("--max-tokens-per-gpu 10", "3\nx\n", "<stdin>:2: expected a length of 0"),
        ("--max-tokens-per-gpu 9 --column n", "3\n", "--column is for .csv and .jsonl files"),
        (
            "--max-tokens-per-gpu 10 --on-oversize error",
            "3\n17\n",
            "sample 1 has 17 tokens, 17 after padding, the cap is 10",
        ),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    stdin: str,
    message: str,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    assert main(["plan", "-", *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("mcore-batching: ")
    assert message in printed.err


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("--max-tokens-per-gpu 0", {"max_tokens_per_gpu": "--max-tokens-per-gpu"}),
        ("--max-tokens-per-gpu 9 --dp 0", {"data_parallel": "--dp"}),
        ("--max-tokens-per-gpu 9 --samples-per-step 0", {"samples_per_step": "--samples-per-step"}),
        (
            "--max-tokens-per-gpu 9 --vpp 2",
            {"virtual_pipeline": "--vpp=2", "pipeline_parallel": "--pp"},
        ),
        (
            "--max-tokens-per-gpu 9 --pp 4 --vpp 2 --microbatch-group-size 2",
            {"microbatch_group_size": "--microbatch-group-size", "pipeline_parallel": "--pp=4"},
        ),
        (
            "--max-tokens-per-gpu 9 --dp 2 --ep 3",
            {"expert_parallel": "--ep", "data_parallel": "--dp"},
        ),
        (
            f"--max-tokens-per-gpu 9 --dp {10**12}",
            {"data_parallel": "--dp", "pipeline_parallel": "--pp"},
        ),
        ("--max-tokens-per-gpu 9 --pp 2 --vpp 1000000", {"virtual_pipeline": "--vpp"}),
        (
            "--max-tokens-per-gpu 9 --plan-effort 1000000000",
            {"plan_effort": "--plan-effort", "balance": "--balance=cost"},
        ),
        ("--max-tokens-per-gpu 1 --cp 2", {"max_tokens_per_gpu": "--max-tokens-per-gpu"}),
        (
            "--max-tokens-per-gpu 9 --balance pipeline --fill placeholder",
            {
                "balance='": "--balance=cost",
                "fill='": "--fill=split",
                "packing='": "--packing=auto",
            },
        ),
        (
            "--max-tokens-per-gpu 9 --on-oversize error",
            {"max_tokens_per_gpu": "--max-tokens-per-gpu", "on_": "--on-oversize=own-bin"},
        ),
    ],
)
def test_planners_errors_name_flags(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    names: dict[str, str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("3\n17\n"))
    assert main(["plan", "-", *arguments.split()]) == 2
    message = capsys.readouterr().err
    for name, flag in names.items():
        assert flag in message
        assert name not in message.replace(flag, "")


def test_arguments_without_a_flag_are_spelled_as_in_the_library() -> None:
    parser = CommandParser()
    parser.add_argument("--dp", dest="data_parallel")
    parser.add_argument("lengths", metavar="LENGTHS")
    error = PlanningError(
        *("set ", Argument("data_parallel", 2), ", ", Argument("data_parallel"), ", "),
        *(Argument("lengths"), " or ", Argument("pad_each_to", 8)),
    )
    assert error.text(parser.spell) == "set --dp=2, --dp, LENGTHS or pad_each_to=8"


@pytest.mark.parametrize("flag", REMOVED_FLAGS)
@pytest.mark.parametrize("name", ["plan", "compare"])
def test_removed_flags_are_refused_in_one_line(
    name: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = flag.replace(PREFIX, "--")
    with pytest.raises(SystemExit) as caught:
        main([name, "-", "--max-tokens-per-gpu", "10", own, "5"])
    assert caught.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(f"{own} is gone: {REMOVED_FLAGS[flag]}")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["plan"],
        ["plan", "-"],
        ["plan", "-", "--max-tokens-per-gpu", "many"],
        ["plan", "-", "--max-tokens", "10"],
        ["plan", "-", "--max-tokens-per-gpu", "10", "--fill", "pad"],
        ["check", "plan.json"],
    ],
)
def test_bad_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: mcore-batching" in capsys.readouterr().err


def test_advice_is_left_out_on_request(
    lengths_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["plan", lengths_file, "--max-tokens-per-gpu", "10"]
    assert main(flags) == main([*flags, "--no-advice"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("held back by: ") == 2
    assert printed.count("would help: ") == 1
