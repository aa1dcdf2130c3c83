"""Tables of refusals, REFUSALS.md beside the tests that read them."""

from __future__ import annotations

import builtins
import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def rows(test: str, *namespaces: ModuleType | dict[str, Any]) -> list[Any]:
    """Call, error and pattern of its text: each row of the table beside a test's file, or of its
    part under the file's name. The table's code sees these names."""
    dicts = (vars(each) if isinstance(each, ModuleType) else each for each in namespaces)
    # torch has a `range` of its own.
    names = {name: value for each in dicts for name, value in each.items()} | vars(builtins)
    found = []
    table = Path(test).with_name("REFUSALS.md").read_text(encoding="utf-8")
    own = table.partition(f"## {Path(test).stem}\n")[2].partition("\n## ")[0]
    for line in (own or table).splitlines():
        if not line.startswith("| `"):
            continue
        row = re.fullmatch(r"\| `(.+?)` \|(?: `(.+?)`)? \| (\w+) \| `(.+)` \|", line)
        assert row is not None, line
        code, each, error, text = row.groups()
        # Its variables, by name.
        for values in eval(f"[dict(locals()) {each or 'for _ in (0,)'}]", names, {}):
            pattern = text.format(**values) if each else text
            call = functools.partial(eval, code, names | values)
            found.append(pytest.param(call, eval(error, names), pattern, id=pattern))
    return found


def refusals(test: str, *namespaces: ModuleType | dict[str, Any]) -> Any:
    """A test of each row: the call raises the error, by a text that has the pattern."""

    @pytest.mark.parametrize(("call", "error", "text"), rows(test, *namespaces))
    def test_refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
        with pytest.raises(error, match=text):
            call()

    return test_refused
