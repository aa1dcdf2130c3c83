"""What the GRPO jobs are made of: flags, ranks' shares, optimizer steps, losses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

import objective
import warm_start
from batches import group_advantages, rollout_data, share_of_rank
from kit.packing import pack
from objective import GRPOObjective
from online import steps_of_rank
from options import dims_of, parse_arguments
from rollouts import Rollout

from mcore_batching.batch import DEFAULT_SCHEMA
from mcore_batching.batch.loss import step_totals
from mcore_batching.planning import ParallelDims


def test_data_parallelism_is_what_the_other_sizes_leave_unless_given():
    two_by_two = ParallelDims(data_parallel=2, pipeline_parallel=2)
    assert dims_of(parse_arguments([]), 4) == two_by_two
    assert dims_of(parse_arguments(["--pp", "1", "--tp", "2", "--cp", "2"]), 8).data_parallel == 2
    assert dims_of(parse_arguments(["--dp", "3"]), 8).data_parallel == 3


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--iterations", "0"], "--iterations must be 1 or more, got 0"),
        (["--vpp", "3"], "cannot be cut into 6 equal model chunks"),
        (["--hybrid-layer-pattern", "*-"], "*- is not cut into 2 model chunks"),
        (["--hybrid-layer-pattern", "*-|*E"], "*-|*E has other layers than *-MG"),
        (["--baseline", "--compare"], "not allowed with"),
        (["--online", "--compare"], "--compare is for recorded rollouts: leave out --online"),
        (["--step-wise"], "--step-wise is for games in play: add --online"),
        (["--online", "--groups-per-step", "0"], "--groups-per-step must be 1 or more, got 0"),
        (["--online", "--warm-start-steps", "-1"], "--warm-start-steps must be 0 or more, got -1"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags, text, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(flags)
    assert text in capsys.readouterr().err


def group(uid, rewards):
    return [Rollout(uid, f"{uid}?", "x" * i, reward) for i, reward in enumerate(rewards)]


def test_fields_are_what_the_schema_declares_group_by_group():
    data = rollout_data([group("a", [0.0, 1.0]), group("b", [2.0, 2.0])])
    DEFAULT_SCHEMA.validate(data)
    assert (data["total_lengths"], data["response_lengths"]) == ([4, 5, 4, 5], [1, 2, 1, 2])
    assert torch.cat(data["advantages"]).tolist() == pytest.approx([-1, 1, 1, 0, 0, 0], rel=1e-3)
    assert group_advantages([3.0]) == [0]
    assert rollout_data([]) == {key: [] for key in data}


@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 13))
def test_optimizer_steps_depend_on_prompts_alone(turns, num_ranks, groups_per_step):
    played = {f"u{i}": number for i, number in enumerate(turns)}
    everyone = list(played)
    found = []
    for rank in range(num_ranks):
        mine = share_of_rank(everyone, rank, num_ranks)
        assert len(everyone) // num_ranks <= len(mine) <= -(-len(everyone) // num_ranks)
        samples = [uid for uid in mine for _ in range(played[uid])]
        for number, step in enumerate(steps_of_rank(samples, everyone, groups_per_step)):
            found += [(number, samples[i]) for i in step]
        assert number == (len(everyone) - 1) // groups_per_step
    expected = [(i // groups_per_step, uid) for i, uid in enumerate(everyone)]
    assert sorted(found) == sorted(each for each in expected for _ in range(played[each[1]]))


# Ratios of 1.5 and 0.5: inside and outside the clip range, for both signs of the advantage.
LOG_RATIOS = [[0.0, 0.4054651, 0.4054651, -0.6931472], [0.4054651, -0.6931472]]
REFERENCE_GAPS = [[0.0, 0.5, 0.25, -0.5], [1.0, 0.0]]


def row_of(lengths, **fields):
    batch = {
        "tokens": [torch.arange(length + 2) for length in lengths],
        "total_lengths": [length + 2 for length in lengths],
        "response_lengths": lengths,
    }
    return pack(batch | fields, sample_indices=range(len(lengths)))


def test_the_loss_is_clipped_grpo_by_hand(monkeypatch):
    new = [(torch.tensor(ratios) - 2.0).requires_grad_() for ratios in LOG_RATIOS]
    gaps = [torch.tensor(gaps) for gaps in REFERENCE_GAPS]
    row = row_of(
        [4, 2],
        log_probs=[torch.full_like(each, -2.0) for each in gaps],
        ref_log_probs=[each.detach() + gap for each, gap in zip(new, gaps, strict=True)],
        advantages=[torch.full((4,), 2.0), torch.full((2,), -1.0)],
    )
    entropies = [torch.full_like(gap, float(len(gap))) for gap in gaps]
    monkeypatch.setattr(
        objective, "response_log_probs_and_entropy", lambda logits, row: (new, entropies)
    )
    objective_ = GRPOObjective(clip=0.2, kl_coefficient=0.1)
    share, metrics = objective_(torch.zeros(1), row, step_totals(row.fields)[0])
    # min(ratio A, clipped ratio A): advantage 2 at ratios 1, 1.5, 1.5, 0.5, and -1 at 1.5, 0.5.
    policy = -(2 * 1 + 2 * 1.2 + 2 * 1.2 + 2 * 0.5 - 1 * 1.5 - 1 * 0.8) / 6
    kl = float((torch.cat(gaps).exp() - torch.cat(gaps) - 1).sum()) / 6
    assert metrics["policy_loss"].item() == pytest.approx(policy, rel=1e-5)
    assert metrics["kl"].item() == pytest.approx(kl, rel=1e-5)
    assert share.item() == pytest.approx(policy + 0.1 * kl, rel=1e-5)
    assert metrics["clipped"].item() == pytest.approx(3 / 6)
    assert metrics["entropy"].item() == pytest.approx((4 * 4 + 2 * 2) / 6)
    metrics["policy_loss"].backward(retain_graph=True)
    # Clipped tokens have no gradient, the others -ratio times advantage over the tokens.
    assert new[0].grad.tolist() == pytest.approx([-2 / 6, 0, 0, -1 / 6], abs=1e-5)
    assert new[1].grad.tolist() == pytest.approx([1.5 / 6, 0], abs=1e-5)
    (slope,) = torch.autograd.grad(metrics["kl"], new[0])
    # Where the reference is more probable, the step raises the probability.
    assert torch.equal(slope.sign(), -gaps[0].sign())


def test_imitation_is_the_mean_over_the_players_tokens(monkeypatch):
    row = row_of([3, 1], loss_masks=[torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0])])
    log_probs = [torch.tensor([-1.0, -100.0, -2.0]), torch.tensor([-6.0])]
    monkeypatch.setattr(warm_start, "response_log_probs", lambda logits, row: log_probs)
    loss, _ = warm_start.imitation_loss(torch.zeros(1), row, step_totals(row.fields)[0])
    assert loss.item() == pytest.approx((1 + 2 + 6) / 3)
