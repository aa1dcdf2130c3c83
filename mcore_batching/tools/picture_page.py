"""A picture as a web page: SVG inside HTML, a line of text for what the pointer is on.

Guarantees: one file that loads nothing else; drawing and text are escaped as XML asks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape

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


def picture_page(svg: str, tooltips: Mapping[str, str]) -> str:
    """The page.

    Args:
        svg: an SVG document.
        tooltips: text by the id of the group that it belongs to; ids that the document does not
            have are left out.
    """
    picture = svg[svg.index("<svg") :]

    def with_title(match: re.Match[str]) -> str:
        text = tooltips.get(match[1])
        return match[0] if text is None else f"{match[0]}<title>{escape(text)}</title>"

    return _PAGE.format(picture=re.sub(r'<g id="([^"]*)">', with_title, picture))
