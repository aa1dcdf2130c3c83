"""What the GRPO jobs are made of: recorded rollouts and the game in play, flags, ranks' shares,
losses, and what runs report."""

import dataclasses
import json
import runpy
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

import objective
import warm_start
from arithmetic_game import games
from batch_cases import pack
from batches import group_advantages, rollout_data, share_of_rank
from byte_tokens import BEGIN, END, encode, text_of
from comparison import compare
from game_conversations import ROLLOUTS, conversations
from metrics import IterationMetrics, StepMetrics, append, read
from number_chain import LARGEST, MAX_ROUNDS, NumberChain, new_game, scripted_answers
from objective import GRPOObjective
from online import steps_of_rank
from options import dims_of, parse_arguments
from reporting import iteration_line, run_table
from rollouts import Rollout, RolloutFileError, read_groups
from sampling import draw, uniform
from trajectories import Trajectory, samples_of, scripted_trajectory

from mcore_batching.batch import DEFAULT_SCHEMA
from mcore_batching.batch.loss import step_totals
from mcore_batching.planning import ParallelDims
from mcore_batching.rl import compute_advantages

GOOD = {"uid": "a", "prompt": "1+1=", "response": "2", "reward": 1}
QUESTION = {"question": "1+1?", "ground_truth": "2"}


def test_bundled_files_are_what_the_scripts_write():
    made = {
        "arithmetic_rollouts.jsonl": list(games(128, 4, seed=7)),
        "arithmetic_conversations.jsonl": [{"messages": each} for each in conversations(ROLLOUTS)],
    }
    for name, rows in made.items():
        lines = ROLLOUTS.with_name(name).read_text().splitlines()
        assert [json.loads(line) for line in lines] == rows


def test_the_first_picture_shows_what_the_readme_says(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    examples, picture = ROLLOUTS.parents[1], tmp_path / "step.png"
    script = str(examples / "figures" / "step_figure.py")
    monkeypatch.setattr(sys, "argv", [script, "--out", str(picture)])
    made = runpy.run_path(script, run_name="__main__")
    assert picture.stat().st_size > 10_000
    theirs, ours = (made["end_of"](made["planned"](balance)) for balance in ("tokens", "auto"))
    saving = f"ends at 100, planned at {100 * ours / theirs:.0f}]"
    assert saving in (examples.parent / "README.md").read_text()


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ("{", r"not JSON"),
        ("[1]", r"expected a JSON object, got list"),
        ({k: v for k, v in GOOD.items() if k != "reward"}, r"lacks 'reward' \(float or int"),
        (GOOD | {"response": None}, r"'response' must be str, got None"),
        (GOOD | {"uid": True}, r"'uid' must be str or int, got True"),
        ('{"uid": "a", "prompt": "", "response": "", "reward": NaN}', r"'reward' must be finite"),
        (GOOD | {"environment_spans": [[0, 2]]}, r"inside the response of 1 characters"),
        (GOOD | {"environment_spans": [[1, 1], [0, 1]]}, r"ascending pairs"),
        (QUESTION, r"at least one model's"),
        (QUESTION | {"m": {"solution": "x", "is_correct": 1}}, r"'is_correct' must be bool, got 1"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, row, text):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{row if isinstance(row, str) else json.dumps(row)}")
    with pytest.raises(RolloutFileError, match=text) as caught:
        read_groups(path)
    assert str(caught.value).startswith(f"{path}:2: ")


text = st.text(st.characters(codec="utf-8"), max_size=20)


@given(prompt=text, response=text, ends=st.lists(st.integers(0, 20), max_size=6))
def test_tokens_are_the_texts_bytes_and_the_mask_leaves_out_the_environments(
    prompt, response, ends
):
    ends = sorted(min(end, len(response)) for end in ends)
    spans = tuple(zip(ends[::2], ends[1::2], strict=False))
    sample = encode(Rollout("u", prompt, response, 0.0, spans))
    assert (sample.tokens[0], sample.tokens[-1]) == (BEGIN, END)
    assert text_of(sample.tokens[1:-1].tolist()) == prompt + response
    assert sample.response_length == len(sample.loss_mask) == len(response.encode()) + 1
    written = [i for start, end in spans for i in range(start, end)]
    of_the_policy = "".join(c for i, c in enumerate(response) if i not in written)
    kept = sample.tokens[-sample.response_length : -1][sample.loss_mask[:-1] != 0]
    assert bytes(kept.tolist()) == of_the_policy.encode()


@pytest.mark.parametrize(
    ("spans", "mask"), [((), [1, 1, 1]), (((0, 1),), [0, 1, 1]), (((1, 2),), [1, 0, 0])]
)
def test_the_end_mark_is_trained_unless_the_environment_had_the_last_word(spans, mask):
    assert encode(Rollout("u", "", "ab", 0.0, spans)).loss_mask.tolist() == mask


GAME = NumberChain(7, (1, -1, 1))


def test_a_name_is_one_game_whatever_the_process_and_games_vary():
    # Written down: hash seeds differ between processes.
    assert new_game("1234/0/5") == NumberChain(4, (1, -1, 1, -1, -1))
    games = [new_game(str(i)) for i in range(300)]
    assert {len(game.changes) for game in games} == set(range(1, MAX_ROUNDS + 1))
    assert {game.start for game in games} == set(range(LARGEST + 1))


@pytest.mark.parametrize("answer", ["9\n", "8", "8 \n", "08\n", "", "\n", "\ufffd8\n"])
def test_anything_but_the_right_line_loses(answer):
    assert GAME.reply(["8\n"]) == "-1="
    assert GAME.reply(["8\n", answer]) is None
    assert GAME.reward(["8\n", answer]) == pytest.approx(1 / 3)


@given(st.text(max_size=8), st.floats(0, 1))
def test_the_scripted_player_plays_to_the_end_and_not_beyond(name, slip):
    game = new_game(name)
    answers = scripted_answers(game, name, slip)
    assert game.reply(answers) is None
    assert all(game.reply(answers[:i]) is not None for i in range(1, len(answers)))
    assert all(0 <= int(answer) <= LARGEST for answer in answers)
    assert game.reward(scripted_answers(game, name, 0.0)) == 1.0
    assert len(scripted_answers(game, name, 1.0)) == 1
    with pytest.raises(ValueError, match="is over"):
        scripted_trajectory(name, 0, slip).play(ord("8"), 0.0)


def test_samples_are_as_the_module_shows_them():
    game = NumberChain(7, (1, -1))
    trajectory = Trajectory("u", 0, game, [BEGIN, *game.opening().encode()])
    for token in b"8\n7\n":
        trajectory.play(token, -0.5)
    whole = samples_of([trajectory], step_wise=False)
    assert text_of(whole["tokens"][0][1:].tolist()) == "7+1=8\n-1=7\n"
    assert whole["loss_masks"][0].tolist() == [1, 1, 0, 0, 0, 1, 1]
    assert whole["rollout_log_probs"][0].tolist() == [-0.5, -0.5, 0, 0, 0, -0.5, -0.5]
    turns = samples_of([trajectory], step_wise=True)
    assert (turns["total_lengths"], turns["response_lengths"]) == ([7, 12], [2, 2])
    assert (turns["round_number"], turns["rewards"]) == ([0, 1], [1.0, 1.0])
    none = samples_of([], step_wise=True)
    assert none == {key: [] for key in turns}
    for samples in (whole, turns, none):
        DEFAULT_SCHEMA.validate(samples)


def trained(games, step_wise):
    """Every trained token with its game, history, advantage and log-probability as drawn."""
    samples = samples_of(games, step_wise=step_wise)
    advantages = compute_advantages(samples, "grpo", step_wise=step_wise)
    found = []
    for i, tokens in enumerate(samples["tokens"]):
        prompt = len(tokens) - samples["response_lengths"][i]
        for at in samples["loss_masks"][i].nonzero()[:, 0].tolist():
            history = tuple(tokens[: prompt + at + 1].tolist())
            game = samples["uids"][i], samples["trajectory_ids"][i]
            log_prob = samples["rollout_log_probs"][i][at].item()
            found.append((game, history, advantages[i][at].item(), log_prob))
    return sorted(found)


@given(st.integers(0, 10**6), st.floats(0, 0.6))
def test_turns_and_whole_games_train_the_same_tokens(seed, slip):
    games = [scripted_trajectory(f"{seed}/{i}", number, slip) for i in (0, 1) for number in (0, 1)]
    for i, game in enumerate(games):
        game.log_probs = [-0.25 * (i + j) for j in range(len(game.log_probs))]
    whole = trained(games, step_wise=False)
    assert trained(games, step_wise=True) == whole
    assert len(whole) == sum(len(turn) for game in games for turn in game.turns)


def test_a_token_is_the_first_whose_share_of_the_probability_holds_its_number():
    logits = torch.tensor([0.5, 0.25, 0.25]).log().expand(5, 3)
    tokens, log_probs = draw(logits, [0.0, 0.49, 0.51, 0.76, 1 - 2.0**-53])
    assert tokens.tolist() == [0, 0, 1, 2, 2]
    assert log_probs.exp().tolist() == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.25])
    numbers = [uniform(f"{game}/{place}") for game in "ab" for place in range(200)]
    assert len(set(numbers)) == 400
    assert 0.45 < sum(numbers) / 400 < 0.55


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
    return pack(batch | fields)


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


STEP = dict.fromkeys(
    ("policy_loss", "kl", "clipped", "entropy", "grad_norm", "learning_rate"), 0.1 + 0.2
)
ITERATION = dict.fromkeys(("reward", "fill", "padding", "rank_balance", "plan_seconds"), 0.25)


def iteration(number, losses, seconds):
    steps = (StepMetrics(loss=loss, seconds=seconds, num_microbatches=3, **STEP) for loss in losses)
    return IterationMetrics(
        iteration=number,
        steps=tuple(steps),
        forward_only_seconds=seconds / 2,
        **dict.fromkeys(("samples", "tokens", "num_microbatches", "placeholders"), 8),
        **ITERATION,
    )


DYNAMIC = [iteration(0, [0.5, 1 / 4], 9.0), iteration(1, [0.125, -1.0], 1.0)]
BASELINE = [iteration(0, [0.5, 1 / 4], 3.0), iteration(1, [0.1875, -1.0], 2.5)]


def test_metrics_are_read_back_to_the_last_bit(tmp_path):
    for each in DYNAMIC:
        append(tmp_path / "metrics.jsonl", each)
    assert read(tmp_path / "metrics.jsonl", IterationMetrics) == DYNAMIC


def test_lines_and_table_show_how_full_micro_batches_are():
    (line, _), table = map(iteration_line, DYNAMIC), str(run_table(DYNAMIC))
    assert "  loss +0.37500  " in line
    assert "  fill 25.0% (2 full ones would end the steps later)  " in line
    assert ("-0.03125" in table, " 25.0% " in table) == (True, True)
    baseline = [dataclasses.replace(each, fill=1e-8) for each in BASELINE]
    assert "  fill no cap (one sample each)  " in iteration_line(baseline[0])
    assert " no cap " in str(run_table(baseline))


def test_comparison_leaves_the_warm_up_out_of_times_but_not_of_losses():
    result = compare(DYNAMIC, BASELINE)
    assert (result.largest_loss_difference, result.largest_loss) == (0.0625, 1.0)
    assert (result.median_step_seconds, result.step_ratio) == ((1.0, 2.5), 2.5)
    assert "largest difference in loss over 4 optimizer steps: 6.2e-02" in str(result)
    assert compare(DYNAMIC[:1], BASELINE[:1]).step_ratio == pytest.approx(1 / 3)
    for other in ([BASELINE[0], dataclasses.replace(BASELINE[1], samples=7)], BASELINE[:1]):
        with pytest.raises(ValueError, match="run both with the same settings"):
            compare(DYNAMIC, other)
