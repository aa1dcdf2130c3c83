"""`install` and the launcher: what is touched with the flag, that nothing is without it, and which
command lines and scripts are refused.

In processes of their own (`install_programs`), since Megatron's modules are patched there.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.harness import launch
from kit.patience import patience

from mcore_batching.megatron import DynamicBatchArgumentError
from mcore_batching.run import main

needs_training = pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="this megatron-core wheel ships no megatron.training (0.19 does)",
)

Runs = Callable[..., Any]
ON_THE_CPU = 10**6
"""Processes for which there are too few GPUs."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs one of `install_programs` in a process of its own, and returns what it does."""

    def run_program(name: str, *words: str) -> Any:
        folder = tmp_path_factory.mktemp(name)
        done = launch("install_programs", name, *words, nproc=ON_THE_CPU, folder=folder)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run_program


@needs_training
def test_flags_hook_what_they_need_once_and_undo_puts_it_back(run: Runs) -> None:
    run("hooking")


BASE = [
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--max-position-embeddings", "64", "--micro-batch-size", "1"),
    *("--train-iters", "1", "--lr", "1e-3", "--transformer-impl", "local"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-rope-fusion"),
    *("--no-persist-layer-norm", "--tokenizer-type", "NullTokenizer", "--vocab-size", "64"),
    *("--position-embedding-type", "rope"),
]
ON = "--use-dynamic-batch-size --max-tokens-per-gpu 64 --calculate-per-token-loss "
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss "
)
PP2 = "--pipeline-model-parallel-size 2 "
VPP2 = PP2 + "--num-virtual-stages-per-pipeline-rank 2 "
DOCUMENTS = "--reset-attention-mask --reset-position-ids "
OFF = {
    "off": "--sft " + PP2,
    "off, with a cap": "--max-tokens-per-gpu 64",
    "exchange alone": "--dynamic-batch-exchange",
    "several": "--use-dynamic-batch-size --iterations-to-skip 3 --logits-load-dir x",
}
"""By name: command lines without all that the others have."""
ACCEPTED = {
    "dense": "",
    "interleaved": VPP2,
    "experts": EXPERTS,
    "exchange": "--dynamic-batch-exchange",
    "hybrid": PP2 + "--hybrid-layer-pattern M*-|G*-|M*-|G*-",
    "documents": DOCUMENTS,
    "multi-token": "--mtp-num-layers 1",
    "hybrid multi-token": "--hybrid-layer-pattern *-*-/*-",
    "throughput": "--log-throughput",
    "full validation of several sets": "--full-validation --multiple-validation-sets",
}
MESSAGES = {
    EXPERTS + "--moe-aux-loss-coeff 0.01": "z-losses are weighted by real tokens",
    "--sft": "losses are means over the trained tokens of all",
    DOCUMENTS + "--transformer-impl transformer_engine": "Transformer Engine ignores that mask",
}
REFUSED = {
    "--max-tokens-per-gpu 0": "(--max-tokens-per-gpu) must be",
    "--dynamic-batch-plan-effort -1": "(--dynamic-batch-plan-effort) must",
    "--dynamic-batch-cost-model /no": "--dynamic-batch-cost-model /no: ",
    "--dynamic-batch-share-prefixes": "unset --dynamic-batch-share-prefixes",
    "--full-validation": "without --multiple-validation-sets: unset it and set --eval-iters",
    "--sft --full-validation --multiple-validation-sets": "TypeError in Megatron-LM itself beside",
    "--dataloader-inter-document-masking": "set --reset-attention-mask and --reset-position-ids",
    "--reset-attention-mask": "needs --reset-position-ids",
    "--iterations-to-skip 3": "--iterations-to-skip draws batches of a",
    "--logits-load-dir x": "unset --logits-load-dir",
    "--num-layers 8 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
    "--no-overlap-p2p-communication": "drop --no-overlap-p2p-communication",
    "--perform-rl-step": "unset --perform-rl-step",
    EXPERTS + "--moe-expert-rank-capacity-factor 1.0": "unset --moe-expert-rank-capacity-factor",
    "--hybrid-context-parallel": "unset --hybrid-context-parallel",
    "--reuse-grad-buf-for-mxfp8-param-ag --fp8-format e4m3": "unset --reuse-grad-buf-for-mxfp8-par",
}
"""By words beside `ON`: what is said of them."""


@pytest.fixture(scope="module")
def outcomes(run: Runs) -> dict[str, str]:
    """What became of each command line in Megatron's own parser and validation, and of scripts."""
    words = OFF | {name: ON + more for name, more in ACCEPTED.items()}
    words |= {more: ON + more for more in (*MESSAGES, *REFUSED)}
    lines = {name: [*BASE, *line.split()] for name, line in words.items()}
    found: dict[str, str] = run("lines", json.dumps(lines))
    return found


REFUSAL = "DynamicBatchArgumentError: "


@needs_training
def test_command_lines(outcomes: dict[str, str]) -> None:
    for name in (*ACCEPTED, "off", "off, with a cap", "lengths", "on rank 1"):
        assert outcomes[name] == "accepted", name
    for name, text in MESSAGES.items():
        assert outcomes[name].startswith("accepted; mcore_batching: "), name
        assert outcomes[name].count("mcore_batching: ") == 1, name
        assert text in outcomes[name]
    beyond = {
        "exchange alone": "nothing alone: set --use-dynamic",
        "several": "set --calculate-per-token-loss\n  - --use-dynamic-batch-size needs a cap",
        "ModelOpt": "ModelOpt expects rows of seq_length",
        "scheduler": "--use-dynamic-batch-size replaces it: unset --sequence-packing-scheduler",
    }
    for name, text in (REFUSED | beyond).items():
        assert outcomes[name].startswith(REFUSAL), name
        assert text in outcomes[name]
    assert outcomes["several"].count("\n  - ") == 4


@needs_training
@pytest.mark.parametrize("name", ["train", "evaluate"])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("non-loss", "process_non_loss_data_func runs the model on one rank"),
        ("script", "has no get_batch in its module"),
    ],
)
def test_scripts_are_refused_before_the_first_step(
    outcomes: dict[str, str], name: str, what: str, message: str
) -> None:
    assert outcomes[f"{name} True {what}"].startswith(REFUSAL)
    assert message in outcomes[f"{name} True {what}"]
    assert REFUSAL not in outcomes[f"{name} False {what}"]


SCRIPT = """
import sys
print([name for name in sys.modules if name.split(".")[0] in ("torch", "megatron")])
import beside
print(__name__, *sys.argv, beside.VALUE)
import atexit, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
atexit.register(lambda: print("left behind:", dist.is_initialized()))
"""


def test_the_launcher_runs_a_script_as_by_itself_and_ends_its_process_group(tmp_path: Path) -> None:
    """torch is not even imported. gloo's threads, which hold tensors, may abort the process while
    Python shuts down."""
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    script, store = tmp_path / "script.py", str(tmp_path / "store")
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mcore_batching.run", str(script), store, "-n"],
        env={key: value for key, value in os.environ.items() if key != "MCORE_BATCHING_CPU"},
        capture_output=True,
        text=True,
        timeout=patience(200),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[]\n__main__ {script} {store} -n 7\nleft behind: False\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the training script first"),
        (["--use-dynamic-batch-size"], "name the training script first, got --use-dynamic"),
        (["absent.py"], "no script absent.py: give its path"),
    ],
)
def test_the_launcher_says_what_is_missing(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_module_of_megatron_training_that_is_missing_is_named() -> None:
    module = importlib.import_module("mcore_batching.integrations.megatron_lm.install")
    lacking = r"cannot import megatron\.training.*put a Megatron-LM checkout on PYTHONPATH"
    with pytest.raises(DynamicBatchArgumentError, match=lacking):
        module._module("later")
    if importlib.util.find_spec("megatron.training") is None:
        with pytest.raises(DynamicBatchArgumentError, match=lacking):
            module.install(["--use-dynamic-batch-size"])
