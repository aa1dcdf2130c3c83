"""Tables and lines of text for people."""

from __future__ import annotations

from mcore_batching.planning import ParallelDims, PlannerConfig, plan_batch, step_statistics
from mcore_batching.tools import report


def test_plain_text_is_aligned() -> None:
    rows = (("a", "1"), ("longer", "20"))
    table = report.Table(columns=("name", "n"), rows=rows, total=("total", "21"))
    assert str(table) == ("  name   n\n----------\n     a   1\nlonger  20\n----------\n total  21")
    assert str(report.Table(columns=("n",), rows=(("1",),))) == "n\n-\n1"


def test_many_steps_are_cut_in_the_middle_and_totalled_in_full() -> None:
    lengths = [index % 9 + 1 for index in range(100)]
    dims, config = ParallelDims(data_parallel=2), PlannerConfig(max_tokens_per_gpu=10)
    plan = plan_batch(lengths, dims, config, samples_per_step=4)
    statistics = [step_statistics(step, lengths) for step in plan.steps]
    table = report.step_table(statistics)
    assert [row[0] for row in table.rows] == [*"01234567", "…", *map(str, range(17, 25))]
    assert table.rows[8][1] == "(9 steps)"
    assert table.total is not None
    assert table.total[:3] == ("total", "100", str(sum(s.num_microbatches for s in statistics)))
    assert table.total[3] == f"{sum(lengths) / sum(s.offered_tokens for s in statistics):.1%}"
    whole = report.step_table(statistics[:16])
    assert [row[0] for row in whole.rows] == [str(index) for index in range(16)]


def test_a_heading_has_the_sizes_above_1() -> None:
    dims = ParallelDims(data_parallel=2, pipeline_parallel=2, tensor_parallel=2)
    config = PlannerConfig(max_tokens_per_gpu=10, balance="tokens")
    plan = plan_batch([6, 6, 6, 6, 30, 1, 9, 2], dims, config, samples_per_step=4)
    assert report.plan_heading(plan) == "8 samples in 2 steps, DP2 x PP2 x TP2, cap 10 tokens"
