"""The two pictures of a run: micro-batches over ranks and time, and the comparison."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from comparison import Comparison
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from timeline import Span

FORWARD, BACKWARD = "#4c8fca", "#e39a45"
STYLES: tuple[dict[str, Any], dict[str, Any]] = (
    {"label": "dynamic micro-batches", "color": "#2b6cb0", "linewidth": 2.2},
    {
        "label": "baseline: one sample per micro-batch",
        "color": "#c05621",
        "linewidth": 1,
        "linestyle": "--",
        "marker": "o",
        "markersize": 4,
        "markerfacecolor": "none",
    },
)
MIN_LABELLED_SHARE = 0.014
"""Narrower boxes, as a share of the picture's width, carry no number."""


def draw_micro_batches(spans: Sequence[Span], cap_tokens: int, title: str, out: Path) -> None:
    """One row per data-parallel rank and stage, one box per pass, as measured.

    Boxes carry the number of their slot; the deeper the colour, the fuller the micro-batch;
    placeholders are hatched.

    Args:
        spans: of one optimizer step, from all ranks.
        cap_tokens: most tokens of a micro-batch.
        title: printed above.
        out: PNG file.
    """
    rows = sorted({(span.data_parallel_rank, span.pipeline_rank) for span in spans})
    whole = 1e3 * max(span.end_seconds for span in spans)
    lettered = any(span.chunk for span in spans)
    figure, axes = plt.subplots(figsize=(11, 1.7 + 0.55 * len(rows)), layout="constrained")
    for span in spans:
        row = rows.index((span.data_parallel_rank, span.pipeline_rank))
        _draw_span(axes, span, row, whole, lettered, cap_tokens)
    axes.set_xlim(0, whole)
    axes.set_ylim(len(rows), 0)
    axes.set_yticks(
        [row + 0.5 for row in range(len(rows))],
        [f"data {data}, stage {stage}" for data, stage in rows],
    )
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("milliseconds since the first micro-batch began")
    meaning = "slot, letter: model chunk" if lettered else "slot"
    axes.set_title(f"{title} (number: {meaning})", loc="left", fontsize=10)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    handles = _legend(cap_tokens, any(not span.tokens for span in spans))
    figure.legend(handles=handles, loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    save(figure, out)


def _draw_span(axes: Axes, span: Span, row: int, whole: float, lettered: bool, cap: int) -> None:
    start = 1e3 * span.start_seconds
    width = 1e3 * span.end_seconds - start
    axes.add_patch(
        Rectangle(
            (start, row + 0.12),
            width,
            0.76,
            facecolor=_colour(span, cap),
            edgecolor="white" if span.tokens else "0.4",
            linewidth=0.6,
            hatch=None if span.tokens else "//////",
        )
    )
    if width > MIN_LABELLED_SHARE * whole:
        axes.text(
            start + width / 2,
            row + 0.5,
            f"{span.slot}{string.ascii_lowercase[span.chunk] if lettered else ''}",
            ha="center",
            va="center",
            fontsize=8,
            # Readable over the hatching of a placeholder.
            bbox=None if span.tokens else {"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )


def _colour(span: Span, cap_tokens: int) -> tuple[float, ...]:
    """The pass's colour, paler the emptier its micro-batch."""
    if not span.tokens:
        return to_rgb("white")
    depth = 0.25 + 0.75 * min(span.tokens / cap_tokens, 1.0)
    return tuple(1 - depth * (1 - part) for part in to_rgb(BACKWARD if span.backward else FORWARD))


def _legend(cap_tokens: int, has_placeholders: bool) -> list[Patch]:
    patches = [
        Patch(facecolor=FORWARD, label=f"forward of a full micro-batch ({cap_tokens} tokens)"),
        Patch(facecolor=BACKWARD, label="backward; paler: less full"),
    ]
    if has_placeholders:
        patches.append(
            Patch(facecolor="white", edgecolor="0.4", hatch="//////", label="placeholder")
        )
    return patches


def draw_comparison(comparison: Comparison, out: Path) -> None:
    """Loss curves, their difference, and step times of the dynamic run and the baseline.

    Args:
        comparison: of the two runs.
        out: PNG file.
    """
    figure, (losses, differences, seconds) = plt.subplots(
        1, 3, figsize=(13, 3.8), layout="constrained"
    )
    steps = range(1, len(comparison.losses[0]) + 1)
    for values, style in zip(comparison.losses, STYLES, strict=True):
        losses.plot(steps, values, **style)
    _set_title(losses, "loss")
    gaps = [abs(a - b) for a, b in zip(*comparison.losses, strict=True)]
    differences.plot(steps, gaps, color="0.3", marker=".", linewidth=1)
    differences.set_yscale("symlog", linthresh=1e-9)
    differences.set_ylim(0, max(*gaps, 1e-9) * 10)
    _set_title(differences, f"|difference| in loss, at most {max(gaps):.1e}")
    for values, style in zip(comparison.step_seconds, STYLES, strict=True):
        seconds.plot(steps, values, **style)
    seconds.set_ylim(0)
    _set_title(seconds, f"seconds per step, ratio of medians {comparison.step_ratio:.2f}")
    for axes in (losses, differences, seconds):
        axes.set_xlabel("optimizer step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = losses.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    save(figure, out)


def _set_title(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)


def save(figure: Figure, out: Path) -> None:
    """Write a figure, in a folder that need not exist, and free it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)
    plt.close(figure)
