"""Pictures of a step, and the files that they are written to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from planning_cases import Case, cases, examples
from planning_cases import planned as plan_of

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    StepPlan,
    WeighedStep,
    plan_step,
    predicted_step_time,
)
from mcore_batching.planning.clock import Clock
from mcore_batching.planning.schedule import Schedule
from mcore_batching.tools import picture
from mcore_batching.tools.cli import main
from mcore_batching.tools.options import UsageError
from mcore_batching.tools.picture import (
    MOST_ROWS,
    check_picture,
    draw_step,
    step_figure,
    step_passes,
)

pytest.importorskip("matplotlib", reason="pictures need matplotlib")

from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

LENGTHS = [30, 20, 40, 10, 50]
CONFIG = PlannerConfig(max_tokens_per_gpu=60, balance="cost")
COSTS = CostModel(linear=1, quadratic=0, per_micro_batch=0)


def planned(lengths: list[int], **sizes: int) -> StepPlan:
    return plan_step(lengths, ParallelDims(**sizes), CONFIG, COSTS)


def boxes(figure: Figure) -> dict[str, Any]:
    """Rectangles of passes by rank, stage, chunk, slot and kind."""
    return {
        str(patch.get_gid()).removeprefix("pass-"): patch
        for axes in figure.axes
        for patch in axes.patches
        if isinstance(patch, Rectangle) and str(patch.get_gid()).startswith("pass-")
    }


@given(case=cases(dynamic=True))
@examples(100)
def test_the_last_pass_ends_at_the_predicted_step_time(case: Case) -> None:
    """And ranks that share a row begin it together."""
    step, dims = plan_of(case), case.dims
    passes = step_passes(step, case.lengths)
    last = max(timed.end for own in passes for timed in own)
    assert last == pytest.approx(predicted_step_time(step, case.lengths), rel=1e-12)
    ranks = WeighedStep.of(step, case.lengths).ranks
    for own, slots in zip(passes, ranks, strict=True):
        chunks = dims.pipeline_parallel * dims.virtual_pipeline
        assert len(own) == 2 * step.num_microbatches * chunks
        if step.context_parallel is None and not dims.in_lockstep:
            costs = [step.cost_model.micro_batch([case.lengths[i] for i in row]) for row in slots]
            assert own == Clock(costs, Schedule(dims=dims)).operations()
    for row in step.rows() if step.context_parallel is not None else ():
        together = passes[row.rank : row.rank + row.size]
        assert len({tuple(p.start for p in own if p.slot == row.slot) for own in together}) == 1


def test_with_expert_parallelism_ranks_wait_within_the_slot() -> None:
    lengths = [80, 20]
    step = planned(lengths, data_parallel=2, pipeline_parallel=2, expert_parallel=2)
    slow, fast = ([(p.start, p.end) for p in own] for own in step_passes(step, lengths))
    assert slow == [(0, 80), (320, 480), (80, 160), (160, 320)]
    assert fast == [(0, 20), (320, 360), (80, 100), (160, 200)]
    figure = step_figure(step, lengths)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert [text for text in texts if text.endswith("busy")] == ["50% busy", "12% busy"]
    assert "stages work 31% of it" in figure.texts[0].get_text()


def test_a_step_that_costs_nothing_has_a_picture() -> None:
    free = CostModel(linear=0, quadratic=0, per_micro_batch=0)
    figure = step_figure(plan_step([5], ParallelDims(), CONFIG, free), [5])
    assert "stages work 0% of it" in figure.texts[0].get_text()


def test_every_pass_of_a_small_step_has_its_box() -> None:
    step = planned(LENGTHS, data_parallel=2, pipeline_parallel=2)
    figure = step_figure(step, LENGTHS)
    drawn = boxes(figure)
    count = step.num_microbatches
    assert len(drawn) == 2 * 2 * 2 * count
    first = drawn["0-0-0-0-F"]
    cost = sum(LENGTHS[i] for i in step.micro_batches[0][0])
    assert (first.get_x(), first.get_width()) == (0, cost)
    backward = drawn["0-1-0-0-B"]
    assert (backward.get_x(), backward.get_width()) == (2 * cost, 2 * cost)
    assert to_hex(first.get_facecolor()) != to_hex(backward.get_facecolor())
    latest = max(box.get_x() + box.get_width() for box in drawn.values())
    assert latest <= figure.axes[0].get_xlim()[1] <= 1.01 * latest
    # Stages of a rank lie below each other, ranks below that.
    tops = [drawn[name].get_y() for name in ("0-0-0-0-F", "0-1-0-0-F", "1-0-0-0-F")]
    assert tops[0] + 1 == pytest.approx(tops[1])
    assert tops[0] + first.get_height() < tops[1]
    assert tops[1] + 1 < tops[2]


def test_placeholders_are_hatched_and_chunks_have_shades_and_names() -> None:
    step = planned([30], data_parallel=2, pipeline_parallel=2)
    figure = step_figure(step, [30])
    hatched = {name for name, box in boxes(figure).items() if box.get_hatch()}
    empty = step.micro_batches.index(((),))
    assert hatched == {f"{empty}-{stage}-0-0-{kind}" for stage in (0, 1) for kind in "FB"}
    # The other rank's micro-batch alone has its number, in each of its passes.
    assert [text.get_text() for text in figure.axes[0].texts].count("0") == 4
    step = planned(LENGTHS, pipeline_parallel=2, virtual_pipeline=2)
    figure = step_figure(step, LENGTHS)
    drawn = boxes(figure)
    passes = [f"0-0-{chunk}-0-{kind}" for chunk in (0, 1) for kind in "FB"]
    assert len({to_hex(drawn[name].get_facecolor()) for name in passes}) == 4
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "forward, odd chunk" in labels


def test_shared_rows_are_framed_and_the_legend_covers_no_title() -> None:
    dims = ParallelDims(data_parallel=8, pipeline_parallel=4, virtual_pipeline=2)
    config = PlannerConfig(max_tokens_per_gpu=4096, max_context_parallel=4, plan_effort=10)
    lengths = [*range(100, 4000, 150), 9000]
    step = plan_step(lengths, dims, config)
    figure = step_figure(step, lengths)
    framed = {
        tuple(name.split("-")[::3])
        for name, box in boxes(figure).items()
        if box.get_linewidth() == 1
    }
    assert framed == {
        (str(rank), str(row.slot))
        for row in step.rows()
        for rank in range(row.rank, row.rank + row.size)
        if row.size > 1 and row.samples
    }
    assert framed
    assert "ranks share a row" in [text.get_text() for text in figure.legends[0].get_texts()]
    figure.canvas.draw()
    (legend,), title = figure.legends, figure.texts[0]
    assert title.get_text().startswith("DP8 x PP4 x VPP2, dynamic CP to 4")
    assert not legend.get_window_extent().overlaps(title.get_window_extent())
    for axes in figure.axes:
        assert not legend.get_window_extent().overlaps(axes.get_tightbbox())


def test_a_large_step_shows_three_ranks() -> None:
    lengths = [10 + i % 37 for i in range(200)]
    for ranks, shown in ((MOST_ROWS // 2, MOST_ROWS // 2), (MOST_ROWS, 3)):
        step = planned(lengths, data_parallel=ranks, pipeline_parallel=2)
        figure = step_figure(step, lengths)
        assert len({name.split("-")[0] for name in boxes(figure)}) == shown
    ends = [max(timed.end for timed in own) for own in step_passes(step, lengths)]
    by_end = sorted(range(MOST_ROWS), key=ends.__getitem__, reverse=True)
    labels = [text.get_text() for text in figure.axes[0].texts if "rank" in text.get_text()]
    extremes = ("slowest", 0), ("median", MOST_ROWS // 2), ("fastest", -1)
    assert labels == [f"{name}\nrank {by_end[place]}" for name, place in extremes]


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = planned(LENGTHS, data_parallel=2, pipeline_parallel=2)
    for name in ("a.png", "a.svg"):
        draw_step(step, LENGTHS, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    text = (tmp_path / "a.svg").read_text()
    draw_step(step, LENGTHS, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == text
    # The command draws the first step.
    lengths, out = tmp_path / "lengths.txt", tmp_path / "b.svg"
    lengths.write_text("\n".join(map(str, LENGTHS)))
    words = f"plan {lengths} --max-tokens-per-gpu 60 --dp 2 --samples-per-step 3 --plot {out}"
    assert main(words.split()) == 0
    assert capsys.readouterr().out.endswith(f"wrote {out}\n")
    assert "DP2, cap 60 tokens" in out.read_text()


def test_no_backend_is_chosen_for_the_caller() -> None:
    assert "pyplot" not in Path(picture.__file__).read_text()


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'mcore_batching\[plot\]'"):
        check_picture("a.png")
