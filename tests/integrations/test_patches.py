"""The patches of `patches/`: what they are made of, that they apply, that a patched tree trains.

Without checkouts of the releases megatron-core's wheel has to do, which ships ``megatron/training``
from 0.19 on and no training script.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.conversations import PACKAGES, words_for, write_lines
from kit.harness import REPOSITORY, torchrun
from kit.patience import patience
from kit.stock_jobs import BY_ITSELF, COMMON, FLAG, ON, PP2, VARIANTS, checkout_of, steps

from mcore_batching.integrations import megatron_lm

PATCHES = REPOSITORY / "patches"
RELEASES = ("core_v0.16.1", "core_v0.17.1", "core_v0.18.2", "core_v0.19.0")
FILES = {
    "megatron/training/arguments.py",
    "megatron/training/training.py",
    "pretrain_gpt.py",
}

ARGUMENTS = [*COMMON, *steps(4), *PP2, "--variant", "none"]
SCRIPT = REPOSITORY / VARIANTS


def copy(checkout: Path, tree: Path, *names: str) -> None:
    for name in names:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(checkout / name, tree / name)


def wheel_training() -> Path:
    spec = importlib.util.find_spec("megatron.training")
    if spec is None or spec.origin is None:
        pytest.skip("this megatron-core ships no megatron.training (wheels do from 0.19 on)")
    return Path(spec.origin).parent


def apply(tree: Path, release: str, *options: str) -> str:
    """What git says of applying a release's patch there."""
    done = subprocess.run(
        ["git", "apply", "--verbose", *options, str(PATCHES / f"{release}.patch")],
        cwd=tree,
        # Outside any repository, or git would leave out what lies beside it.
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)},
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("release", RELEASES)
def test_a_patch_inserts_calls_of_the_plugin_alone(release: str) -> None:
    """With one line of context; ``get_batch`` returns as many values as the release unpacks."""
    assert {path.stem for path in PATCHES.glob("*.patch")} == {*RELEASES}
    lines = (PATCHES / f"{release}.patch").read_text().splitlines()
    assert {line.removeprefix("+++ b/") for line in lines if line[:4] == "+++ "} == FILES
    lines = [line for line in lines if not line.startswith(("--- ", "+++ "))]
    assert not [line for line in lines if line.startswith("-")]
    files = [file.split("\n@@ ")[1:] for file in "\n".join(lines).split("diff --git ")[1:]]
    assert [len(hunks) for hunks in files] == [2, 3, 1]
    for hunks in files:
        inserted = 0
        for hunk in hunks:
            header, *body = hunk.splitlines()
            assert re.fullmatch(r" \++ ", "".join(line[:1] or " " for line in body)), hunk
            old, old_count, new, new_count = map(int, re.findall(r"\d+", header.split(" @@")[0]))
            assert (old_count, new_count, new) == (2, len(body), old + inserted), hunk
            inserted += new_count - old_count
    added = [line[1:].strip() for line in lines if line[:1] == "+"]
    imports = [line.split() for line in added if line.startswith("from ")]
    assert len(imports) == 6
    for _, module, _, *names in imports:
        assert module == megatron_lm.__name__
        assert {name.rstrip(",") for name in names} <= set(megatron_lm.__all__)
    (count,) = re.findall(r"next_batch\(data_iterator, (\d+)\)", "\n".join(added))
    assert int(count) == (6 if release in ("core_v0.16.1", "core_v0.17.1") else 10)


@pytest.mark.parametrize("release", RELEASES)
def test_applies_to_its_release(release: str, tmp_path: Path) -> None:
    copy(checkout_of(release), tmp_path, *FILES)
    said = apply(tmp_path, release)
    assert said.count("Applied patch") == len(FILES)
    assert "offset" not in said
    for name in FILES:
        compile((tmp_path / name).read_text(), name, "exec")
        assert "mcore_batching" in (tmp_path / name).read_text()


def test_applies_to_main_where_it_belongs(tmp_path: Path) -> None:
    """With offsets: of several places that look alike git takes the nearest."""
    copy(checkout_of("main"), tmp_path, *FILES)
    apply(tmp_path, "core_v0.19.0")
    found = {calling: function for name in FILES for calling, function in calls(tmp_path / name)}
    expected = {
        "next_batch": "get_batch",
        "add_arguments": "add_megatron_arguments",
        "check_arguments": "validate_args",
        "with_batching_statistics": "training_log",
        "wrap_forward_backward train": "train",
        "wrap_forward_backward evaluate": "evaluate",
    }
    assert found == expected


def calls(path: Path) -> Iterator[tuple[str, str]]:
    """What a patched file imports of the plugin, and the function that does."""
    for function in ast.walk(ast.parse(path.read_text())):
        for inner in function.body if isinstance(function, ast.FunctionDef) else ():
            if isinstance(inner, ast.ImportFrom) and inner.module == megatron_lm.__name__:
                name = inner.names[-1].name
                is_twice = name == "wrap_forward_backward"
                yield f"{name} {function.name}" if is_twice else name, function.name


def test_applies_to_the_wheel(tmp_path: Path) -> None:
    patched = patched_training(tmp_path)
    for name in ("arguments.py", "training.py"):
        assert "mcore_batching" in (patched / name).read_text()
        assert "mcore_batching" not in (wheel_training() / name).read_text()


def patched_training(tree: Path) -> Path:
    """A patched copy of the wheel's ``megatron/training`` in ``tree``."""
    patched = tree / "megatron" / "training"
    shutil.copytree(wheel_training(), patched, ignore=shutil.ignore_patterns("__pycache__"))
    apply(tree, "core_v0.19.0", "--include=megatron/training/*")
    return patched


def train(tree: Path, script: Path, *words: str, nproc: int = 2) -> list[str]:
    """The log line of every iteration, without the times in it."""
    paths = tree, REPOSITORY, PACKAGES
    output = torchrun(BY_ITSELF, str(script), *words, nproc=nproc, folder=tree, paths=paths)
    # Up to the last column: without a newline, what the other process prints may follow.
    lines = re.findall(r"\] +(iteration +\d+/.*\|)", output)
    assert len(lines) == 4, output[-6000:]
    return [re.sub(r"elapsed time[^|]*\||batching/\w+ seconds[^|]*\|", "", i) for i in lines]


def losses(iterations: list[str]) -> list[float]:
    return [float(re.findall(r"lm loss: ([\d.E+-]+)", line)[0]) for line in iterations]


def without_the_flag(tree: Path, script: Path, *words: str) -> list[str]:
    """The lines, beside which the same steps are trained with the flag, loss for loss."""
    unflagged, flagged = train(tree, script, *words), train(tree, script, *words, *FLAG)
    # Iterations, consumed samples, learning rate, batch size.
    counted = [[line.split("lm loss")[0] for line in lines] for lines in (unflagged, flagged)]
    assert counted[0] == counted[1]
    # Printed with 7 digits; the sums are of the same float32 terms in another order.
    assert losses(flagged) == pytest.approx(losses(unflagged), rel=2e-6)
    assert all("batching/fill" in line for line in flagged)
    return unflagged


@pytest.mark.long
def test_the_patched_tree_trains(tmp_path: Path) -> None:
    """With the flag, loss for loss as without it; without it, digit for digit as unpatched. A flag
    that is refused ends the job at its start."""
    stock, patched = tmp_path / "stock", tmp_path / "patched"
    stock.mkdir()
    patched.mkdir()
    patched_training(patched)
    lines = train(stock, SCRIPT, *ARGUMENTS)
    assert without_the_flag(patched, SCRIPT, *ARGUMENTS) == lines
    assert len(set(losses(lines))) == 4
    assert not any("batching/" in line for line in lines)
    refused = (*ARGUMENTS, *FLAG, "--full-validation", "--pipeline-model-parallel-size", "1")
    with pytest.raises(AssertionError, match="--full-validation raises TypeError"):
        train(patched, SCRIPT, *refused, nproc=1)


def test_the_patched_stock_script_trains(tmp_path: Path) -> None:
    checkout = checkout_of("core_v0.19.0")
    patched_training(tmp_path)
    copy(checkout, tmp_path, "pretrain_gpt.py", "gpt_builders.py", "model_provider.py")
    apply(tmp_path, "core_v0.19.0", "--include=pretrain_gpt.py")
    script, words = tmp_path / "pretrain_gpt.py", [*COMMON, *steps(4), *PP2]
    without_the_flag(tmp_path, script, *words[2:], "--mock-data")  # without --data-path
    words += ["--sft", *words_for("core_v0.19.0", write_lines(tmp_path / "data.jsonl", 2)), *ON]
    narrow, wide = (losses(train(tmp_path, script, *words, cap)) for cap in ("96", "1024"))
    assert narrow == pytest.approx(wide, rel=2e-6)
