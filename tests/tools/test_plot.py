"""Pictures of a step, and the files that they are written to."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
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
    PASSES,
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


SHARES = PlannerConfig(max_tokens_per_gpu=60, max_context_parallel=4, plan_effort=3)


@given(case=cases(dynamic=True))
@example(
    Case(
        [40] * 6 + [110, 110, 200], ParallelDims(data_parallel=4, pipeline_parallel=2), SHARES, None
    )
)
@examples(100)
def test_every_pass_has_its_box_and_the_last_one_ends_at_the_predicted_step_time(
    case: Case,
) -> None:
    """Ranks that share a row begin it together; placeholders are hatched and have no number."""
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
    if len(passes) * dims.pipeline_parallel > MOST_ROWS or sum(map(len, passes)) > 300:
        return  # ranks are left out, or it takes seconds
    figure = step_figure(step, case.lengths)
    drawn, rows, numbers = boxes(figure), {}, Counter[str]()
    for rank, timed in ((rank, timed) for rank, own in enumerate(passes) for timed in own):
        box = drawn.pop(f"{rank}-{timed.stage}-{timed.chunk}-{timed.slot}-{timed.kind}")
        assert (box.get_x(), box.get_width()) == (timed.start, timed.end - timed.start)
        rows[rank, timed.stage] = box.get_y()
        is_placeholder = not step.micro_batches[rank][timed.slot]
        assert bool(box.get_hatch()) == is_placeholder
        is_shared = step.context_parallel is not None and step.row_size(rank, timed.slot) > 1
        assert (box.get_linewidth() == 1) == is_shared
        if not is_placeholder:
            assert to_hex(box.get_facecolor()) == PASSES[timed.kind][1][timed.chunk % 2]
            numbers[str(timed.slot)] += box.get_width() > last / 150  # as wide as two digits
    assert drawn == {}
    (axes,) = figure.axes
    assert Counter(t.get_text() for t in axes.texts if t.get_text().isdigit()) == +numbers
    assert last <= axes.get_xlim()[1] <= 1.01 * last
    # Stages of a rank lie below each other, ranks below that.
    by_place = [rows[place] for place in sorted(rows)]
    for upper, (place, lower) in zip(by_place, [*sorted(rows.items())][1:], strict=False):
        assert lower - upper == pytest.approx(1.8 if place[1] == 0 else 1)


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


def test_the_legend_names_what_is_drawn_and_covers_no_title() -> None:
    dims = ParallelDims(data_parallel=8, pipeline_parallel=4, virtual_pipeline=2)
    config = PlannerConfig(max_tokens_per_gpu=4096, max_context_parallel=4, plan_effort=10)
    lengths = [*range(100, 4000, 150), 9000]
    figure = step_figure(plan_step(lengths, dims, config), lengths)
    (legend,), title = figure.legends, figure.texts[0]
    labels = [text.get_text() for text in legend.get_texts()]
    assert {"forward, odd chunk", "ranks share a row"} <= {*labels}
    assert len({to_hex(patch.get_facecolor()) for patch in legend.get_patches()[:4]}) == 4
    figure.canvas.draw()
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
