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
FULL_VALIDATION = "--full-validation --multiple-validation-sets "
ACCEPTED = {
    **dict.fromkeys(("--sft " + PP2, "--max-tokens-per-gpu 64"), ""),  # without the flag
    **dict.fromkeys((ON, ON + VPP2, ON + EXPERTS, ON + "--dynamic-batch-exchange"), ""),
    ON + PP2 + "--hybrid-layer-pattern M*-|G*-|M*-|G*-": "",
    ON + "--hybrid-layer-pattern *-*-/*-": "",
    ON + DOCUMENTS: "",
    ON + "--mtp-num-layers 1": "",
    ON + "--log-throughput": "",
    ON + FULL_VALIDATION: "",
    ON + "sequence_packing_scheduler=dp_balanced use_varlen_dataset=1": "",
    ON + "--sft RANK=1": "",
    ON + EXPERTS + "--moe-aux-loss-coeff 0.01": "z-losses are weighted by real tokens",
    ON + "--sft": "losses are means over the trained tokens of all",
    ON
    + DOCUMENTS
    + "--transformer-impl transformer_engine": "Transformer Engine ignores that mask",
}
"""Words beside `BASE`, and what rank 0 prints of them."""
SEVERAL = "--use-dynamic-batch-size --iterations-to-skip 3 --logits-load-dir x"
REFUSED = {
    "--dynamic-batch-exchange": "nothing alone: set --use-dynamic",
    SEVERAL: "set --calculate-per-token-loss\n  - --use-dynamic-batch-size needs a cap",
    ON + "modelopt_enabled=1": "ModelOpt expects rows of seq_length",
    ON + "sequence_packing_scheduler=dp_balanced": "unset --sequence-packing-scheduler",
    ON + "--max-tokens-per-gpu 0": "(--max-tokens-per-gpu) must be",
    ON + "--dynamic-batch-plan-effort -1": "(--dynamic-batch-plan-effort) must",
    ON + "--dynamic-batch-cost-model /no": "--dynamic-batch-cost-model /no: ",
    ON + "--dynamic-batch-share-prefixes": "unset --dynamic-batch-share-prefixes",
    ON + "--full-validation": "without --multiple-validation-sets: unset it and set --eval-iters",
    ON + "--sft " + FULL_VALIDATION: "TypeError in Megatron-LM itself beside",
    ON + "--dataloader-inter-document-masking": "set --reset-attention-mask and --reset-position-",
    ON + "--reset-attention-mask": "needs --reset-position-ids",
    ON + "--iterations-to-skip 3": "--iterations-to-skip draws batches of a",
    ON + "--logits-load-dir x": "unset --logits-load-dir",
    ON + "--num-layers 8 --pipeline-model-parallel-size 4 --no-overlap-p2p-communication "
    "--num-virtual-stages-per-pipeline-rank 2": "drop --no-overlap-p2p-communication",
    ON + "--perform-rl-step": "unset --perform-rl-step",
    ON + EXPERTS + "--moe-expert-rank-capacity-factor 1.0": "unset --moe-expert-rank-capacity-fac",
    ON + "--hybrid-context-parallel": "unset --hybrid-context-parallel",
    ON + "--reuse-grad-buf-for-mxfp8-param-ag --fp8-format e4m3": "unset --reuse-grad-buf-for-mxf",
}
"""And an error."""


@pytest.fixture(scope="module")
def outcomes(run: Runs) -> dict[str, str]:
    """What became of each command line in Megatron's own parser and validation, and of scripts."""
    lines = {words: [*BASE, *words.split()] for words in (*ACCEPTED, *REFUSED)}
    found: dict[str, str] = run("lines", json.dumps(lines))
    return found


REFUSAL = "DynamicBatchArgumentError: "


@needs_training
def test_command_lines(outcomes: dict[str, str]) -> None:
    for words, text in ACCEPTED.items():
        assert outcomes[words].startswith("accepted; mcore_batching: " if text else "accepted")
        assert outcomes[words].count("mcore_batching: ") == bool(text), words
        assert text in outcomes[words]
    for words, text in REFUSED.items():
        assert outcomes[words].startswith(REFUSAL), words
        assert text in outcomes[words]
    assert outcomes[SEVERAL].count("\n  - ") == 4


@needs_training
@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_scripts_are_refused_before_the_first_step(outcomes: dict[str, str], name: str) -> None:
    for what, message in (
        ("non-loss", "process_non_loss_data_func runs the model on one rank"),
        ("script", "has no get_batch in its module"),
    ):
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
