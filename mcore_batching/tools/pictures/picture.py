"""Pictures as files: .png, .svg, or .html, a page that shows a line of text under the pointer.

A page is one file that loads nothing else. matplotlib is imported only to write a picture.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_batching.planning import MCoreBatchingError
from mcore_batching.tools.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".html")

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>mcore_batching: one step</title>
<style>
body {{ margin: 1em; font-family: sans-serif; }}
svg {{ width: 100%; height: auto; }}
g[id]:has(> title):hover path {{ stroke: #000; stroke-width: 1.5; }}
</style>
</head>
<body>
{picture}
</body>
</html>
"""


class PlotError(MCoreBatchingError, ValueError):
    """A picture that cannot be drawn as asked."""


def check_picture(path: str | Path) -> None:
    """Check, before long work, that a picture of this name could be drawn.

    Raises:
        PlotError: an ending that is none of `FORMATS`, or no matplotlib.
    """
    if Path(path).suffix not in FORMATS:
        raise PlotError(f"expected a name that ends in {', '.join(FORMATS)}, got {path}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlotError("drawing needs matplotlib; pip install 'mcore_batching[plot]'") from None


def save_figure(
    figure: Figure, path: str | Path, tooltips: Mapping[str, str] | None = None
) -> None:
    """Write a figure to a file of one of `FORMATS`; the same figure gives the same text.

    Args:
        figure: what to write.
        path: where to.
        tooltips: line of text for each artist of the figure, by its `gid`; pages alone show them.

    Raises:
        PlotError: the file cannot be written.
    """
    path = Path(path)
    try:
        # In memory first: a figure that fails half-way leaves the old file as it was.
        if path.suffix == ".html":
            write_whole(path, picture_page(_as_svg(figure), tooltips or {}))
        elif path.suffix == ".svg":
            write_whole(path, _as_svg(figure))
        else:
            image = io.BytesIO()
            figure.savefig(image, format="png", dpi=150)
            write_whole(path, image.getvalue())
    except OSError as error:
        raise PlotError(f"cannot write {path}: {error}; name a writable file") from error


def picture_page(svg: str, tooltips: Mapping[str, str]) -> str:
    """SVG inside HTML.

    Args:
        svg: an SVG document.
        tooltips: text by the id of the group that it belongs to; unknown ids are left out.
    """
    picture = svg[svg.index("<svg") :]  # HTML takes no XML declaration

    # A group's <title> is what browsers show under the pointer; matplotlib writes none.
    def with_title(match: re.Match[str]) -> str:
        text = tooltips.get(match[1])
        return match[0] if text is None else f"{match[0]}<title>{escape(text)}</title>"

    return _PAGE.format(picture=re.sub(r'<g id="([^"]*)">', with_title, picture))


def _as_svg(figure: Figure) -> str:
    import matplotlib

    text = io.StringIO()
    # No date and no random ids: the same figure gives the same text.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mcore_batching"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
