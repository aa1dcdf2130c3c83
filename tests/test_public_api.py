"""Public names, signatures, fields and flags are a snapshot: changing one is a decision."""

from __future__ import annotations

import difflib

from public_api import COMMAND, SNAPSHOT, text


def test_public_faces_are_those_of_the_snapshot() -> None:
    wanted, now = SNAPSHOT.read_text(encoding="utf-8"), text()
    lines = difflib.unified_diff(wanted.split("\n"), now.split("\n"), SNAPSHOT.name, "now", n=0)
    assert wanted == now, f"run `{COMMAND}` and commit if it is meant:\n" + "\n".join(lines)
