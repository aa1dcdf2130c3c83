"""The public faces of the package as text, read from its source: stubs of names, and flags.

python tests/public_api.py      # writes tests/public_api.txt
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SNAPSHOT = Path(__file__).with_suffix(".txt")
COMMAND = f"python tests/{Path(__file__).name}"
NO_BODY: list[ast.stmt] = [ast.Expr(ast.Constant(...))]


def text() -> str:
    """Sections of every package whose ``__init__`` has an ``__all__``, and of the flags."""
    made = ""
    for path in sorted((REPOSITORY / "mcore_batching").rglob("__init__.py")):
        source = path.read_text(encoding="utf-8")
        if "\n__all__ = " in source:
            face = ".".join(path.parent.relative_to(REPOSITORY).parts)
            (exported,) = definitions("__all__", ast.parse(source))
            assert isinstance(exported, ast.Assign)
            names = ast.literal_eval(exported.value)
            made += "\n".join([f"== {face}", *(stub(name, face) for name in sorted(names)), "\n"])
    return made + "\n".join(["== flags", *all_flags(), ""])


def definitions(name: str, tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements that define or import a name, those of the module itself first."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined = [node.name]
        elif isinstance(node, ast.ImportFrom):
            defined = [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined = [ast.unparse(target) for target in targets]
        else:
            continue
        if name in defined:
            yield node


def stub(name: str, module: str) -> str:
    """The statement that defines a name, without the bodies of functions and private members."""
    path = REPOSITORY / module.replace(".", "/")
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8")
    node = next(definitions(name, ast.parse(text)))
    if isinstance(node, ast.ImportFrom):
        (own,) = (alias.name for alias in node.names if name in (alias.asname, alias.name))
        if node.module == "mcore_batching.planning":  # most of the root's names
            return f"from {node.module} import {own}"
        return stub(own, str(node.module)).replace(own, name, 1)
    if isinstance(node, ast.ClassDef):
        node.body = [each for each in map(member, node.body) if each] or NO_BODY
    elif isinstance(node, ast.FunctionDef):
        node.body = NO_BODY
    else:  # a constant, and those that it is made of
        used = [
            each.id for each in ast.walk(node) if isinstance(each, ast.Name) and each.id != name
        ]
        parts = [stub(each, module) for each in used if each.startswith("_")]
        return "\n".join([*parts, ast.get_source_segment(text, node) or ""])
    lines = ast.unparse(node).splitlines()
    return "\n".join(line.removesuffix(":") for line in lines if line.strip() not in ("...", ""))


def member(node: ast.stmt) -> ast.stmt | None:
    """A public field or method of a class."""
    if isinstance(node, ast.FunctionDef):
        node.body, name = NO_BODY, node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
    else:
        return None
    return None if name.startswith("_") and name not in ("__init__", "__call__") else node


def all_flags() -> Iterator[str]:
    """Those of the command line, and of training jobs."""
    from mcore_batching.flags import add_dynamic_batch_arguments
    from mcore_batching.tools.cli import build_parser

    parser = build_parser()
    yield from flags("mcore-batching", parser)
    (commands,) = parser._subparsers._group_actions
    for name, command in commands.choices.items():
        yield from flags(f"mcore-batching {name}", command)
    jobs = add_dynamic_batch_arguments(argparse.ArgumentParser())
    yield from flags("add_dynamic_batch_arguments", jobs)


def flags(title: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Each argument with its type, choices and default, in the parser's order."""
    yield f"{title}:"
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        if action.help == argparse.SUPPRESS:  # a removed flag, which is refused
            continue
        parts = ["   ", *(action.option_strings or [action.dest])]
        if action.nargs != 0:
            kind = getattr(action.type, "__name__", "str")
            parts.append("|".join(map(str, action.choices or ())) or kind)
        if action.required:
            parts.append("required")
        elif action.default not in (None, False, argparse.SUPPRESS):
            parts.append(f"= {action.default}")
        yield " ".join(parts)


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    SNAPSHOT.write_text(text(), encoding="utf-8", newline="\n")
