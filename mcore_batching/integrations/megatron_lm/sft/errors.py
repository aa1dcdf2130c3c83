"""Errors of supervised fine-tuning data."""

from __future__ import annotations

from mcore_batching.planning.errors import MCoreBatchingError


class SftDataError(MCoreBatchingError, ValueError):
    """Data that cannot be trained on.

    Attributes: `problem`, the message without its place; `path` of the file and its `line`, counted
    from 1, each None if no single one is at fault.
    """

    def __init__(self, problem: str, path: str | None = None, line: int | None = None) -> None:
        where = ":".join(str(part) for part in (path, line) if part is not None)
        super().__init__(f"{where}: {problem}" if where else problem)
        self.problem = problem
        self.path = path
        self.line = line


class SftRecordError(MCoreBatchingError, ValueError):
    """A JSON value that is no record of supervised fine-tuning data."""


class TokenizationError(MCoreBatchingError, ValueError):
    """A sample that the tokenizer, or its chat template, cannot write."""
