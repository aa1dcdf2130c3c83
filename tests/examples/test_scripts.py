"""The examples' scripts: environments that they make, change, and never remove, and what
``sft.sh`` refuses. No package is installed: interpreters are scripts that list what they were asked
for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from kit.patience import patience

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

PYTHON = """#!/bin/bash
version={version}
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" "$3/lib/python$version"; cp "$0" "$3/bin/python" ;;
    "-m pip "*) [ ! -e "{folder}/offline" ] && echo "$0" >>"{folder}/installed" ;;
    "- "*) cat >/dev/null; echo "key of $version$(cat "{folder}/pins" 2>/dev/null)" ;;
    *) echo "$version" ;;
esac
"""


SYSTEM_PATH = "/usr/bin:/bin"


def bash(*words, **variables):
    """What became of a script that sees these variables alone."""
    return subprocess.run(
        ["bash", *words],
        capture_output=True,
        text=True,
        timeout=patience(60),
        env={"PATH": SYSTEM_PATH} | variables,
    )


class Machine:
    """A folder with interpreters, and the scripts' function that makes an environment in it."""

    def __init__(self, folder):
        self.folder, self.venv = folder, folder / "venv"

    def python(self, version):
        path = self.folder / "bin" / f"python{version}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(PYTHON.format(version=version, folder=self.folder))
        path.chmod(0o755)
        return path

    def ensure(self, *, named=None, extras="megatron", versions="3.12 3.11"):
        """The status, and the environment that is used, or the error; `named` is a version."""
        python = f"{self.folder}/bin/python{named}"
        ensure = f"mcb_versions=({versions}); mcb_ensure_environment {self.venv} {extras}"
        script = f'. {EXAMPLES / "environment.sh"}; {ensure} >/dev/null; echo "$mcb_environment"'
        path = f"{self.folder / 'bin'}:{SYSTEM_PATH}"
        variables = {"MCORE_BATCHING_PYTHON": python} if named else {}
        done = bash("-c", script, PATH=path, HOME=str(self.folder), **variables)
        return done.returncode, (done.stdout or done.stderr).strip()

    def uses(self, name, *, installs=False, **how):
        """An environment of this name is used, after packages were installed into it or not."""
        (self.folder / "installed").write_text("")
        assert self.ensure(**how) == (0, str(self.folder / name))
        lines = (self.folder / "installed").read_text().splitlines()
        assert {Path(line).parents[1].name for line in lines} == ({name} if installs else set())

    def mark(self):
        """A file in the environment, there as long as nobody removes it."""
        mark = self.venv / "mine"
        mark.touch()
        return mark


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    for version in ("3.11", "3.12"):
        machine.python(version)
    return machine


@pytest.mark.parametrize(
    "calls",
    [
        # One of the same version fits, whichever interpreter it was made with.
        [("venv", True, {}), ("venv", False, {}), ("venv", False, {"named": "3.12"})],
        # The fine-tuning example needs 3.12, the quickstart runs on 3.11.
        [("venv", True, {"named": "3.11"}), ("venv-3.12", True, {"versions": "3.12 3.13"})],
        # One example, run with another Python, deleted the environment of the other example.
        *(
            [
                ("venv", True, {"named": has}),
                (f"venv-{other}", True, {"named": other}),
                (f"venv-{other}", False, {"named": other}),
                ("venv", False, {}),
            ]
            for has, other in (("3.11", "3.12"), ("3.12", "3.11"))
        ),
    ],
)
def test_an_environment_is_made_once_for_each_python_and_stays(machine, calls):
    for name, installs, how in calls:
        machine.uses(name, installs=installs, **how)
        if installs and name == "venv":
            mark = machine.mark()
    assert mark.exists()


@pytest.mark.parametrize("change", ["pins", "extras"])
@pytest.mark.parametrize("offline", [False, True])
def test_changes_are_installed_into_what_is_there(machine, change, offline):
    machine.ensure()
    mark = machine.mark()
    if change == "pins":
        (machine.folder / "pins").write_text("2")
    extras = "plot" if change == "extras" else "megatron"
    if offline:
        (machine.folder / "offline").touch()
        status, text = machine.ensure(extras=extras)
        assert status == 1
        assert f"installing into {machine.venv} failed" in text
        (machine.folder / "offline").unlink()
        if change == "pins":  # nor is it taken for complete once the old pins are back
            (machine.folder / "pins").unlink()
    machine.uses("venv", installs=True, extras=extras)
    machine.uses("venv")  # the extras of both are kept
    machine.uses("venv", extras=extras)
    assert mark.exists()


@pytest.mark.parametrize("broken", ["unfinished", "python gone", "python replaced"])
def test_an_environment_that_does_not_work_is_made_anew(machine, broken):
    if broken == "unfinished":
        (machine.folder / "offline").touch()
        assert machine.ensure()[0] == 1
        (machine.folder / "offline").unlink()
    else:
        machine.ensure()
        python = machine.venv / "bin" / "python"
        python.unlink()
        if broken == "python replaced":  # a link to a python3 that became another version
            os.link(machine.python("3.11"), python)
    mark = machine.mark()
    machine.uses("venv", installs=True)
    assert not mark.exists()


def test_what_is_refused_stays_as_it_is(machine):
    machine.python("3.9")
    for named, expected in (
        ("absent", "does not run"),
        ("3.9", "is Python 3.9; megatron-core has wheels for 3.11, 3.12 and 3.13"),
    ):
        status, text = machine.ensure(named=named)
        assert (status, expected in text) == (1, True)
    assert not machine.venv.exists()
    machine.venv.mkdir()  # somebody else's
    mark = machine.mark()
    status, text = machine.ensure()
    assert status == 1
    assert "is not an environment that these scripts made: remove it" in text
    assert mark.exists()
    assert not (machine.folder / "installed").exists()


def sft_sh(tmp_path, version, *arguments):
    """The command with a Python that says this version, whatever it is asked for."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    venv = tmp_path / "made" / "deep"
    variables = {"MCORE_BATCHING_PYTHON": str(python), "MCORE_BATCHING_VENV": str(venv)}
    return bash(str(EXAMPLES / "sft.sh"), *arguments, **variables)


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
