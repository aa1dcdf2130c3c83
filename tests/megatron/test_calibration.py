"""`calibrate` on the CPU stand-in, in a process of its own: it joins a process group."""

import json
import subprocess
import sys
from pathlib import Path

from mcore_batching.megatron.calibration import rows_to_time

PROGRAM = """
import torch
from mcore_batching.megatron import cpu
cpu.enable(force=True)
from mcore_batching.megatron.calibration import LayerStack, calibrate
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


def test_the_command_names_the_flag_that_is_out_of_range() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mcore_batching", "calibrate", "--repeats", "0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "--repeats must be 1 or more, got 0" in done.stderr
