"""The public faces of the package as text: names, signatures, fields and flags.

python tests/public_api.py      # writes tests/public_api.txt
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
SNAPSHOT = Path(__file__).with_suffix(".txt")
COMMAND = f"python tests/{Path(__file__).name}"
PLANNER_ALONE = ("mcore_batching", "mcore_batching.planning", "mcore_batching.tools")
"""Faces that neither torch nor megatron is needed for, with what lies below them."""


def faces() -> list[str]:
    """Every package whose ``__init__`` has an ``__all__``."""
    files = (REPOSITORY / "mcore_batching").rglob("__init__.py")
    return sorted(
        ".".join(path.parent.relative_to(REPOSITORY).parts)
        for path in files
        if "__all__ = " in path.read_text(encoding="utf-8")
    )


def sections() -> dict[str, Callable[[], list[str]]]:
    """Title to what makes the lines below it."""
    named = {name: lambda name=name: face(importlib.import_module(name)) for name in faces()}
    return named | {
        "flags of mcore-batching": command_flags,
        "flags of add_dynamic_batch_arguments": library_flags,
    }


def face(module: ModuleType) -> list[str]:
    """The public names of a package, those first that are another's."""
    lines: list[str] = []
    root = importlib.import_module("mcore_batching.planning")
    again = [
        name
        for name in sorted(module.__all__)
        if module is not root
        and name in root.__all__
        and getattr(module, name) is getattr(root, name)
    ]
    if again:
        lines += ["from mcore_batching.planning:", *(f"    {name}" for name in again)]
    for name in sorted(set(module.__all__) - set(again)):
        lines += describe(name, getattr(module, name))
    return lines


def describe(name: str, value: Any) -> Iterator[str]:
    """A function's signature, a class's members, a constant's keys, a schema's declarations."""
    if inspect.isclass(value):
        yield from describe_class(name, value)
    elif inspect.isroutine(value):
        yield f"def {name}{signature(value)}"
    elif isinstance(value, str):
        yield f"{name}: str"
    elif hasattr(value, "declare"):
        yield f"{name}: {type(value).__name__}"
        for field in value.values():
            declared = field.declaration.partition('", ')[2].rstrip(")")
            yield f"    {field.name}: {declared}{', required' * field.required}"
    elif isinstance(value, dict | tuple) or hasattr(value, "keys"):
        yield f"{name}: {type(value).__name__}"
        yield from (f"    {getattr(key, 'name', key)}" for key in value)
    else:
        yield f"{name}: {type(value).__name__}"


def describe_class(name: str, kind: type) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in kind.__bases__ if base is not object)
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    manner = ", keyword only" if fields and all(each.kw_only for each in fields) else ""
    if fields and kind.__dataclass_params__.frozen:
        manner = f", frozen{manner}"
    yield f"class {name}" + (f"({bases})" if bases else "") + manner
    if issubclass(kind, enum.Enum):
        yield from (f"    {member.name}" for member in kind)
        return
    for each in fields:
        if not each.name.startswith("_"):
            yield f"    {each.name}: {annotation(each.type)}{default_of(each)}"
    if not fields and "__init__" in vars(kind):
        yield f"    def __init__{signature(kind.__init__)}"
    known = {each.name for each in fields}
    for member, value in sorted(vars(kind).items()):
        if member in known or (member.startswith("_") and member != "__call__"):
            continue
        if isinstance(value, property):
            yield f"    {member}: {annotation(value.fget.__annotations__['return'])} [property]"
        elif isinstance(value, classmethod | staticmethod):
            yield f"    def {member}{signature(value.__func__)} [{type(value).__name__}]"
        elif inspect.isfunction(value):
            yield f"    def {member}{signature(value)}"
        else:
            yield f"    {member}"


def default_of(each: dataclasses.Field[Any]) -> str:
    if each.default is not dataclasses.MISSING:
        return f" = {default(each.default)}"
    return "" if each.default_factory is dataclasses.MISSING else " = ..."


def signature(function: Callable[..., Any]) -> str:
    """Arguments as the source has them; ``str`` of a signature differs between Pythons."""
    parts: list[str] = []
    has_star = False
    found = inspect.signature(function)
    for each in found.parameters.values():
        if each.kind is each.VAR_POSITIONAL:
            has_star = True
        elif each.kind is each.KEYWORD_ONLY and not has_star:
            has_star = True
            parts.append("*")
        text = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "") + each.name
        if each.annotation is not each.empty:
            text += f": {annotation(each.annotation)}"
        if each.default is not each.empty:
            text += f" = {default(each.default)}"
        parts.append(text)
    returned = found.return_annotation
    after = "" if returned is found.empty else f" -> {annotation(returned)}"
    return f"({', '.join(parts)}){after}"


def annotation(value: Any) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", str(value))


def default(value: Any) -> str:
    """A default value; of a schema the name, since its own text lists all fields."""
    if isinstance(value, bool | int | float | str | tuple | None):
        return repr(value)
    kind = type(value).__name__
    return {"Schema": "DEFAULT_SCHEMA", "dtype": str(value)}.get(kind, f"<{kind}>")


def command_flags() -> list[str]:
    from mcore_batching.tools.cli import build_parser

    parser = build_parser()
    lines = list(flags(parser))
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                lines += [f"{name}:", *(f"    {line}" for line in flags(command))]
    return lines


def library_flags() -> list[str]:
    from mcore_batching.megatron import add_dynamic_batch_arguments

    return list(flags(add_dynamic_batch_arguments(argparse.ArgumentParser())))


def flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Each argument with its type, choices and default, in the parser's order."""
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        if action.help == argparse.SUPPRESS:  # a removed flag, which is refused
            continue
        parts = [" ".join(action.option_strings) or action.dest]
        if action.nargs != 0:
            kind = getattr(action.type, "__name__", "str")
            choices = "|".join(map(str, action.choices or ()))
            parts.append(choices or kind)
            parts += [] if action.nargs is None else [f"nargs={action.nargs}"]
        if action.required:
            parts.append("required")
        elif action.default not in (None, False, argparse.SUPPRESS):
            parts.append(f"= {action.default}")
        yield " ".join(parts)


def read() -> dict[str, list[str]]:
    """The snapshot's sections."""
    found: dict[str, list[str]] = {}
    for line in SNAPSHOT.read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            found[line[3:]] = []
        elif line:
            found[list(found)[-1]].append(line)
    return found


def main() -> None:
    """Write the snapshot; needs torch and megatron-core."""
    sys.path.insert(0, str(REPOSITORY))
    text = "\n".join("\n".join([f"== {title}", *make(), ""]) for title, make in sections().items())
    SNAPSHOT.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
