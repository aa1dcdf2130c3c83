"""verl's plugin, in a small verl and in its own; its own tests with micro-batches of this package.

That its engine's loop gives the same with them is shown in `tests/distributed/test_hooked.py`.

verl's own functions take part where ``MCORE_BATCHING_VERL_SOURCE`` names a folder with verl, an
unpacked wheel of 0.9.1 or a checkout, and tensordict is installed.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.patience import patience
from kit.stand_ins import module_of
from verl_package import SOURCE, own_verl, small_verl

from mcore_batching.integrations.replacements import HookError
from mcore_batching.integrations.verl import hook

__all__ = ["own_verl", "small_verl"]

PLUGIN = "mcore_batching.integrations.verl.plugin"


def load_plugin() -> Any:
    """As verl loads it: an import."""
    sys.modules.pop(PLUGIN, None)
    return importlib.import_module(PLUGIN)


@pytest.mark.parametrize("value", [None, "", "0"])
def test_the_plugin_does_nothing_unless_asked(
    small_verl: Path, monkeypatch: pytest.MonkeyPatch, value: str | None, capfd: Any
) -> None:
    if value is not None:
        monkeypatch.setenv("MCORE_BATCHING_VERL", value)
    load_plugin()
    assert "verl" not in sys.modules
    assert capfd.readouterr() == ("", "")


def test_the_plugin_hooks_verl_and_prints_what_is_wrong(
    small_verl: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("MCORE_BATCHING_VERL", "yes")
    with pytest.raises(HookError):
        load_plugin()
    shown = capfd.readouterr().err
    assert "verl keeps its own micro-batches, because" in shown
    assert "MCORE_BATCHING_VERL must be 1, 0 or unset, got 'yes'" in shown
    monkeypatch.setenv("MCORE_BATCHING_VERL", "1")
    load_plugin()
    assert "hooked verl.utils.seqlen_balancing.rearrange_micro_batches" in capfd.readouterr().out
    module = importlib.import_module("verl.utils.seqlen_balancing")
    assert module.rearrange_micro_batches.__wrapped__ is not None


def test_verl_finds_the_plugin() -> None:
    tomllib = importlib.import_module("tomllib")
    path = Path(__file__).resolve().parents[2] / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["verl.plugins"] == {"mcore_batching": PLUGIN}


# verl's own functions

START_UP = """
import sys
from kit.stand_ins import StandIns
from verl_package import STAND_INS
sys.meta_path.append(StandIns(STAND_INS))
import verl
import verl.utils.seqlen_balancing as balancing
print("replaced", hasattr(balancing.rearrange_micro_batches, "_mcore_batching_original"))
"""


@pytest.mark.parametrize(("value", "replaced"), [("1", True), ("", False), ("2", False)])
def test_verl_loads_the_plugin_on_import(
    own_verl: Any, tmp_path: Path, value: str, replaced: bool
) -> None:
    metadata = tmp_path / "mcore_batching-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: mcore_batching\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[verl.plugins]\nmcore_batching = {PLUGIN}\n")
    paths = [tmp_path, SOURCE, Path(__file__).parent, *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", START_UP],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "MCORE_BATCHING_VERL": value},
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"replaced {replaced}" in done.stdout
    assert ("hooked verl.utils.seqlen_balancing" in done.stdout) == replaced
    assert ("must be 1, 0 or unset" in done.stderr) == (value == "2")


def test_verls_own_tests_pass_with_ours(own_verl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one process; the others need two devices of one's own."""
    path = Path(SOURCE, "tests", "utils", "test_seqlen_balancing.py")
    if not path.exists():
        pytest.skip(f"{path} is not there: a wheel has no tests")
    monkeypatch.setitem(sys.modules, "verl.utils.model", SimpleNamespace(create_random_mask=mask))
    with hook():
        module = module_of(path)
        module.test_seqlen_balancing()
        module.test_dynamic_batch()


def mask(input_ids: torch.Tensor, **ratios: float) -> torch.Tensor:
    """A random mask with padding on both sides, as verl's tests make them."""
    rows, width = input_ids.shape
    first = torch.randint(int(width * ratios["max_ratio_of_left_padding"]) + 1, (rows, 1))
    least, most = ratios["min_ratio_of_valid_token"], ratios["max_ratio_of_valid_token"]
    valid = torch.randint(int(width * least), int(width * most) + 1, (rows, 1))
    places = torch.arange(width)
    return ((places >= first) & (places < first + valid)).long()
