"""Messages at the start of a job: each where it applies, and only there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mcore_batching.integrations.megatron_lm.arguments import start_messages
from mcore_batching.megatron import compat

DENSE = SimpleNamespace(num_moe_experts=None)
PLAIN = SimpleNamespace(rank=0)


def experts(**changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "num_moe_experts": 4,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
    }
    return SimpleNamespace(**fields | changes)


def documents(implementation: str) -> SimpleNamespace:
    return SimpleNamespace(rank=0, reset_attention_mask=True, transformer_impl=implementation)


@pytest.mark.parametrize(
    "config",
    [
        experts(moe_aux_loss_coeff=0.01),
        experts(
            moe_router_load_balancing_type=["none", "seq_aux_loss"], moe_aux_loss_coeff=[0.0, 0.01]
        ),
        experts(moe_router_load_balancing_type="none", moe_z_loss_coeff=0.001),
    ],
)
def test_auxiliary_losses_weigh_less(config: SimpleNamespace) -> None:
    (message,) = start_messages(PLAIN, config)
    assert "weighted by real tokens" in message
    assert "--moe-aux-loss-coeff and --moe-z-loss-coeff" in message


def test_operations_of_padding_are_counted_until_017(monkeypatch: pytest.MonkeyPatch) -> None:
    logging = SimpleNamespace(rank=0, log_throughput=True)
    monkeypatch.setattr(compat.scripts, "counts_operations_of_samples", lambda: False)
    (message,) = start_messages(logging, DENSE)
    assert "TFLOP/s (--log-throughput) as if samples were padded" in message
    assert start_messages(SimpleNamespace(rank=0, log_throughput=False), DENSE) == []
    monkeypatch.setattr(compat.scripts, "counts_operations_of_samples", lambda: True)
    assert start_messages(logging, DENSE) == []


def test_documents_are_separate_where_transformer_engine_would_mix_them() -> None:
    (message,) = start_messages(documents("transformer_engine"), DENSE)
    assert "Transformer Engine ignores that mask" in message
    assert start_messages(documents("local"), DENSE) == []


@pytest.mark.parametrize("config", [DENSE, experts(), experts(moe_z_loss_coeff=0.0)])
def test_a_job_to_which_none_applies_has_none(config: SimpleNamespace) -> None:
    assert start_messages(PLAIN, config) == []
