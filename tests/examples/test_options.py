from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from options import BUNDLED_ROLLOUTS, layout_of, parse_arguments, settings_of
from training import baseline_arguments

from mcore_batching.megatron.arguments import planner_config
from mcore_batching.planning import Layout, pack_shard


def test_defaults_are_two_ranks_of_two_stages_on_four_processes():
    options = parse_arguments([])
    assert layout_of(options, 4) == Layout(data_parallel=2, pipeline_parallel=2)
    assert options.rollouts == BUNDLED_ROLLOUTS
    assert options.rollouts.exists()


def test_data_parallelism_is_what_the_other_sizes_leave_unless_given():
    options = parse_arguments(["--pp", "1", "--tp", "2", "--cp", "2"])
    assert layout_of(options, 8).data_parallel == 2
    assert layout_of(parse_arguments(["--dp", "3"]), 8).data_parallel == 3


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--iterations", "0"], "--iterations must be 1 or more, got 0"),
        (["--vpp", "3"], "cannot be cut into 6 equal model chunks"),
        (["--baseline", "--compare"], "not allowed with"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags, text, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(flags)
    assert text in capsys.readouterr().err


def test_settings_tell_runs_apart_but_not_the_baseline_from_its_dynamic_run():
    def settings(*flags):
        return settings_of(parse_arguments(list(flags)))

    assert settings("--baseline", "--out", "x") == settings("--compare") == settings()
    for flags in (["--lr", "1"], ["--seed", "5"], ["--max-tokens-per-gpu", "7"], ["--tp", "2"]):
        assert settings(*flags) != settings()
    assert settings("--rollouts", "x")["rollouts"] == str(Path("x").resolve())


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ([], {}),
        ([], {"context_parallel": 2}),
        ([], {"tensor_parallel": 2, "sequence_parallel": True, "context_parallel": 2}),
        (["--dynamic-batch-pad-total-to", "128"], {}),
        (["--dynamic-batch-pad-each-to", "16", "--dynamic-batch-pad-total-to", "24"], {}),
        (["--dynamic-batch-on-oversize", "error"], {}),
    ],
)
def test_the_baseline_puts_every_sample_into_a_micro_batch_of_its_own(flags, sizes):
    layout = Layout(**sizes)
    args = baseline_arguments(parse_arguments(flags), layout)
    lengths = [2, 2, 3, 4, 5, 8, 60, 64, 65, 300]
    bins = pack_shard(lengths, layout, planner_config(args))
    assert sorted(bins) == [[i] for i in range(len(lengths))]
