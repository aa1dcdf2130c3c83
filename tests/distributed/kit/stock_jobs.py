"""The runs of `test_stock_training`: what is trained, in which layouts, with which flags."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.harness import REPOSITORY, Job

BY_ITSELF = """
import os, runpy, sys
from mcore_batching.megatron import PackedAttention  # the CPU stand-in is on from here
from megatron.core.models import backends
sys.argv = sys.argv[1:]
if "--use-dynamic-batch-size" in sys.argv:  # what a model without Transformer Engine needs
    backends.DotProductAttention = PackedAttention
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
runpy.run_path(sys.argv[0], run_name="__main__")
import torch.distributed as dist
dist.destroy_process_group()  # as mcore_batching.run does: gloo may abort at exit
"""
"""A launcher that installs nothing."""
SFT = "examples/sft/sft.py"
VARIANTS = "tests/distributed/kit/stock_script.py"
LENGTH = 192
LAYERS = 4
CAP = 448

DATA = str(REPOSITORY / "examples/data/arithmetic_conversations.jsonl")
COMMON = [
    *("--data-path", DATA, "--split", "80,10,10", "--tokenizer-type", "NullTokenizer"),
    *("--vocab-size", "258", "--make-vocab-size-divisible-by", "8"),
    *("--seq-length", str(LENGTH), "--max-position-embeddings", str(LENGTH)),
    *("--num-layers", str(LAYERS), "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--position-embedding-type", "rope", "--swiglu", "--normalization", "RMSNorm"),
    *("--disable-bias-linear", "--hidden-dropout", "0", "--attention-dropout", "0"),
    *("--lr", "3e-3", "--min-lr", "3e-4", "--lr-decay-style", "cosine"),
    # With a small epsilon Adam turns the rounding of gradients near zero into whole steps.
    *("--adam-eps", "1e-4", "--calculate-per-token-loss"),
    *("--log-interval", "1", "--eval-interval", "6", "--num-workers", "0"),
    *("--transformer-impl", "local", "--use-cpu-initialization"),
    *("--distributed-backend", "gloo"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"),
    *("--no-bias-dropout-fusion", "--no-bias-swiglu-fusion", "--no-rope-fusion"),
    *("--no-persist-layer-norm", "--no-create-attention-mask-in-dataloader"),
]
ON = ["--use-dynamic-batch-size", "--max-tokens-per-gpu"]
FLAG = [*ON, str(CAP)]
HALF_THE_CAP_TO_EVALUATE = ["--dynamic-batch-forward-only-max-tokens-per-gpu", str(CAP // 2)]
SHARED = [
    *(*ON, "96"),
    "--dynamic-batch-context-parallel",
]
"""Samples of up to 192 tokens do not fit on one rank."""


def checkout_of(release: str) -> Path:
    """A release or branch of Megatron-LM, its dataset helpers compiled, in the folder of checkouts
    that ``MCORE_BATCHING_MEGATRON_LM`` names; the test is skipped where there is none.

    Until 0.17 they import PyYAML, 0.16 also six, regex and pydantic.
    """
    found = Path(os.environ.get("MCORE_BATCHING_MEGATRON_LM", ""), release)
    if not (found / "megatron").is_dir():
        pytest.skip(f"MCORE_BATCHING_MEGATRON_LM does not name a folder with {release}")
    return found


def steps(number: int, *, micro_batch_size: int = 1, evaluations: int = 1) -> list[str]:
    """The schedule of the first steps of 20."""
    return [
        *("--train-iters", str(number), "--lr-decay-iters", "20", "--lr-warmup-iters", "2"),
        *("--micro-batch-size", str(micro_batch_size), "--global-batch-size", "8"),
        *("--eval-iters", str(evaluations)),
    ]


RAMP_UP = [
    # From 2 to 4 and 8 samples, after 4 and 12; what --rampup-batch-size was until 0.18.
    *("--step-batch-size-schedule", f"0:2 {4 * LENGTH}:4 {12 * LENGTH}:8"),
    *("--train-samples", "36", "--lr-decay-samples", "160", "--lr-warmup-samples", "16"),
    *("--micro-batch-size", "1", "--eval-iters", "0"),
]
PP2 = ["--pipeline-model-parallel-size", "2"]
VPP2 = [*PP2, "--num-virtual-stages-per-pipeline-rank", "2"]
# Megatron pads the vocabulary to a multiple of this times the tensor-parallel size.
TP2 = ["--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "4"]
CP2 = ["--context-parallel-size", "2"]
TP2_CP2 = [*TP2, *CP2]
ONE_ROW = [
    *(*ON, "1024"),
    *("--dynamic-batch-balance", "none", "--dynamic-batch-fill", "placeholder"),
]
"""All samples of a rank in one micro-batch, beside a placeholder where two are wanted."""
EXPERTS = [
    *("--num-experts", "4", "--moe-router-topk", "2", "--expert-model-parallel-size", "2"),
    *("--moe-token-dispatcher-type", "alltoall", "--ffn-hidden-size", "64"),
]
NO_AUXILIARY_LOSS = ["--moe-router-load-balancing-type", "none"]
AUXILIARY_LOSS = [
    *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2"),
]


def job(name: str, *words: str, function: str = "train", **parameters: Any) -> Job:
    """A run of five steps, or as the words say, of the script that has variants if one is named."""
    if not {"--train-iters", "--train-samples"} & {*words}:
        words = (*steps(5), *words)
    parameters["script"] = VARIANTS if "--variant" in words else SFT
    parameters["words"] = [*COMMON, *words]
    return Job(name, f"kit.stock:{function}", 4, None, parameters)


def ahead(name: str, *words: str) -> Iterator[Job]:
    """With each step planned during the one before, and without.

    Evaluation, which draws from another iterator, comes in between.
    """
    words = (*words, *FLAG, "--eval-interval", "2")
    yield job(f"{name}-ahead", *words, function="train_ahead")
    yield job(f"{name}-not-ahead", *words, function="train_ahead", fault="in line")


SAVED = [
    *("--save", "{folder}/pp2", "--save-interval", "3"),
    # Each rank writes by itself: writers of the other format import torch for every file.
    *("--ckpt-format", "torch"),
]
OVERLAPPED = ["--overlap-grad-reduce", "--use-distributed-optimizer", "--overlap-param-gather"]
NO_EVALUATION = steps(5, evaluations=0)
TWO_A_BATCH = steps(5, micro_batch_size=2)
BY_TWO = ["--eval-interval", "2"]
REJECTED = ["--rerun-mode", "validate_results", "--variant", "rejected"]
EP2 = [*PP2, *EXPERTS]
MANY = [
    *("--train-iters", "2000", "--lr-decay-iters", "2000", "--micro-batch-size", "1"),
    *("--global-batch-size", "8", "--eval-iters", "0", "--log-interval", "100"),
]
JOBS = {
    each.name: each
    for each in (
        job("pp2-padded", *steps(6), *PP2),
        job("pp2-evaluated", *PP2, *BY_TWO),
        job("pp2", *steps(6), *PP2, *FLAG, *HALF_THE_CAP_TO_EVALUATE),
        job("pp2-overlapped-reduction", *PP2, *FLAG, *OVERLAPPED),
        job("pp2-two-samples-padded", *TWO_A_BATCH, *PP2),
        job("pp2-two-samples", *TWO_A_BATCH, *PP2, *FLAG),
        job("pp2-ramp-up-padded", *RAMP_UP, *PP2),
        job("pp2-ramp-up", *RAMP_UP, *PP2, *FLAG),
        job(
            "pp2-resumed",
            *(*steps(6), *PP2, *FLAG, *HALF_THE_CAP_TO_EVALUATE, *SAVED),
            function="train_and_resume",
        ),
        job("vpp2-padded", *VPP2),
        job("vpp2", *VPP2, *FLAG),
        job("vpp2-placeholders", *VPP2, *ONE_ROW, "--no-dynamic-batch-exchange"),
        job("dp4-padded"),
        job("tp2-cp2", *TP2_CP2, *FLAG),
        job("tp2-staying", *TP2, *FLAG, "--no-dynamic-batch-exchange"),
        job("pp2-shared", *PP2, *SHARED, "2"),
        job("cp2-shared", *PP2, *CP2, *SHARED, "2"),
        job("dp4-shared", *SHARED, "4"),
        job("ep2-padded", *EP2, *NO_AUXILIARY_LOSS),
        job(
            "ep2-tokens-per-sample",
            *(*EP2, *NO_AUXILIARY_LOSS, *FLAG, "--variant", "tokens-per-sample"),
        ),
        job("ep2-auxiliary-loss", *EP2, *AUXILIARY_LOSS, *FLAG),
        job("pp2-rerun", *PP2, *FLAG, *REJECTED),
        job(
            "pp2-conversations",
            *(*PP2, *FLAG, "--sft", "--variant", "conversations"),
            *("--global-batch-size", "4", *BY_TWO),
        ),
        job("loss-raises", *PP2, *FLAG, "--variant", "loss-raises"),
        job(
            "data-ends",
            *(*NO_EVALUATION, *PP2, *FLAG, "--dataloader-type", "external"),
            *("--variant", "data-ends"),
        ),
        job("reading-raises", *NO_EVALUATION, *PP2, *FLAG, "--variant", "reading-raises"),
        *ahead("pp2", *PP2),
        *ahead("pp2-ramp-up", *RAMP_UP, *PP2),
        *ahead("pp2-rerun", *PP2, *REJECTED),
        job(
            "pp2-early-exit",
            *(*PP2, *FLAG, *BY_TWO, "--exit-interval", "3"),
            function="train_ahead",
        ),
        dataclasses.replace(
            job("thousands-of-steps", *MANY, *PP2, *FLAG, "--num-layers", "2", function="held"),
            seconds=1200.0,
        ),
    )
}
