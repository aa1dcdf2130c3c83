"""The fine-tuning example: its data, its command line, its logs and its figure."""

import ast
import json
import subprocess
from pathlib import Path

import matplotlib.image
import matplotlib.pyplot as plt
import pytest
import sft_figure
from game_conversations import ROLLOUTS, conversation, conversations
from sft_log import Iteration, LogError, read_log

from mcore_batching.integrations.megatron_lm.packed_batches import TEN_FIELDS

EXAMPLES = Path(sft_figure.__file__).parent
ARGUMENTS = """
using world size: 4, data-parallel size: 2
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
    "loss: {:.6E} |{} loss scale: 1.0 | grad norm: 2.321 | number of skipped iterations:   0 | "
    "number of nan iterations:   0 |\n"
)
BATCHING = (
    " batching/fill: {:.6E} | batching/padding: {:.6E} | batching/micro-batches a rank: {:.6E} |"
    " batching/placeholders: 1.000000E+00 | batching/step seconds: 5.077486E-01 |"
)


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


def test_a_padded_log_gives_each_iterations_own_values(tmp_path):
    # The second line holds the mean of the first two iterations.
    path = log(tmp_path / "padded.log", [(1, 900, 6.0), (2, 700, 5.5), (3, 450, 4.5)])
    assert read_log(path) == [
        Iteration(1, 16, 6.0, 0.9, 8192),
        Iteration(2, 32, 5.0, 0.5, 8192),
        Iteration(3, 48, 4.5, 0.45, 8192),
    ]


def test_a_dynamic_log_counts_what_was_computed(tmp_path):
    # 3, 5 and 4 micro-batches of each of 2 ranks, of 2 x 1000 tokens at most.
    path = log(
        tmp_path / "dynamic.log",
        [(1, 900, 6.0), (2, 700, 5.5), (3, 450, 4.5)],
        [(0.5, 0.25, 3), (0.6, 0.125, 4), (0.75, 0.0, 4)],
    )
    iterations = read_log(path)
    assert [each.computed_tokens for each in iterations] == pytest.approx(
        [0.5 * 12000 / 0.75, 0.7 * 20000, 0.75 * 16000]
    )
    assert [each.loss for each in iterations] == [6.0, 5.0, 4.5]


def test_a_log_may_begin_late_and_be_short(tmp_path):
    path = log(tmp_path / "padded.log", [(7, 900, 6.0)])
    assert [each.number for each in read_log(path)] == [7]


def test_logs_that_do_not_tell_are_refused(tmp_path):
    (tmp_path / "empty.log").write_text(ARGUMENTS + "Error\n")
    with pytest.raises(LogError, match="has no iteration: the job ended before its first one"):
        read_log(tmp_path / "empty.log")
    with pytest.raises(LogError, match=r"has iterations \[1, 3\], expected \[1, 2\]"):
        read_log(log(tmp_path / "gap.log", [(1, 900, 6.0), (3, 700, 5.5)]))
    path = log(tmp_path / "bare.log", [(1, 900, 6.0)])
    path.write_text(path.read_text().replace("seq_length", "length"))
    with pytest.raises(LogError, match="does not tell 'seq_length'"):
        read_log(path)


def run(losses, tokens, seconds):
    return [
        Iteration(number, 16 * number, loss, each, computed)
        for number, (loss, computed, each) in enumerate(
            zip(losses, tokens, seconds, strict=True), start=1
        )
    ]


DYNAMIC = run([6.0, 5.0, 4.0], [2000, 1000, 3000], [9.0, 0.5, 0.5])
PADDED = run([6.0, 5.25, 4.0], [8000, 8000, 8000], [9.0, 1.0, 2.0])


def test_two_runs_are_compared_in_words():
    assert sft_figure.describe(DYNAMIC, PADDED) == (
        "largest difference in loss over 3 steps: 2.5e-01 (logged to 7 digits)\n"
        "tokens computed a step: 2,000 instead of 8,000, 4.0 times fewer\n"
        "median step: 0.50 s instead of 1.50 s, 3.0 times faster"
    )
    with pytest.raises(LogError, match="run both with the same arguments"):
        sft_figure.describe(DYNAMIC, PADDED[:2])


def test_the_figure_has_both_runs_side_by_side(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plt, "close", drawn.append)
    sft_figure.draw(DYNAMIC, PADDED, tmp_path / "comparison.png")
    assert matplotlib.image.imread(tmp_path / "comparison.png").std() > 0.05
    monkeypatch.undo()
    losses, tokens = drawn[0].axes
    assert [line.get_xydata().tolist() for line in losses.lines] == [
        [[16, 6.0], [32, 5.0], [48, 4.0]],
        [[16, 6.0], [32, 5.25], [48, 4.0]],
    ]
    assert [line.get_xydata().tolist() for line in tokens.lines] == [
        [[1, 2000], [2, 1000], [3, 3000]],
        [[1, 8000], [2, 8000], [3, 8000]],
    ]
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == [
        "dynamic micro-batches",
        "padded to --seq-length",
    ]
    assert tokens.get_ylim()[0] == 0
    plt.close(drawn[0])


def test_the_command_reads_a_directory_of_two_logs(tmp_path, capsys):
    steps = [(1, 900, 6.0), (2, 700, 5.5)]
    log(tmp_path / "dynamic.log", steps, [(0.5, 0.25, 3), (0.5, 0.25, 3)])
    with pytest.raises(SystemExit, match=r"padded\.log"):
        sft_figure.main([str(tmp_path)])
    log(tmp_path / "padded.log", steps)
    sft_figure.main([str(tmp_path)])
    assert "8,000 instead of 8,192" in capsys.readouterr().out
    assert (tmp_path / "comparison.png").stat().st_size > 0


def test_a_game_becomes_a_conversation_that_ends_with_the_player():
    game = {
        "prompt": "Start: 6\nminus 6?\n",
        "response": "0\nRight. minus 23?\n-23\nRight. You win.",
        "environment_spans": [[1, 19], [22, 38]],
    }
    assert conversation(game) == [
        {"role": "user", "content": "Start: 6\nminus 6?"},
        {"role": "assistant", "content": "0"},
        {"role": "user", "content": "Right. minus 23?"},
        {"role": "assistant", "content": "-23"},
    ]


def test_the_bundled_conversations_are_made_by_the_script_that_says_so():
    bundled = EXAMPLES / "data" / "arithmetic_conversations.jsonl"
    records = [json.loads(line) for line in bundled.read_text().splitlines()]
    assert records == [{"messages": messages} for messages in conversations(ROLLOUTS)]
    assert len({json.dumps(record) for record in records}) == len(records) > 200
    for record in records:
        roles = [message["role"] for message in record["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


def sft(*arguments, **environment):
    return subprocess.run(
        ["bash", str(EXAMPLES / "sft.sh"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", **environment},
    )


def test_the_script_explains_itself_and_refuses_before_it_installs(tmp_path):
    environment = {"MCORE_BATCHING_VENV": str(tmp_path / "none")}
    usage = sft("--help", **environment)
    assert usage.returncode == 0
    assert "bash examples/sft.sh [--baseline|--dynamic|--compare]" in usage.stdout
    for arguments, problem in [
        (["--data", "absent.jsonl"], "no file absent.jsonl: give --data a file of JSON lines"),
        (["--nproc", "0"], "--nproc must be a whole number of 1 or more, got '0'"),
        (["--data"], "--data needs a value after it"),
    ]:
        refused = sft(*arguments, **environment)
        assert refused.returncode == 1
        assert problem in refused.stderr
    assert not (tmp_path / "none").exists()


def test_the_script_says_why_it_does_not_run_on_python_3_11(tmp_path):
    old = tmp_path / "python3.11"
    old.write_text("#!/bin/sh\necho 3.11\n")
    old.chmod(0o755)
    refused = sft(MCORE_BATCHING_PYTHON=str(old), MCORE_BATCHING_VENV=str(tmp_path / "none"))
    assert refused.returncode == 3
    assert "ships without megatron.training" in refused.stderr
    assert "MCORE_BATCHING_PYTHON" in refused.stderr
    assert not (tmp_path / "none").exists()


def test_the_training_script_is_a_stock_one_but_for_its_data():
    tree = ast.parse((EXAMPLES / "sft.py").read_text())
    imported = {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("mcore_batching")
    }
    assert imported == {"mcore_batching.integrations.megatron_lm.sft"}
    (unpacked,) = (
        [name.id for name in node.targets[0].elts]
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
        if len(node.targets[0].elts) == len(TEN_FIELDS)
    )
    (keys,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "BATCH_KEYS"
    )
    assert tuple(unpacked) == tuple(keys) == TEN_FIELDS
