"""Pictures of a step, and the files that they are written to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, StepPlan, plan_step
from mcore_batching.tools.cli import main
from mcore_batching.tools.picture import (
    MOST_ROWS,
    PlotError,
    check_picture,
    draw_step,
    step_figure,
)

pytest.importorskip("matplotlib", reason="pictures need matplotlib")

from kit.patience import patience
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
    texts = [text.get_text().partition("\n")[0] for text in figure.axes[0].texts]
    assert {"slowest", "median", "fastest"} <= set(texts)


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


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotError, match=r"pip install 'mcore_batching\[plot\]'"):
        check_picture("a.png")


def test_no_backend_is_chosen_for_the_caller() -> None:
    code = (
        "import sys\nfrom mcore_batching.tools.picture import step_figure\n"
        "from mcore_batching.planning import *\n"
        "step_figure(plan_step([5], ParallelDims(), PlannerConfig(max_tokens_per_gpu=9)), [5])\n"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=True,
    )
    assert finished.stdout == "False\n"
