"""Log-probabilities and entropies in chunks are those of one float64 softmax, gradients too."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kit.harness import Job

# float32 keeps 24 bits, through sums over 64 entries; of bfloat16 logits only the gradient is
# rounded to its 8 bits.
FLOAT32 = 1e-6
BFLOAT16 = 4e-3
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"data_parallel": 2},
    "tp2": {"tensor_parallel": 2},
    "cp2": {"context_parallel": 2},
}
LOWEST = torch.finfo(torch.float32).min
CASES: list[tuple[str, dict[str, Any]]] = [
    (name, dict(zip(("temperature", "chunk_tokens", "banned"), values, strict=True)))
    for name in LAYOUTS
    # Scripts set logits of forbidden entries to -inf, or to the lowest number: under TP2 all of
    # rank 1's.
    for values in ((1.0, 1024, None), (0.7, 3, None), (0.7, 3, -math.inf), (1.0, 3, LOWEST))
] + [("tp2", {"temperature": 1.3, "chunk_tokens": 5, "dtype": "bfloat16"})]
JOBS = [
    Job(f"log-probs-{name}-{number}", "kit.log_probs:compare", 2, LAYOUTS[name], parameters)
    for number, (name, parameters) in enumerate(CASES)
]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_values_and_gradients_are_those_of_a_plain_softmax(
    job: Job, ranks: list[dict[str, float]]
) -> None:
    for rank in ranks:
        for name, difference in rank.items():
            rounded = "dtype" in job.parameters and "gradient" in name
            assert difference < (BFLOAT16 if rounded else FLOAT32), name


@pytest.mark.parametrize(
    "job",
    [
        Job(f"log-probs-memory-{name}", "kit.log_probs:memory_is_shared", 2, LAYOUTS[name])
        for name in ("dp2", "tp2")
    ],
    ids=str,
)
def test_the_gradient_is_written_over_logits_that_nobody_else_reads(
    job: Job, ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        assert rank["once"]["in place"]
        for name in ("twice", "leaf", "kept"):
            assert not rank[name]["in place"], name
            assert rank[name]["logits are whole"], name
        for name in ("once", "twice", "leaf", "kept"):
            assert rank[name]["gradient"] < FLOAT32, name
        # Loudly, not with a wrong gradient.
        assert "modified by an inplace operation" in rank["another reader"]


@pytest.mark.parametrize(
    "job",
    [
        Job(
            "log-probs-settings",
            "kit.log_probs:settings_of_a_step",
            1,
            {},
        )
    ],
    ids=str,
)
def test_flags_of_log_probs_in_a_step(job: Job, ranks: list[dict[str, Any]]) -> None:
    (found,) = ranks
    assert found["dtypes"] == ["torch.float32", "torch.bfloat16"]
    assert found["same gradients"]
    assert found["same log-probabilities"]
    assert found["types"] == ["FusedLogits"]
    assert found["fused constant touches all"]
