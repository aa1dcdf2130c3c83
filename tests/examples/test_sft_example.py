"""The fine-tuning example: its command line, and the comparison of its logs."""

import subprocess
from pathlib import Path

import pytest
import sft_figure
from kit.patience import patience
from sft_log import Iteration, LogError, read_log

EXAMPLES = Path(sft_figure.__file__).resolve().parents[1]
ARGUMENTS = """
------------------------ arguments ------------------------
  context_parallel_size ........................... 2
  data_parallel_size .............................. 2
  max_tokens_per_gpu .............................. 1000
  seq_length ...................................... 512
-------------------- end of arguments ---------------------
"""
LINE = (
    " [2026-11-21 06:25:36.852329] iteration {:8d}/      12 | consumed samples: {:12d} | elapsed "
    "time per iteration (ms): {:.1f} | learning rate: 2.954000E-03 | global batch size:    16 | lm "
    "loss: {:.6E} |{} loss scale: 1.0 | grad norm: 2.321 | number of skipped iterations:   0 |\n"
)
BATCHING = (
    " batching/fill: {:.6E} | batching/padding: {:.6E} | batching/micro-batches a rank: {:.6E} |"
)
STEPS = [(1, 900, 6.0), (2, 700, 5.5), (3, 450, 4.5)]
BATCHES = [(0.5, 0.25, 3), (0.6, 0.125, 4), (0.75, 0.0, 4)]


def log(path, iterations, batching=()):
    """A log as Megatron writes it: ``(number, ms, loss)`` of each iteration's line."""
    extra = [BATCHING.format(*values) for values in batching] or [""] * len(iterations)
    lines = [
        LINE.format(number, 16 * number, ms, loss, each)
        for (number, ms, loss), each in zip(iterations, extra, strict=True)
    ]
    noise = "Number of in-flight microbatches: 2\n validation loss at iteration 3 | lm loss: 1 |\n"
    path.write_text(ARGUMENTS + noise.join(lines))
    return path


def test_a_log_gives_each_iterations_own_values(tmp_path):
    # The second line holds the mean of the first two iterations.
    assert read_log(log(tmp_path / "padded.log", STEPS)) == [
        Iteration(1, 16, 6.0, 0.9, 8192),
        Iteration(2, 32, 5.0, 0.5, 8192),
        Iteration(3, 48, 4.5, 0.45, 8192),
    ]
    # 3, 5 and 4 micro-batches of each of 2 ranks, of 2 x 1000 tokens at most.
    dynamic = read_log(log(tmp_path / "dynamic.log", STEPS, BATCHES))
    tokens = [0.5 * 12000 / 0.75, 0.7 * 20000, 0.75 * 16000]
    assert [each.computed_tokens for each in dynamic] == pytest.approx(tokens)
    assert [each.loss for each in dynamic] == [6.0, 5.0, 4.5]


def test_logs_that_do_not_tell_are_refused(tmp_path):
    path = tmp_path / "x.log"
    path.write_text(ARGUMENTS + "Error\n")
    with pytest.raises(LogError, match="has no iteration: the job ended before its first one"):
        read_log(path)
    with pytest.raises(LogError, match=r"has iterations \[1, 3\], expected \[1, 2\]"):
        read_log(log(path, [STEPS[0], STEPS[2]]))
    path.write_text(log(path, STEPS[:1]).read_text().replace("seq_length", "length"))
    with pytest.raises(LogError, match="does not tell 'seq_length'"):
        read_log(path)


def test_a_directory_of_two_logs_is_compared_in_words_and_drawn(tmp_path, capsys):
    log(tmp_path / "dynamic.log", STEPS, BATCHES)
    with pytest.raises(SystemExit, match=r"padded\.log"):
        sft_figure.main([str(tmp_path)])
    log(tmp_path / "padded.log", [(1, 900, 6.0), (2, 1450, 5.625), (3, 1000, 4.5)])
    sft_figure.main([str(tmp_path)])
    assert capsys.readouterr().out.startswith(
        "largest difference in loss over 3 steps: 2.5e-01 (logged to 7 digits)\n"
        "tokens computed per step: 11,333 instead of 8,192, 0.7 times fewer\n"
        "median step: 0.47 s instead of 1.50 s, 3.2 times faster\n"
    )
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    log(tmp_path / "padded.log", STEPS[:2])
    with pytest.raises(SystemExit, match="run both with the same arguments"):
        sft_figure.main([str(tmp_path)])


def sft_sh(tmp_path, version, *arguments):
    """The command with a Python that says this version, whatever it is asked for."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    venv = tmp_path / "made" / "deep"
    return subprocess.run(
        ["bash", str(EXAMPLES / "sft.sh"), *arguments],
        capture_output=True,
        text=True,
        timeout=patience(60),
        env={
            "PATH": "/usr/bin:/bin",
            "MCORE_BATCHING_PYTHON": str(python),
            "MCORE_BATCHING_VENV": str(venv),
        },
    )


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--help"], 0, "bash examples/sft.sh [--baseline|--dynamic|--compare]"),
        (["--data", "absent.jsonl"], 1, "no file absent.jsonl: give --data a file of JSON lines"),
        (["--nproc", "0"], 1, "--nproc must be a whole number of 1 or more, got '0'"),
        (["--data"], 1, "--data needs a value after it"),
        ([], 3, "ships without megatron.training"),
    ],
)
def test_the_command_explains_itself_and_refuses_before_it_installs(
    tmp_path, arguments, status, says
):
    done = sft_sh(tmp_path, "3.11", *arguments)
    assert done.returncode == status
    assert says in done.stdout + done.stderr
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("folder", ["made", "runs"])
def test_folders_that_cannot_be_written_name_what_to_set(tmp_path, folder):
    (tmp_path / folder).touch()  # no folder can be made there, not even by root
    done = sft_sh(tmp_path, "3.12", "--out", str(tmp_path / "runs"))
    variable = {"made": "set MCORE_BATCHING_VENV to", "runs": "set --out to"}[folder]
    assert done.returncode == 1
    assert f"cannot write to {tmp_path / folder}" in done.stderr
    assert f"{variable} another folder" in done.stderr
