"""Refused flags as Megatron's own parser and validation hand them on, and refused scripts.

In a process of its own, since the plugin is installed there; all cases in one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from kit.patience import patience

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="this megatron-core ships without megatron.training (it does from 0.19 on)",
)

PROGRAM = """
import contextlib, io, json, os, sys
from mcore_batching.megatron import cpu_emulation
cpu_emulation.enable(force=True)
from mcore_batching.integrations.megatron_lm import install
install(["--use-dynamic-batch-size"])
from megatron.training import arguments

def outcome(words):
    sys.argv = ["script.py", *words]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            arguments.validate_args(arguments.parse_args())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    messages = [line for line in said.getvalue().splitlines() if line.startswith("mcore_batching")]
    return "; ".join(["accepted", *messages])

def called(name, on, **given):
    "The error of the hooked function before it does anything, which it cannot with None."
    global_vars._GLOBAL_ARGS = types.SimpleNamespace(use_dynamic_batch_size=on)
    function = getattr(training, name)
    options = dict.fromkeys(inspect.signature(function).parameters) | given
    try:
        function(**options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def no_get_batch(data_iterator, model):
    return model(data_iterator)

import inspect, types
from megatron.training import global_vars, training

given = json.loads(sys.stdin.read())
outcomes = {name: outcome(words) for name, words in given.items()}
os.environ["RANK"] = "1"
outcomes["on rank 1"] = outcome(given["auxiliary-loss"])
for name in ("train", "evaluate"):
    for on in (True, False):
        options = {"on": on, "forward_step_func": no_get_batch}
        outcomes[f"{name} {on} script"] = called(name, **options)
        outcomes[f"{name} {on} non-loss"] = called(
            name, process_non_loss_data_func=print, **options
        )
print(json.dumps(outcomes), file=sys.stderr)
"""

BASE = [
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--max-position-embeddings", "64", "--micro-batch-size", "1"),
    *("--train-iters", "1", "--lr", "1e-3", "--transformer-impl", "local"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-rope-fusion"),
    *("--no-persist-layer-norm", "--tokenizer-type", "NullTokenizer", "--vocab-size", "64"),
]
ON = ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "64", "--calculate-per-token-loss"]
EXPERTS = [
    *("--num-experts", "4", "--moe-router-topk", "2", "--expert-model-parallel-size", "2"),
]
ALLTOALL = [*EXPERTS, "--moe-token-dispatcher-type", "alltoall"]
PP2 = ["--pipeline-model-parallel-size", "2"]
VPP2 = [*PP2, "--num-virtual-stages-per-pipeline-rank", "2"]

ACCEPTED = {
    "dense": ON,
    "pipeline": [*ON, *PP2],
    "interleaved": [*ON, *VPP2],
    "experts": [*ON, *ALLTOALL, "--moe-router-load-balancing-type", "aux_loss"],
    "exchange": [*ON, "--dynamic-batch-exchange"],
    "hybrid": [*ON, *PP2, "--hybrid-layer-pattern", "M*-|G*-|M*-|G*-"],
    "documents": [*ON, "--reset-attention-mask", "--reset-position-ids"],
    "multi-token": [*ON, "--mtp-num-layers", "1", "--position-embedding-type", "rope"],
    "hybrid-multi-token": [
        *(*ON, "--hybrid-layer-pattern", "*-*-/*-", "--position-embedding-type", "rope"),
    ],
    "off": ["--sft", *PP2],
    "off-with-cap": ["--max-tokens-per-gpu", "64"],
}

WITH_MESSAGE = {
    "auxiliary-loss": (
        [
            *(*ON, *ALLTOALL, "--moe-router-load-balancing-type", "aux_loss"),
            *("--moe-aux-loss-coeff", "0.01"),
        ],
        "load-balancing and z-losses are weighted by real tokens",
    ),
    "documents-in-transformer-engine": (
        [
            *(*ON, "--reset-attention-mask", "--reset-position-ids"),
            *("--transformer-impl", "transformer_engine"),
        ],
        "Transformer Engine ignores that mask",
    ),
}

REFUSED: dict[str, tuple[list[str], str]] = {
    "mean-over-micro-batches": (
        ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "64"],
        "set --calculate-per-token-loss",
    ),
    "no-cap": (["--use-dynamic-batch-size", "--calculate-per-token-loss"], "--max-tokens-per-gpu"),
    "exchange-alone": (["--dynamic-batch-exchange"], "alone: set --use-dynamic-batch-size"),
    "negative-effort": (
        [*ON, "--dynamic-batch-plan-effort", "-1"],
        "--dynamic-batch-plan-effort must be",
    ),
    "sft": ([*ON, "--sft"], "unset --sft and give the file with --dynamic-batch-data"),
    "documents-without-positions": (
        [*ON, "--reset-attention-mask"],
        "needs --reset-position-ids",
    ),
    "skipped-iterations": ([*ON, "--iterations-to-skip", "3"], "--iterations-to-skip"),
    "cuda-graphs": ([*ON, "--cuda-graph-impl", "local"], "set --cuda-graph-impl none"),
    "expert-capacity": (
        [
            *(*ON, *ALLTOALL, "--moe-expert-capacity-factor", "1.0"),
            *("--moe-router-load-balancing-type", "none"),
        ],
        "unset --moe-expert-capacity-factor",
    ),
    "interleaved-without-overlap": (
        [
            *(*ON, "--num-layers", "8", "--pipeline-model-parallel-size", "4"),
            *("--num-virtual-stages-per-pipeline-rank", "2", "--no-overlap-p2p-communication"),
        ],
        "drop --no-overlap-p2p-communication",
    ),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What became of each command line."""
    given = {name: [*BASE, *words] for name, words in ACCEPTED.items()}
    given |= {name: [*BASE, *words] for name, (words, _) in (REFUSED | WITH_MESSAGE).items()}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env=os.environ | {"WORLD_SIZE": "4", "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=patience(200),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    read: dict[str, str] = json.loads(done.stderr.splitlines()[-1])
    return read


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_flags(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == "accepted"


@pytest.mark.parametrize("name", WITH_MESSAGE)
def test_flags_with_a_message(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name].startswith("accepted; mcore_batching: ")
    assert WITH_MESSAGE[name][1] in outcomes[name]
    assert outcomes[name].count("mcore_batching: ") == 1
    assert outcomes["on rank 1"] == "accepted"


@pytest.mark.parametrize("name", REFUSED)
def test_refused_flags(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name].startswith("DynamicBatchArgumentError: ")
    assert REFUSED[name][1] in outcomes[name]


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
    refused = outcomes[f"{name} True {what}"]
    assert refused.startswith("DynamicBatchArgumentError: ")
    assert message in refused
    assert "DynamicBatchArgumentError" not in outcomes[f"{name} False {what}"]
