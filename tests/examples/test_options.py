from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from options import BUNDLED_ROLLOUTS, dims_of, parse_arguments, settings_of
from training import baseline_arguments

from mcore_batching.planning import ParallelDims


def test_defaults_are_two_ranks_of_two_stages_on_four_processes():
    options = parse_arguments([])
    assert dims_of(options, 4) == ParallelDims(data_parallel=2, pipeline_parallel=2)
    assert options.rollouts == BUNDLED_ROLLOUTS
    assert options.rollouts.exists()


def test_data_parallelism_is_what_the_other_sizes_leave_unless_given():
    options = parse_arguments(["--pp", "1", "--tp", "2", "--cp", "2"])
    assert dims_of(options, 8).data_parallel == 2
    assert dims_of(parse_arguments(["--dp", "3"]), 8).data_parallel == 3


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--iterations", "0"], "--iterations must be 1 or more, got 0"),
        (["--vpp", "3"], "cannot be cut into 6 equal model chunks"),
        (["--baseline", "--compare"], "not allowed with"),
        (["--online", "--compare"], "--compare is for recorded rollouts: leave out --online"),
        (["--online", "--global-batch-size", "8"], "--global-batch-size is for recorded rollouts"),
        (["--step-wise"], "--step-wise is for games in play: add --online"),
        (["--groups-per-step", "4"], "--groups-per-step is for games in play: add --online"),
        (["--online", "--groups-per-step", "0"], "--groups-per-step must be 1 or more, got 0"),
        (["--online", "--warm-start-steps", "-1"], "--warm-start-steps must be 0 or more, got -1"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags, text, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(flags)
    assert text in capsys.readouterr().err


def test_play_has_defaults_of_its_own_which_flags_override():
    recorded, online = parse_arguments([]), parse_arguments(["--online"])
    assert (recorded.hidden_size, recorded.iterations) == (128, 6)
    assert (online.hidden_size, online.iterations, online.max_tokens_per_gpu) == (64, 40, 512)
    given = parse_arguments(["--iterations", "3", "--online", "--max-tokens-per-gpu", "99"])
    assert (given.iterations, given.max_tokens_per_gpu, given.lr) == (3, 99, online.lr)


def test_settings_tell_runs_apart_but_not_the_baseline_from_its_dynamic_run():
    def settings(*flags):
        return settings_of(parse_arguments(list(flags)))

    assert settings("--baseline", "--out", "x") == settings("--compare") == settings()
    for flags in (["--lr", "1"], ["--seed", "5"], ["--max-tokens-per-gpu", "7"], ["--tp", "2"]):
        assert settings(*flags) != settings()
    assert settings("--rollouts", "x")["rollouts"] == str(Path("x").resolve())


def test_the_baseline_turns_the_flag_off_and_changes_nothing_else():
    options = parse_arguments(["--max-tokens-per-gpu", "64"])
    before = vars(options).copy()
    args = baseline_arguments(options)
    assert vars(options) == before
    assert vars(args) == before | {"use_dynamic_batch_size": False, "micro_batch_size": 1}
    assert before["use_dynamic_batch_size"] is True
