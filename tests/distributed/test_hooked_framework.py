"""A framework's own forward step, loss and log-prob functions on the hooked batching.

The framework knows nothing of placeholders and counts at least one token a sample. Both sides
compute in float32 over rows that are padded differently; tolerances as in `test_exactness`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from kit import output_faults
from kit.harness import Job

LOG_PROBS = 2e-6
GRADIENTS = 2e-5

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"data_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
    "cp2": {"context_parallel": 2},
    "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True},
}


def jobs() -> list[Any]:
    made = []
    for name, dims in LAYOUTS.items():
        for per_token_loss in (True, False):
            for spread in ("uneven", "empty") if name == "dp2" else ("uneven",):
                parameters = {
                    "dims": dims,
                    "reference": "dense",
                    "spread": spread,
                    "per_token_loss": per_token_loss,
                }
                mean = "tokens" if per_token_loss else "samples"
                made.append(
                    Job(f"hook-{name}-{spread}-{mean}", "kit.hooking:compare", 2, dims, parameters)
                )
    (of_tokens,) = (job for job in made if job.name == "hook-tp2-sp-uneven-tokens")
    wider = {"planner": {"dynamic_batch_forward_only_max_tokens_per_gpu": 256}}
    parameters = of_tokens.parameters | wider
    made.append(replace(of_tokens, name="hook-tp2-sp-forward-cap", parameters=parameters))
    # The mean over samples takes another way through the loss alone, which no layout changes.
    always = [each for each in made if "dp2" in each.name or each.name.endswith(("tokens", "cap"))]
    return [pytest.param(each, marks=() if each in always else pytest.mark.long) for each in made]


@pytest.mark.parametrize("job", jobs(), ids=str)
def test_hooked_framework_equals_the_engine(job: Job, ranks: list[dict[str, Any]]) -> None:
    assert len({tuple(rank["counts"]) for rank in ranks}) == 1
    assert max(rank["log_probs"] for rank in ranks) < LOG_PROBS
    assert max(rank["gradients"] for rank in ranks) < GRADIENTS
    if job.dims.get("data_parallel", 1) > 1:
        assert ranks[1]["placeholders"] > 0
    if job.parameters["per_token_loss"]:
        for rank in ranks:
            # A sample without a trainable token counts as one in this framework, a placeholder not.
            clamped = rank["trainable"] + rank["untrainable"]
            assert rank["tokens"] == (clamped if rank["last_stage"] else 0)


def on_two_replicas(function: str) -> Any:
    """A job of `kit.hooking` on two data-parallel ranks."""
    parameters = {"dims": LAYOUTS["dp2"], "reference": "dense"}
    job = Job(f"hook-{function}", f"kit.hooking:{function}", 2, LAYOUTS["dp2"], parameters)
    return pytest.mark.parametrize("job", [job], ids=str)


@on_two_replicas("batches")
def test_batches_of_get_batch(job: Job, ranks: list[dict[str, Any]]) -> None:
    with_samples, without = (rank["batches"] for rank in ranks)
    assert sorted(i for batch in with_samples for i in batch["indices"]) == [0, 1, 2, 3]
    assert [batch["indices"] for batch in without] == [[]] * len(with_samples)
    for batch in [*with_samples, *without]:
        assert batch["keys"] == sorted(
            [
                *("bonus", "dynamic_global_batch_size", "full_loss_masks", "loss_masks"),
                *("multimodal_train_inputs", "packed_seq_params", "response_lengths", "tokens"),
                *("total_lengths", "unconcat_tokens", "values"),
            ]
        )
        assert batch["lengths_right"]
        assert batch["tokens_right"]
        assert batch["row"][0] == 1
        assert batch["row"][1] % 4 == 0  # padded to a multiple of pad_multiplier
        assert batch["offsets"][-1] == batch["row"][1]
        assert batch["mask_dtype"] == "torch.int32"
        assert batch["mask_sum"] == batch["trainable"]
        assert batch["values"] is None
        assert batch["global_batch_size"] == 4
    fits = [batch for batch in with_samples if len(batch["indices"]) > 1]
    assert fits
    assert all(batch["row"][1] <= ranks[0]["capacity"] for batch in fits)
    for batch in without:
        assert batch["row"] == [1, 4]
        assert batch["bonus"] == [1]
        assert batch["trainable"] == batch["counted"] == 0
        assert batch["pixels"] == []
    assert all(batch["counted"] for batch in with_samples)
    pixels = sorted(row for batch in with_samples for row in batch["pixels"])
    assert pixels == [[0.0] * 3, [1.0] * 3, [1.0] * 3]
    # Masks as they are when drawn: all ones, which they were not when planned.
    trained = sum(batch["trainable"] for batch in with_samples)
    assert trained == ranks[0]["num_response_tokens"]
    for rank in ranks:
        assert rank["otherwise_padded"][1] % 12 == 0
        assert rank["drawn_out"].startswith("IndexError")
        assert 'schema = schema.declare("secret"' in rank["undeclared"]  # whoever has samples
        assert "bonus" in rank["misfit"]
        assert "1" in rank["misfit"]


REFUSED = {
    "bshd": r"DynamicBatchArgumentError: .*qkv_format='bshd' .* set qkv_format=\"thd\"",
    "allgather": r"DynamicBatchArgumentError: .*allgather_cp=True .* set allgather_cp=False",
    "bshd planned": r"DynamicBatchArgumentError: .*qkv_format='bshd'",
    "allgather planned": r"DynamicBatchArgumentError: .*allgather_cp=True",
    "exchange": r"DynamicBatchArgumentError: .* unset dynamic_batch_exchange",
    "shared prefixes": r"DynamicBatchArgumentError: .* unset dynamic_batch_share_prefixes",
    "pad each": r"DynamicBatchArgumentError: .* unset dynamic_batch_pad_each_to",
    "learnt costs": r"DynamicBatchArgumentError: .*costs: set dynamic_batch_cost_model .* a file",
    "cap": r"ConfigError: the least micro-batch takes 1024 tokens",
    "no token": r"PlanningFailedError: .*rank 1: SchemaError: .*total_lengths.* at least one token",
    "foreign batch": r"DynamicBatchArgumentError: .* got SimpleNamespace: call get_data",
    "foreign iterator": r"DynamicBatchArgumentError: .* got SimpleNamespace: call get_data",
    "path": r"DynamicBatchArgumentError: .*before_log_prob_hook_path: unset it, and call the func",
}


@on_two_replicas("refused")
def test_refused_by_name_on_every_rank(job: Job, ranks: list[dict[str, str]]) -> None:
    for rank in ranks:
        assert rank.keys() == REFUSED.keys()
        for name, pattern in REFUSED.items():
            assert re.match(pattern, rank[name], re.DOTALL), rank[name]


@on_two_replicas("positions")
def test_models_that_see_images_find_positions_themselves(
    job: Job, ranks: list[dict[str, list[bool]]]
) -> None:
    for rank in ranks:
        assert set(rank["text"]) == set(rank["text again"]) == {True}
        assert set(rank["images"]) == {False}


OUTPUTS = [
    *output_faults.jobs_of("unplanned", "", "dp2"),
    *output_faults.jobs_of("planned slime"),
    *output_faults.jobs_of("planned miles", "", "dp2"),
]


@pytest.mark.parametrize("job", OUTPUTS, ids=str)
def test_outputs_that_no_sample_has_are_an_error_on_all(
    job: Job, ranks: list[dict[str, str]]
) -> None:
    output_faults.check(ranks)
