"""The fine-tuning example: its command line, and the comparison of its logs."""

import os
import subprocess
import sys
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
    old = tmp_path / "python3.11"
    old.write_text("#!/bin/sh\necho 3.11\n")
    old.chmod(0o755)
    environment = {"MCORE_BATCHING_PYTHON": old, "MCORE_BATCHING_VENV": tmp_path / "none"}
    done = subprocess.run(
        ["bash", str(EXAMPLES / "sft.sh"), *arguments],
        capture_output=True,
        text=True,
        timeout=patience(60),
        env={"PATH": "/usr/bin:/bin", **environment},
    )
    assert done.returncode == status
    assert says in done.stdout + done.stderr
    assert not (tmp_path / "none").exists()


def sft(tmp_path, *arguments, **environment):
    """The command with the pythons of `tmp_path` on its path, and a pyenv that has them all."""
    for name in ("3.11", "3.12"):
        python = tmp_path / "pyenv" / "versions" / f"{name}.1" / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        # Whatever it is asked for, it says its version; it makes no environment.
        python.write_text(f"#!/bin/sh\n[ $1 = -m ] && exit 1\necho {name}\n")
        python.chmod(0o755)
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "python3.11").symlink_to(tmp_path / "pyenv/versions/3.11.1/bin/python")
    pyenv = commands / "pyenv"
    pyenv.write_text(f"#!/bin/sh\necho {tmp_path / 'pyenv'}\n")
    for name in ("python3.12", "python3.13", "python3", "python"):
        # As pyenv's shims: there, and of no use.
        (commands / name).write_text("#!/bin/sh\nexit 127\n")
    for command in commands.iterdir():
        command.chmod(0o755)
    return subprocess.run(
        ["bash", str(EXAMPLES / "sft.sh"), "--out", str(tmp_path / "runs"), *arguments],
        capture_output=True,
        text=True,
        timeout=patience(60),
        env={"PATH": f"{commands}:/usr/bin:/bin", **environment},
    )


def test_a_python_that_can_do_the_job_is_looked_for(tmp_path):
    """A 3.11 on the path comes first for quickstart.sh, and will not do here."""
    done = sft(tmp_path, MCORE_BATCHING_VENV=str(tmp_path / "made"))
    assert f"({tmp_path}/pyenv/versions/3.12.1/bin/python)" in done.stdout
    assert "cannot make environments" in done.stderr


@pytest.mark.parametrize("folder", ["made", "runs"])
def test_folders_that_cannot_be_written_name_what_to_set(tmp_path, folder):
    (tmp_path / folder).touch()  # no folder can be made there, not even by root
    done = sft(tmp_path, MCORE_BATCHING_VENV=str(tmp_path / "made" / "deep"))
    variable = {"made": "set MCORE_BATCHING_VENV to", "runs": "set --out to"}[folder]
    assert done.returncode == 1
    assert f"cannot write to {tmp_path / folder}" in done.stderr
    assert f"{variable} another folder" in done.stderr


@pytest.mark.long
def test_rows_shared_by_ranks_have_the_padded_runs_curve(tmp_path):
    """The whole command, by this Python in an environment that counts as complete."""
    pytest.importorskip("megatron.training")
    made = tmp_path / "made"
    (made / "bin").mkdir(parents=True)
    python = made / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    key = subprocess.run(
        ["bash", "-c", f". {EXAMPLES}/environment.sh && mcb_environment_key {python}"],
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=True,
    ).stdout
    stamp = f"{key}{EXAMPLES.parent}\nmegatron,plot\n"
    (made / "mcore_batching.complete").write_text(stamp)
    out = tmp_path / "runs"
    flags = ["--short", "--dynamic-batch-context-parallel", "2", "--max-tokens-per-gpu", "512"]
    done = subprocess.run(
        ["bash", str(EXAMPLES / "sft.sh"), "--out", str(out), *flags],
        capture_output=True,
        text=True,
        timeout=patience(400),
        env=os.environ | {"MCORE_BATCHING_VENV": str(made)},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    dynamic, padded = (read_log(out / f"{run}.log") for run in ("dynamic", "padded"))
    assert len(dynamic) == len(padded) == 3
    for ours, theirs in zip(dynamic, padded, strict=True):
        assert ours.consumed_samples == theirs.consumed_samples
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)  # logged to 7 digits
        assert ours.computed_tokens < theirs.computed_tokens
