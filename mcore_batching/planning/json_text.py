"""JSON from files that strangers may have written: bounded in length, hence in memory.

As Python values a document takes up to 40 times its length in bytes.
"""

from __future__ import annotations

import json
from typing import Any

MAX_JSON_CHARACTERS = 2**25
"""Of a document, or of a line of JSON lines: a plan of three million samples, 1.3 GB at worst."""


def parse_json(text: str) -> Any:
    """The value that a text holds; a byte order mark before it is left out.

    Raises:
        ValueError: the text is longer than `MAX_JSON_CHARACTERS`, or is not JSON, or is nested
            deeper than Python can follow.
    """
    if len(text) > MAX_JSON_CHARACTERS:
        raise ValueError(f"it is longer than the {MAX_JSON_CHARACTERS} characters that are read")
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except RecursionError as error:
        raise ValueError(str(error)) from None
