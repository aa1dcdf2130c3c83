"""Frameworks that tests import."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import frameworks
import pytest


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Makes small packages of frameworks' names importable until the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *names: stack.enter_context(frameworks.small(tmp_path, *names))


@pytest.fixture
def own() -> Iterator[Callable[[str], Path]]:
    """Makes a framework's own modules importable until the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda name: stack.enter_context(frameworks.own(name))
