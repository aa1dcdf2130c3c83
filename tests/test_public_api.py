"""Public names, signatures, fields and flags are a snapshot: changing one is a decision."""

from __future__ import annotations

import difflib

import pytest
from public_api import COMMAND, PLANNER_ALONE, SNAPSHOT, read, sections

WANTED = read()


def needed_by(title: str) -> str | None:
    if title.startswith(("mcore_batching.batch", "mcore_batching.rl")):
        return "torch"
    alone = title in PLANNER_ALONE or title.startswith("mcore_batching.tools.")
    return None if alone or title == "flags of mcore-batching" else "megatron.core"


@pytest.mark.parametrize("title", sorted(WANTED.keys() | sections().keys()))
def test_public_faces_are_those_of_the_snapshot(title: str) -> None:
    needed = needed_by(title)
    if needed:
        pytest.importorskip(needed)
    make = sections().get(title, list)
    changes = difflib.unified_diff(
        WANTED.get(title, []), make(), SNAPSHOT.name, "now", lineterm="", n=0
    )
    text = "\n".join(changes)
    assert not text, f"{title} has changed; if it is meant, run `{COMMAND}` and commit:\n{text}"
