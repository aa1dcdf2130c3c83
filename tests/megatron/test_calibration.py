"""`calibrate` on the CPU stand-in, in a process of its own: it joins a process group."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.patience import patience

from mcore_batching.megatron.standalone.calibration import rows_to_time
from mcore_batching.planning import CostModel
from mcore_batching.tools.cli import main

SMALL = ["--hidden-size", "64", "--ffn-hidden-size", "128"]
SMALL += ["--num-attention-heads", "4", "--num-query-groups", "2"]


def test_rows_differ_in_tokens_and_in_the_lengths_of_their_sequences() -> None:
    rows = rows_to_time(4096)
    assert max(map(sum, rows)) == 4096
    assert len({sum(row) for row in rows}) == 5
    assert {len(row) for row in rows if sum(row) == 4096} == {1, 4, 16}
    assert all(min(row) >= 16 for row in rows)


def test_the_command_writes_a_cost_model_that_plan_takes(tmp_path: Path) -> None:
    out, lengths = tmp_path / "cost.json", tmp_path / "lengths.txt"
    lengths.write_text("".join(f"{n}\n" for n in range(1, 200)))
    command = [sys.executable, "-W", "ignore", "-m", "mcore_batching"]
    flags = ["--num-layers", "1", *SMALL, "--max-tokens", "1024", "--repeats", "1"]
    done = subprocess.run(
        [*command, "calibrate", "--cpu", *flags, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=patience(240),
    )
    assert done.returncode == 0, done.stderr
    assert "error of the fit" in done.stdout
    assert "rows on several ranks were not timed, context_parallel_overhead and" in done.stdout
    assert json.loads(out.read_text())["measured_on"] == "CPU"
    planned = subprocess.run(
        [*command, "plan", str(lengths), "--max-tokens-per-gpu", "512", "--cost-model", str(out)],
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert planned.returncode == 0, planned.stderr


@pytest.mark.long
def test_the_command_under_torchrun_writes_what_communication_costs(tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    flags = ["--num-layers", "1", *SMALL, "--max-tokens", "1024", "--repeats", "1"]
    done = subprocess.run(
        [*launcher, "-m", "mcore_batching", "calibrate", "--cpu", *flags, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=patience(240),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rows on up to 2 ranks: a doubling of them adds ") == 1
    assert (
        "measured on the CPU: these figures say nothing of a GPU or of its network" in done.stdout
    )
    model = CostModel.from_json(out.read_text())
    assert (model.context_parallel_overhead, model.context_parallel_fixed) != (0.1, 64.0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--repeats 0", "--repeats must be 1 or more, got 0"),
        ("--max-tokens 63", "--max-tokens must be 64 or more, got 63; set --max-tokens"),
        (
            "--hidden-size 64 --num-attention-heads 3",
            "--hidden-size must be a multiple of twice --num-attention-heads, for heads of one "
            "even size, got 64 and 3; set --hidden-size to a multiple of 6",
        ),
        ("--hidden-size 6 --num-attention-heads 2", "for heads of one even size, got 6 and 2"),
        (
            "--num-attention-heads 4 --num-query-groups 8",
            "--num-query-groups must divide --num-attention-heads, got 8 and 4; set "
            "--num-query-groups to one of 1, 2, 4",
        ),
    ],
)
def test_the_command_names_the_flag_that_is_out_of_range(
    capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    assert main(["calibrate", "--cpu", *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_the_fewest_tokens_of_the_command_make_enough_rows_for_a_fit() -> None:
    assert len(rows_to_time(63)) < 3 <= len(rows_to_time(64))


PROGRAM = """
import contextlib, io, json, sys
import torch
from mcore_batching.megatron import cpu_emulation
cpu_emulation.enable(force=True)
from mcore_batching.tools.cli import main
from mcore_batching.megatron.standalone import calibration
from mcore_batching.planning import ConfigError, CostModel
from mcore_batching.planning.cost_fit import CostFit

stack = calibration.LayerStack(
    num_layers=1, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4,
    num_query_groups=2, dtype=torch.float32,
)
fit, timings = calibration.calibrate(stack, max_tokens=2048, repeats=2)
found = {
    "sequences": sorted({len(timing.lengths) for timing in timings}),
    "linear": fit.cost_model.linear,
    "seconds per unit": fit.seconds_per_unit,
    "backward ratio": fit.cost_model.backward_ratio,
}

def run(error, arguments):
    def calibrate(stack, **options):
        print("groups", stack.num_query_groups)
        if error > 1:
            raise ConfigError("no fit")
        fit = CostFit(
            cost_model=CostModel(), seconds_per_unit=1e-6, mean_relative_error=0.1,
            max_relative_error=error,
        )
        return fit, []

    calibration.calibrate = calibrate
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["calibrate", "--cpu", *arguments])
    return [code, out.getvalue(), err.getvalue()]

found |= {name: run(*case) for name, case in json.loads(sys.argv[1]).items()}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A real fit; and exit code, stdout and stderr of the command with fits that are made up.

    A made-up one's worst row is off by the case's number; beyond 1 there is no fit.
    """
    out = tmp_path_factory.mktemp("faked") / "cost.json"
    cases: dict[str, tuple[float, list[str]]] = {
        "poor": (0.3, ["--hidden-size=96", "--num-attention-heads=12", f"--out={out}"]),
        "good": (0.2, ["--hidden-size=64", "--num-attention-heads=4"]),
        "none": (2.0, []),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=patience(240),
    )
    assert done.returncode == 0, done.stderr
    return {"out": out, **json.loads(done.stdout.splitlines()[-1])}


def test_a_real_layer_stack_is_timed_and_fitted(found: dict[str, Any]) -> None:
    assert found["sequences"] == [1, 4, 16]
    assert found["linear"] == 1.0
    assert 0 < found["seconds per unit"] < 1
    assert 0.2 < found["backward ratio"] < 20


def test_a_poor_fit_is_written_with_a_warning(found: dict[str, Any]) -> None:
    code, printed, complaints = found["poor"]
    assert code == 0, complaints
    assert "mcore-batching: the cost model is poor: it is 30% off for one of" in complaints
    assert json.loads(found["out"].read_text())["max_relative_error"] == 0.3
    assert "groups 6" in printed


def test_a_good_fit_is_written_without_one(found: dict[str, Any]) -> None:
    code, printed, complaints = found["good"]
    assert code == 0, complaints
    assert "poor" not in complaints
    assert "groups 4" in printed


def test_no_fit_names_the_flags_that_help(found: dict[str, Any]) -> None:
    code, _, complaints = found["none"]
    assert code == 2
    assert "no fit; raise --max-tokens or --repeats" in complaints
