"""Inside the pipeline the host waits for the device nowhere but where Megatron itself does."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from kit.harness import Job
from kit.stock_jobs import COMMON, FLAG, SFT, steps

MEGATRONS_OWN = {
    # The unfused rotary embedding asks for the lengths of the row, in every layer. Transformer
    # Engine's does not: --apply-rope-fusion.
    ("_local_scalar_dense", "megatron.core.models.common.embeddings.rope_utils"),
    ("tolist", "megatron.core.models.common.embeddings.rope_utils"),
    # Whether the step has a token at all: once a step and chunk, behind the last backward pass.
    ("_local_scalar_dense", "megatron.core.distributed.finalize_model_grads"),
    # Whether the loss is finite: unless --no-check-for-nan-in-loss-and-grad.
    ("_local_scalar_dense", "megatron.core.rerun_state_machine"),
    # After every batched transfer, for PyTorch versions of before 2023: batch_p2p_sync=False.
    ("synchronize", "megatron.core.pipeline_parallel.p2p_communication"),
    # gloo gathers into tensors of its own and copies them once they are waited for.
    ("copy to the device", "megatron.core.tensor_parallel.layers"),
}
"""Kinds of waits, and the modules that ask for them."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "pp2": {"pipeline_parallel": 2},
    "pp2-vpp2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "cp2": {"context_parallel": 2},
}


def others(waits: list[Any]) -> list[Any]:
    """Those that are not Megatron's own."""
    return [
        (kind, where, number)
        for kind, where, number in waits
        if (kind, where.split(":")[0]) not in MEGATRONS_OWN
    ]


def job(name: str, dims: dict[str, Any], **parameters: Any) -> Job:
    nproc = 2 if dims else 1
    given = {"dims": dims, "reference": "dense", **parameters}
    return Job(f"waits-{name}", "kit.waits:waits_of_a_step", nproc, dims, given)


JOBS = [
    *(
        # With samples on the device the latter is run every time.
        pytest.param(job(name, dims), marks=pytest.mark.long if name in ("tp2-sp", "cp2") else ())
        for name, dims in LAYOUTS.items()
    ),
    pytest.param(job("samples-on-device", LAYOUTS["cp2"], samples_on_device=True)),
]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_nothing_of_ours_waits_inside_the_pipeline(job: Job, ranks: list[Any]) -> None:
    for found in ranks:
        for operation, waits in found.items():
            assert not others(waits), operation
        # Megatron's own show that something is counted.
        assert any(kind == "tolist" for kind, *_ in found["train_step"])


STOCK = Job(
    "waits-stock-training",
    "kit.waits:waits_of_stock_training",
    1,
    None,
    {"script": SFT, "words": [*COMMON, *steps(2), *FLAG]},
)


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="this megatron-core ships without megatron.training (it does from 0.19 on)",
)
@pytest.mark.parametrize("job", [STOCK], ids=str)
def test_nor_do_packed_rows_in_stock_training(job: Job, ranks: list[Any]) -> None:
    for waits in ranks:
        assert not others(waits)
        assert waits


@pytest.mark.parametrize("job", [Job("waits-on-purpose", "kit.waits:deliberate_waits", 1)], ids=str)
def test_what_waits_is_counted_and_what_does_not_is_not(job: Job, ranks: list[Any]) -> None:
    (found,) = ranks
    assert sum(not kind for kind, _ in found) == 9
    for expected, counted in found:
        assert [kind for kind, *_ in counted] == ([expected] if expected else [])
        assert all(where.startswith("kit.waits:") for _, where, _ in counted)
