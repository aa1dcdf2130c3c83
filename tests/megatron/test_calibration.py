"""`calibrate` on the CPU stand-in, in a process of its own: it joins a process group."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_batching.megatron.standalone.calibration import rows_to_time
from mcore_batching.tools.cli import main

PROGRAM = """
import torch
from mcore_batching.megatron import cpu_emulation
cpu_emulation.enable(force=True)
from mcore_batching.megatron.standalone.calibration import LayerStack, calibrate
stack = LayerStack(
    num_layers=1, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4,
    num_query_groups=2, dtype=torch.float32,
)
fit, timings = calibrate(stack, max_tokens=2048, repeats=2)
assert {len(t.lengths) for t in timings} == {1, 4, 16}, timings
assert fit.cost_model.linear == 1.0
assert 0 < fit.seconds_per_unit < 1
assert 0.2 < fit.cost_model.backward_ratio < 20, fit
print("fitted", fit)
"""


def test_a_real_layer_stack_is_timed_and_fitted() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "fitted" in done.stdout


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
    small = ["--num-layers", "1", "--hidden-size", "64", "--ffn-hidden-size", "128"]
    heads = ["--num-attention-heads", "4", "--num-query-groups", "2", "--max-tokens", "1024"]
    done = subprocess.run(
        [*command, "calibrate", "--cpu", *small, *heads, "--repeats", "1", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "error of the fit" in done.stdout
    assert json.loads(out.read_text())["measured_on"] == "CPU"
    planned = subprocess.run(
        [*command, "plan", str(lengths), "--max-tokens-per-gpu", "512", "--cost-model", str(out)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert planned.returncode == 0, planned.stderr


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


FAKED = """
import sys
from mcore_batching.tools.cli import main
from mcore_batching.megatron.standalone import calibration
from mcore_batching.planning import ConfigError, CostModel
from mcore_batching.planning.cost_fit import CostFit

def calibrate(stack, **options):
    print("groups", stack.num_query_groups)
    error = float(sys.argv[1])
    if error > 1:
        raise ConfigError("no fit")
    fit = CostFit(
        cost_model=CostModel(), seconds_per_unit=1e-6, mean_relative_error=0.1,
        max_relative_error=error,
    )
    return fit, []

calibration.calibrate = calibrate
sys.exit(main(["calibrate", "--cpu", *sys.argv[2:]]))
"""


def faked(error: float, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, with a fit whose worst row is off by `error`; beyond 1 there is none."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FAKED, str(error), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_poor_fit_is_written_with_a_warning(tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    done = faked(0.3, "--hidden-size", "96", "--num-attention-heads", "12", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "mcore-batching: the cost model is poor: it is 30% off for one of" in done.stderr
    assert json.loads(out.read_text())["max_relative_error"] == 0.3
    assert "groups 6" in done.stdout


def test_a_good_fit_is_written_without_one() -> None:
    done = faked(0.2, "--hidden-size", "64", "--num-attention-heads", "4")
    assert done.returncode == 0, done.stderr
    assert "poor" not in done.stderr
    assert "groups 4" in done.stdout


def test_no_fit_names_the_flags_that_help() -> None:
    done = faked(2.0)
    assert done.returncode == 2
    assert "no fit; raise --max-tokens or --repeats" in done.stderr
