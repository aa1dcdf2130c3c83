"""The launcher: without the flag a script runs as by itself; Megatron's own runs unmodified."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.conversations import BY_HAND, PACKAGES, words_for, write_lines
from kit.harness import REPOSITORY, launch, torchrun
from kit.stock_jobs import (
    BY_ITSELF,
    COMMON,
    EXPERTS,
    FLAG,
    NO_AUXILIARY_LOSS,
    ON,
    PP2,
    RAMP_UP,
    SFT,
    VARIANTS,
    checkout_of,
    steps,
)
from torch.utils._pytree import keystr, tree_leaves_with_path

RAMP_UP_UNTIL_017 = [
    # From 2 to 4, 6 and 8 samples, a step up after every 4. 0.18 and 0.19 ignore the flag.
    *("--rampup-batch-size", "2", "2", "12", "--global-batch-size", "8", "--train-samples", "30"),
    *("--lr-decay-samples", "160", "--lr-warmup-samples", "16"),
    *("--micro-batch-size", "1", "--eval-iters", "0"),
]
TRAINING_ALONE = ["--split", "1,0,0"]
USUAL = steps(3), [8, 16, 24]
WITH_EXPERTS = [*PP2, *EXPERTS, *NO_AUXILIARY_LOSS]
GPT: dict[str, tuple[tuple[list[str], list[int]], list[str]]] = {
    "core_v0.16.1": (USUAL, PP2),
    "core_v0.17.1": (([*RAMP_UP_UNTIL_017, *TRAINING_ALONE], [2, 4, 8, 14, 22, 30]), PP2),
    "core_v0.18.2": (([*RAMP_UP, *TRAINING_ALONE], [2, 4, 8, 12, 20, 28, 36]), PP2),
    "core_v0.19.0": (USUAL, WITH_EXPERTS),
    "main": (USUAL, WITH_EXPERTS),
    "dev": (USUAL, WITH_EXPERTS),
    "main-6742": (USUAL, WITH_EXPERTS),
}
"""By release or branch: a schedule with the samples after each step, and a layout with its model.

The last is pull request 6742, whose script unpacks its batch in branches, by its length.
"""

LAUNCHER = str(REPOSITORY / "mcore_batching" / "run.py")


def trained(folder: Path, *words: str) -> dict[str, Any]:
    """Three steps on one process; the checkpoint in the end."""
    folder.mkdir()
    saved = ("--save", str(folder), "--save-interval", "3", "--ckpt-format", "torch")
    words = (*words, *COMMON, *steps(3), *saved)
    done = launch("kit.ranks", "1", *words, nproc=1, folder=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    path = folder / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt"
    state: dict[str, Any] = torch.load(path, weights_only=False)
    return state


def tensors(state: Any) -> dict[str, torch.Tensor]:
    """All tensors of a nested state, by their paths."""
    leaves = tree_leaves_with_path(state)
    return {keystr(path): leaf for path, leaf in leaves if torch.is_tensor(leaf)}


@pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="this megatron-core ships without megatron.training (it does from 0.19 on)",
)
def test_without_the_flag_a_script_trains_bit_for_bit_as_by_itself(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    own, script = tmp_path / "own.py", (str(REPOSITORY / VARIANTS), "--variant", "none")
    own.write_text(BY_ITSELF)
    by_itself = trained(tmp_path / "by itself", str(own), *script)
    states = [trained(tmp_path / "launched", LAUNCHER, *script)]
    if pytestconfig.getoption("--long"):
        states.append(trained(tmp_path / "example", LAUNCHER, str(REPOSITORY / SFT)))
    expected = tensors({key: by_itself[key] for key in ("model", "optimizer")})
    assert any("linear_fc1.weight" in name for name in expected)
    assert any("exp_avg" in name for name in expected)
    for state in states:
        found = tensors({key: state[key] for key in ("model", "optimizer")})
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name
        assert state["opt_param_scheduler"] == by_itself["opt_param_scheduler"]
        assert state["args"].consumed_train_samples == 24


def printed(
    checkout: Path,
    words: list[str],
    folder: Path,
    script: str = "pretrain_gpt.py",
    nproc: int = 4,
    conversations_a_line: int = 1,
) -> list[str]:
    """A line for each step of one of Megatron's scripts, and for each evaluation."""
    data = write_lines(folder / "data.jsonl", conversations_a_line)
    words = [str(checkout / script), *COMMON, *words_for(checkout.name, data), *words]
    paths = REPOSITORY, checkout, PACKAGES
    output = torchrun(BY_HAND, *words, nproc=nproc, folder=folder, paths=paths)
    return re.findall(r" iteration +\d+/.*|validation loss at iteration.*", output)


def log_lines(
    checkout: Path, words: list[str], also: tuple[str, ...] = (), **launch: Any
) -> list[dict[str, float]]:
    """Steps as the log gives them (7 digits)."""
    wanted = ("consumed samples", "learning rate", "lm loss", "grad norm", *also)
    return [
        {name: float(re.findall(rf"{name}: +(\S+)", line)[0]) for name in wanted}
        | {"packed": float("batching/fill" in line)}
        for line in printed(checkout, words, **launch)
        if "consumed samples" in line
    ]


HYBRID = ["--spec", "kit.hybrid_spec", "packed_hybrid_stack_spec", "--hybrid-layer-pattern"]
EVERY_LAYER = [
    *(*HYBRID, "M*E|G*-", *WITH_EXPERTS),
    # Weights of the usual size leave so small a state that a log shows none of it in 7 digits.
    *("--init-method-std", "0.2"),
    *("--mamba-num-groups", "2", "--mamba-head-dim", "8", "--mamba-num-heads", "8"),
    *("--mamba-state-dim", "16"),
    *("--linear-num-key-heads", "4", "--linear-num-value-heads", "8"),
    *("--linear-key-head-dim", "8", "--linear-value-head-dim", "8"),
]
INTERLEAVED = [*PP2, *HYBRID, "*|-|*|-"]
HAVE_HYBRIDS = ("core_v0.18.2", "core_v0.19.0", "main")
SCRIPTS = ("pretrain_gpt.py", "pretrain_hybrid.py")
RUNS = [
    *(pytest.param(name, SCRIPTS[0], *run, id=name) for name, run in GPT.items()),
    *(
        pytest.param(name, SCRIPTS[1], USUAL, model, id=f"{name}-{what}", marks=marks)
        for name in HAVE_HYBRIDS
        for what, model, marks in (
            ("every-layer", EVERY_LAYER, ()),
            ("vpp2", INTERLEAVED, pytest.mark.long),
        )
    ),
]


@pytest.mark.parametrize(("release", "script", "schedule", "words"), RUNS)
def test_megatrons_own_script_unmodified(
    release: str, script: str, schedule: tuple[list[str], list[int]], words: Any, tmp_path: Path
) -> None:
    """The same steps padded and packed, in four processes."""
    checkout, (number, consumed) = checkout_of(release), schedule
    words = [*number, *words]
    padded = log_lines(checkout, words, script=script, folder=tmp_path)
    flagged = log_lines(checkout, [*words, "--sft", *FLAG], script=script, folder=tmp_path)
    assert [line["consumed samples"] for line in padded] == consumed
    assert [line.pop("packed") for line in padded] == [0.0] * len(consumed)
    assert [line.pop("packed") for line in flagged] == [1.0] * len(consumed)
    for line, expected in zip(flagged, padded, strict=True):
        assert line == pytest.approx(expected, rel=2e-6)


ONE_A_ROW = [*ON, "192", "--dynamic-batch-max-samples-per-row", "1"]


@pytest.mark.parametrize("layout", [[], PP2], ids=["dp2", "pp2"])
@pytest.mark.parametrize("release", [name for name in GPT if name != "main-6742"])
def test_lines_of_two_conversations(release: str, layout: list[str], tmp_path: Path) -> None:
    """Under two caps as by hand, over single conversations, in one process without pipeline stages.

    Stages draw other weights than a whole model.
    """
    checkout, usual = checkout_of(release), [*steps(3), "--eval-interval", "2"]

    def losses(words: list[str], **launch: Any) -> list[float]:
        lines = printed(checkout, [*usual, *layout, *words], tmp_path, **launch)
        return [float(re.findall(r"lm loss(?: value)?: +(\S+)", line)[0]) for line in lines]

    single = losses(["--global-batch-size", "16"], nproc=2 if layout else 1)
    assert len(single) == 6  # with evaluations after two steps, and of both sets in the end
    for flags in (ONE_A_ROW, [*ON, "1024"]):
        found = losses(["--sft", *flags], nproc=2, conversations_a_line=2)
        assert found == pytest.approx(single, rel=2e-6)


MULTI_TOKEN = {SCRIPTS[0]: ["--mtp-num-layers", "1"], SCRIPTS[1]: [*HYBRID, "*-|*-/*-"]}
"""By script a model that predicts the token after the next one, too."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("release", "script"),
    [("core_v0.17.1", SCRIPTS[0]), *((r, script) for r in HAVE_HYBRIDS for script in SCRIPTS)],
)
def test_scripts_that_predict_further_tokens(release: str, script: str, tmp_path: Path) -> None:
    """Padded in one micro-batch on one replica, of which stock code logs the mean over all tokens.

    Of more it logs the mean of their means.
    """
    checkout, model = checkout_of(release), [*PP2, *MULTI_TOKEN[script]]
    logged: dict[str, Any] = {"also": ("mtp_1 loss",), "script": script, "folder": tmp_path}
    padded = log_lines(checkout, [*steps(3, micro_batch_size=8), *model], nproc=2, **logged)
    flagged = log_lines(checkout, [*steps(3), *model, "--sft", *FLAG], nproc=4, **logged)
    for line, expected in zip(flagged, padded, strict=True):
        assert line == pytest.approx(expected | {"packed": 1.0}, rel=2e-6)
