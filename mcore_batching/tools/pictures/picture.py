"""Pictures as files: .png, or .svg, where a browser shows a line of text under the pointer.

matplotlib is imported only to write a picture.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_batching.planning import MCoreBatchingError
from mcore_batching.planning.plans.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")


class PlotError(MCoreBatchingError, ValueError):
    """A picture that cannot be drawn as asked."""


def check_picture(path: str | Path) -> None:
    """Check, before long work, that a picture of this name could be drawn, by matplotlib."""
    if Path(path).suffix not in FORMATS:
        raise PlotError(f"expected a name that ends in {' or '.join(FORMATS)}, got {path}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlotError("drawing needs matplotlib; pip install 'mcore_batching[plot]'") from None


def save_figure(figure: Figure, path: str | Path, tooltips: Mapping[str, str]) -> None:
    """Write a figure to a file of one of `FORMATS`, with a line of text for artists by `gid`."""
    import matplotlib

    ending = Path(path).suffix[1:]
    # No date and no random ids: the same figure gives the same text.
    metadata = {"Date": None} if ending == "svg" else None
    picture = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mcore_batching"}):
        figure.savefig(picture, format=ending, dpi=150, metadata=metadata)
    content = picture.getvalue()
    if ending == "svg":
        content = with_titles(content.decode(), tooltips).encode()
    try:
        write_whole(path, content)
    except OSError as error:
        raise PlotError(f"cannot write {path}: {error.strerror}; name another file") from error


def with_titles(svg: str, tooltips: Mapping[str, str]) -> str:
    """An SVG document whose groups have the text of their id as title, which browsers show under
    the pointer; matplotlib writes none."""

    def titled(match: re.Match[str]) -> str:
        text = tooltips.get(match[1])
        return match[0] if text is None else f"{match[0]}<title>{escape(text)}</title>"

    return re.sub(r'<g id="([^"]*)">', titled, svg)
