import pytest
import torch

pytest.importorskip("megatron.core")

import objective
from objective import GRPOObjective

from mcore_batching.batch import DEFAULT_SCHEMA, pack, step_totals

CLIP, KL_COEFFICIENT = 0.2, 0.1
# Ratios of 1.5 and 0.5: inside and outside the clip range, for both signs of the advantage.
LOG_RATIOS = [[0.0, 0.4054651, 0.4054651, -0.6931472], [0.4054651, -0.6931472]]
ADVANTAGES = [2.0, -1.0]
REFERENCE_GAPS = [[0.0, 0.5, 0.25, -0.5], [1.0, 0.0]]


@pytest.fixture
def row():
    lengths = [len(ratios) for ratios in LOG_RATIOS]
    return pack(
        {
            "tokens": [torch.arange(length + 2) for length in lengths],
            "total_lengths": [length + 2 for length in lengths],
            "response_lengths": lengths,
            "log_probs": [torch.full((length,), -2.0) for length in lengths],
            "ref_log_probs": [
                torch.tensor(ratios) - 2.0 + torch.tensor(gaps)
                for ratios, gaps in zip(LOG_RATIOS, REFERENCE_GAPS, strict=True)
            ],
            "advantages": [
                torch.full((length,), advantage)
                for length, advantage in zip(lengths, ADVANTAGES, strict=True)
            ],
        },
        schema=DEFAULT_SCHEMA,
        sample_indices=[0, 1],
    )


def test_the_loss_is_clipped_grpo_by_hand(row, monkeypatch):
    new = [(torch.tensor(ratios) - 2.0).requires_grad_() for ratios in LOG_RATIOS]
    monkeypatch.setattr(objective, "response_log_probs", lambda logits, row: new)
    share, metrics = GRPOObjective(clip=CLIP, kl_coefficient=KL_COEFFICIENT)(
        torch.zeros(1), row, step_totals([row])
    )
    # min(ratio A, clipped ratio A): advantage 2 at ratios 1, 1.5, 1.5, 0.5, and -1 at 1.5, 0.5.
    policy = -(2 * 1 + 2 * 1.2 + 2 * 1.2 + 2 * 0.5 - 1 * 1.5 - 1 * 0.8) / 6
    gaps = torch.tensor([gap for gaps in REFERENCE_GAPS for gap in gaps])
    kl = float((gaps.exp() - gaps - 1).sum()) / 6
    assert metrics["policy_loss"].item() == pytest.approx(policy, rel=1e-5)
    assert metrics["kl"].item() == pytest.approx(kl, rel=1e-5)
    assert share.item() == pytest.approx(policy + KL_COEFFICIENT * kl, rel=1e-5)
    assert metrics["clipped"].item() == pytest.approx(3 / 6)
    metrics["policy_loss"].backward()
    # Clipped tokens have no gradient, the others -ratio times advantage over the tokens.
    assert new[0].grad.tolist() == pytest.approx([-2 / 6, 0, 0, -1 / 6], abs=1e-5)
    assert new[1].grad.tolist() == pytest.approx([1.5 / 6, 0], abs=1e-5)


def test_the_kl_term_pulls_towards_the_reference(row, monkeypatch):
    new = [(torch.tensor(ratios) - 2.0).requires_grad_() for ratios in LOG_RATIOS]
    monkeypatch.setattr(objective, "response_log_probs", lambda logits, row: new)
    _, metrics = GRPOObjective(clip=CLIP, kl_coefficient=KL_COEFFICIENT)(
        torch.zeros(1), row, step_totals([row])
    )
    metrics["kl"].backward()
    for values, gaps in zip(new, REFERENCE_GAPS, strict=True):
        # Where the reference is more probable, the gradient step raises the probability.
        assert torch.equal(values.grad.sign(), -torch.tensor(gaps).sign())
