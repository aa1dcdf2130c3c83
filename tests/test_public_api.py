"""Public names, signatures, fields and flags are a snapshot: changing one is a decision."""

from __future__ import annotations

import difflib

import pytest
from public_api import COMMAND, SNAPSHOT, read, sections

WANTED, NOW = read(), sections()


@pytest.mark.parametrize("title", sorted({*WANTED, *NOW}))
def test_public_faces_are_those_of_the_snapshot(title: str) -> None:
    wanted, now = (each.get(title, "").splitlines() for each in (WANTED, NOW))
    text = "\n".join(difflib.unified_diff(wanted, now, SNAPSHOT.name, "now", lineterm="", n=0))
    assert not text, f"{title} has changed; if it is meant, run `{COMMAND}` and commit:\n{text}"
