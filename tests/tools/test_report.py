"""Tables and lines of text for people."""

from __future__ import annotations

import io

from mcore_batching.planning import ParallelDims, PlannerConfig, plan_batch, step_statistics
from mcore_batching.tools import report

TABLE = report.Table(
    columns=("name", "n"), rows=(("a", "1"), ("longer", "20")), total=("total", "21")
)


def test_plain_text_is_aligned() -> None:
    assert report.format_plain(TABLE) == (
        "  name   n\n----------\n     a   1\nlonger  20\n----------\n total  21"
    )
    without_total = report.Table(columns=("n",), rows=(("1",),))
    assert report.format_plain(without_total) == "n\n-\n1"


def test_a_table_is_printed_with_its_last_line_ended() -> None:
    file = io.StringIO()
    report.print_table(TABLE, file)
    assert file.getvalue() == report.format_plain(TABLE) + "\n"


def test_many_steps_are_cut_in_the_middle_and_totalled_in_full() -> None:
    lengths = [index % 9 + 1 for index in range(100)]
    plan = plan_batch(
        lengths,
        ParallelDims(data_parallel=2),
        PlannerConfig(max_tokens_per_gpu=10),
        samples_per_step=4,
    )
    statistics = [step_statistics(step, lengths) for step in plan.steps]
    table = report.step_table(statistics)
    assert [row[0] for row in table.rows] == [*"01234567", "…", *map(str, range(17, 25))]
    assert table.rows[8][1] == "(9 steps)"
    assert table.total is not None
    assert table.total[:3] == ("total", "100", str(sum(s.num_microbatches for s in statistics)))
    assert table.total[3] == f"{sum(lengths) / sum(s.offered_tokens for s in statistics):.1%}"
    whole = report.step_table(statistics[:16])
    assert [row[0] for row in whole.rows] == [str(index) for index in range(16)]


def test_packing_of_all_steps_is_held_against_the_fewest_micro_batches() -> None:
    lengths = [6, 6, 6, 6, 30, 1, 9, 2]
    plan = plan_batch(
        lengths,
        ParallelDims(data_parallel=2, pipeline_parallel=2),
        PlannerConfig(max_tokens_per_gpu=10, balance="tokens"),
        samples_per_step=4,
    )
    # Four over half a bin; then an oversize one, and 12 tokens.
    assert report.packing_line(plan, lengths) == (
        "8 micro-batches with samples in all steps, 1.143 x the 7 that no packing takes fewer than"
    )


def test_heading_names_what_is_more_than_one() -> None:
    dims = ParallelDims(
        data_parallel=2, pipeline_parallel=4, tensor_parallel=2, sequence_parallel=True
    )
    plan = plan_batch([3], dims, PlannerConfig(max_tokens_per_gpu=10))
    assert report.plan_heading(plan) == (
        "1 sample in 1 step, DP2 x PP4 x TP2 with sequence parallel, cap 10 tokens"
    )
