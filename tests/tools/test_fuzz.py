"""Hostile inputs by `fuzz`: each is refused in the package's words, or done right."""

from __future__ import annotations

import fuzz
import pytest


@pytest.mark.parametrize(
    "inputs", [300, pytest.param(3000, marks=[pytest.mark.long], id="3000-long")]
)
def test_hostile_inputs_are_refused_or_done_right(inputs: int) -> None:
    outcomes, faults = fuzz.faults(inputs, seed=inputs)
    assert not faults, "\n\n".join(faults)
    assert sum(outcomes.values()) == inputs
    for target in fuzz.TARGETS:
        # Otherwise nothing was put to the test.
        assert outcomes[f"{target.__name__} held"] > 0
        assert outcomes[f"{target.__name__} refused"] > 0 or target is fuzz.commands
