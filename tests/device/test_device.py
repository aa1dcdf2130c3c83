"""A whole step on a CUDA device that is not there: waits, devices, types, kernels, memory.

What it cannot show: kernels, NCCL, speed, and what depends on values that a device computes.
"""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest
from kit.harness import Job, results, run_jobs
from kit.stock_jobs import COMMON, FLAG, SFT, steps

MEGATRONS_OWN = {
    # The unfused rotary embedding reads the lengths of the row, in every layer. Transformer
    # Engine's does not: --apply-rope-fusion.
    "megatron.core.models.common.embeddings.rope_utils",
    # Whether the step has a token at all: once a step and chunk, behind the last backward pass.
    "megatron.core.distributed.finalize_model_grads",
    # After every batched transfer, for PyTorch versions of before 2023: batch_p2p_sync=False.
    "megatron.core.pipeline_parallel.p2p_communication",
}
"""Modules that wait inside the pipeline."""

OURS = {
    ("get_data_iterator", "mcore_batching.batch.values"): 2,  # fields that are on the device
    ("forward_only", "mcore_batching.megatron.exchange"): 2,  # sizes, headers
    ("add_fields", "mcore_batching.batch.values"): 1,
    ("train_step", "mcore_batching.megatron.loss_shares"): 2,  # losses, gradients
    ("train_step", "mcore_batching.megatron.train_step"): 1,  # metrics
}
"""Phase and module to its waits in a step, however many micro-batches and samples."""

LAYERS_OF_7B = {
    "num_layers": 2,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 11008,
    # As the plan's figure has them; of RMSNorm torch has the kernel in builds for CUDA alone.
    "bias_activation_fusion": True,
    "normalization": "LayerNorm",
}
LARGE = {
    "vocabulary": 152064,
    "lengths": [9000, 7000, 16000],
    "cap_tokens": 16384,
}
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


STEP = "steps:whole_step"
STEPS = [
    Job.of("large", STEP, {}, model=LAYERS_OF_7B, **LARGE),
    Job.of("large-model-type", STEP, {}, model=LAYERS_OF_7B, logits_in_model_dtype=True, **LARGE),
    Job.of("large-fused-output", STEP, {}, model=LAYERS_OF_7B, fuse_output_layer=True, **LARGE),
    Job.of("large-recomputed", STEP, {}, model=LAYERS_OF_7B | RECOMPUTED, **LARGE),
    Job.of("trees", STEP, {}, share_prefixes=True),
    Job.of("fp16-on-device", STEP, {}, dtype="float16", on_device=True),
    Job.of("pp2", STEP, {"pipeline_parallel": 2}),
    Job.of(
        "pp2-vpp2", STEP, {"pipeline_parallel": 2, "virtual_pipeline": 2}, fuse_output_layer=True
    ),
    Job.of(
        "tp2-sp",
        STEP,
        {"tensor_parallel": 2, "sequence_parallel": True},
        logits_in_model_dtype=True,
    ),
    Job.of("cp2-on-device", STEP, {"context_parallel": 2}, on_device=True),
    Job.of("cp2-trees", STEP, {"context_parallel": 2}, cap_tokens=64, share_prefixes=True),
    Job.of("dp2", STEP, {"data_parallel": 2}, distributed_optimizer=True),
]
HAS_STOCK = importlib.util.find_spec("megatron.training") is not None
# Of what is made up a check for NaN finds some; on the host made weights never get to the device.
WORDS = [word for word in COMMON if word != "--use-cpu-initialization"]
WORDS += ["--num-layers", "1", *steps(2), *FLAG, "--no-check-for-nan-in-loss-and-grad"]
JOBS = [
    *STEPS,
    Job("deliberate_waits", "steps:deliberate_waits", 1, {}),
]
if HAS_STOCK:
    stock = {"script": SFT, "words": WORDS}
    JOBS.append(Job("stock-training", "steps:waits_of_stock_training", 1, None, stock))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    jobs = sorted(JOBS, key=lambda each: each.nproc)
    found: dict[str, Any] = {}
    for nproc, alike in itertools.groupby(jobs, key=lambda each: each.nproc):
        found |= run_jobs([*alike], tmp_path_factory.mktemp(f"nproc{nproc}"), "twin")
    return found


def module_of(wait: str) -> str:
    return wait.split(", ")[1].split(":")[0]


@pytest.mark.parametrize("job", STEPS, ids=str)
def test_a_step(job: Job, outcomes: dict[str, Any]) -> None:
    dtype, options = job.parameters.get("dtype", "bfloat16"), job.parameters
    for rank, found in enumerate(results(outcomes[job.name])):
        assert found["updated"]
        outside: dict[tuple[str, str], int] = {}
        for wait, number in found["waits"]:
            phase, module = wait.split(": ")[0], module_of(wait)
            if phase.endswith("pipeline"):
                assert module in MEGATRONS_OWN, wait
            elif module.startswith("mcore_batching."):
                outside[phase, module] = outside.get((phase, module), 0) + number
        assert found["micro_batches"] >= 2
        assert all(number <= OURS.get(place, 0) for place, number in outside.items()), outside
        # In every pass of both calls by the kernel: another name is another path.
        passes = found["layers"] * found["micro_batches"]
        again = passes * ("recompute_granularity" in options.get("model", {}))
        assert found["attention"] == {
            "torch_attn._varlen_attn": 2 * passes + again,
            "torch_attn._varlen_attn_backward": passes,
        }
        is_last = "pipeline_parallel" not in options["dims"] or rank == 1
        own = options.get("logits_in_model_dtype") or options.get("fuse_output_layer")
        logits = {f"torch.{dtype}" if own else "torch.float32"}
        assert {*found["types"]} == ({*logits, "torch.float32"} if is_last else set())
        assert found["outputs"] == (
            ["(torch.float32, device(type='cuda', index=0))"] if is_last else []
        )
        if job.name.startswith("large"):
            predicted = found["predicted"]["train_step pipeline"]
            assert found["peaks"]["train_step pipeline"] == pytest.approx(predicted, rel=0.1)
            # A quarter of the logits in float32, hidden states of the layers included.
            logits_bytes = 4 * max(LARGE["lengths"]) * LARGE["vocabulary"]
            assert found["peaks"]["forward_only pipeline"] <= 0.25 * logits_bytes


@pytest.mark.skipif(not HAS_STOCK, reason="megatron.training is in megatron-core from 0.19 on")
def test_packed_rows_of_stock_training_do_not_wait(outcomes: dict[str, Any]) -> None:
    (found,) = results(outcomes["stock-training"])
    assert found
    assert all(module_of(wait) in MEGATRONS_OWN for wait in found), found


def test_what_waits_is_counted_and_what_does_not_is_not(outcomes: dict[str, Any]) -> None:
    (found,) = results(outcomes["deliberate_waits"])
    assert len(found) == 33
    for expected, counted in found:
        assert counted == expected
