"""The JSON form of plans, and its digest.

    {"format": "mcore-batching/plan", "version": 1, "layout": {...}, "config": {...},
     "scope": "global", "num_samples": n, "digest": "...",
     "steps": [{"num_microbatches": k, "ranks": [[[3, 17], [5], []], ...]}]}

Optional keys:

- `sample_indices` of a step: the samples of one step out of a batch;
- `context_parallel` of a step, under dynamic CP alone: the context-parallel size of each rank's
  micro-batches [ranks][num_microbatches]; "ranks" then lists data- and context-parallel ranks;
- `trees` of a step: samples that are computed together, each tree as its samples and the places at
  which its nodes start and end `[[samples], [start, end, start, end, ...]]`;
- `lengths_digest`: SHA-256 of the lengths, by which `check` compares them with others; not covered
  by `digest`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar

from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.errors import PlanFormatError, PlanningError
from mcore_batching.planning.files import parse_json_dict
from mcore_batching.planning.integers import as_integer, check_lengths
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.prefix_trees import PrefixTree

FORMAT = "mcore-batching/plan"
VERSION = 1

_Settings = TypeVar("_Settings", ParallelDims, PlannerConfig)


NEWER_OPTIONS = {
    "waits_for_sends",
    "plan_effort",
    "max_samples_per_row",
    "max_context_parallel",
}
"""Added since version 1 of the format. Left out at their defaults: old plans keep their digests."""


def options_of(settings: ParallelDims | PlannerConfig) -> dict[str, Any]:
    """The "layout" or the "config" of a document."""
    defaults = {option.name: option.default for option in fields(settings)}
    return {
        name: value
        for name, value in asdict(settings).items()
        if name not in NEWER_OPTIONS or value != defaults[name]
    }


def digest(document: dict[str, Any]) -> str:
    """SHA-256 in hex of a document without its digest."""
    # Python prints a float in the fewest digits that give it back: everywhere the same.
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def dump(document: dict[str, Any], beside: Mapping[str, str] | None = None) -> str:
    """A document as text; `beside` is written into it, and no part of its digest."""
    # Steps last: what a person looks for stands before megabytes of indices.
    head = {key: value for key, value in document.items() if key != "steps"} | dict(beside or {})
    return json.dumps({**head, "digest": digest(document), "steps": document["steps"]})


def check_digest(recorded: str | None, found: str) -> None:
    """A `PlanFormatError` if the digest that a document carries is not its content's, or it has
    none."""
    if recorded is None:
        raise PlanFormatError(
            f'the plan has no "digest"; add "digest": "{found}", or pass verify_digest=False'
        )
    if recorded != found:
        raise PlanFormatError(
            f"the digest is {recorded:.80}, the content's {found}; plan again, or pass "
            "verify_digest=False"
        )


def load(text: str) -> dict[str, Any]:
    """The parts of a document, as `read` gives them."""
    return read(parse_json_dict(text, "a plan in JSON", PlanFormatError))


def read(raw: Any) -> dict[str, Any]:
    """The parts of a document that was parsed, checked: "num_samples", the digests, and for each of
    its "steps" the fields of a `StepPlan`; `sample_indices` is None where it is left out."""
    _json(raw, dict, "a plan")
    if raw.get("format") != FORMAT:
        raise PlanFormatError(
            f'expected "format": "{FORMAT}", got {raw.get("format")!r:.80}; pass a plan\'s file'
        )
    # True equals 1 in Python, and JSON's `true` is no version.
    if raw.get("version") != VERSION or isinstance(raw.get("version"), bool):
        raise PlanFormatError(
            f'expected plan "version" {VERSION}, got {raw.get("version")!r:.80}; plan again'
        )
    scope = raw.get("scope", "global")
    if scope not in ("global", "local"):
        raise PlanFormatError(f'"scope" must be "global" or "local", got {scope!r:.80}')
    steps = _json(raw.get("steps"), list, '"steps"')
    if not steps:
        raise PlanFormatError('"steps" must hold at least one step, got an empty list')
    for index, step in enumerate(steps):
        if isinstance(step, dict) and "split_backward" in step:
            raise PlanFormatError(
                f'step {index} has "split_backward", passes that are no longer split; plan again'
            )
    for key in ("digest", "lengths_digest"):
        if not isinstance(raw.get(key), str | None):
            raise PlanFormatError(f'"{key}" must be a string, got {raw[key]!r:.80}')
    # Values are checked for their kind alone: a broken plan can be read, and `validate_plan` names
    # what is wrong with it.
    of_all = {
        "config": _settings(PlannerConfig, _json(raw.get("config"), dict, '"config"'), "config"),
        "dims": _settings(ParallelDims, _json(raw.get("layout"), dict, '"layout"'), "layout"),
        "scope": scope,
    }
    return {
        "num_samples": _count(raw.get("num_samples"), '"num_samples"'),
        "digest": raw.get("digest"),
        "lengths_digest": raw.get("lengths_digest"),
        "steps": [_read_step(step, index, of_all) for index, step in enumerate(steps)],
    }


def lengths_digest(lengths: Sequence[int]) -> str:
    """SHA-256 of lengths [samples], in hex."""
    return hashlib.sha256(",".join(map(str, check_lengths(lengths))).encode("ascii")).hexdigest()


def _read_step(raw: Any, index: int, of_all: dict[str, Any]) -> dict[str, Any]:
    where = f"step {index}"
    _json(raw, dict, where)
    samples = raw.get("sample_indices")
    ranks = tuple(
        tuple(
            _indices(micro_batch, f"{where}, rank {rank}, slot {slot}")
            for slot, micro_batch in enumerate(_json(micro_batches, list, f"{where}, rank {rank}"))
        )
        for rank, micro_batches in enumerate(_json(raw.get("ranks"), list, '"ranks"'))
    )
    is_dynamic = of_all["config"].max_context_parallel is not None
    return of_all | {
        "num_microbatches": _count(raw.get("num_microbatches"), f'"num_microbatches" of {where}'),
        "micro_batches": ranks,
        "context_parallel": _read_sizes(raw.get("context_parallel"), ranks, where, is_dynamic),
        "sample_indices": (
            None if samples is None else _indices(samples, f'{where}, "sample_indices"')
        ),
        "trees": tuple(
            _read_tree(tree, f'{where}, "trees" {number}')
            for number, tree in enumerate(_json(raw.get("trees", []), list, f'{where}, "trees"'))
        ),
    }


def _read_tree(raw: Any, where: str) -> PrefixTree:
    if len(_json(raw, list, where)) != 2:
        raise PlanFormatError(f"{where} must hold samples and places of nodes, got {raw!r:.80}")
    samples, places = (_indices(each, where) for each in raw)
    if not samples or len(places) % 2:
        raise PlanFormatError(
            f"{where} must have samples, and a start and an end for each node, got {raw!r:.80}"
        )
    return PrefixTree(samples, tuple(zip(places[::2], places[1::2], strict=True)))


def _read_sizes(
    raw: Any, ranks: Sequence[Sequence[Sequence[int]]], where: str, is_dynamic: bool
) -> tuple[tuple[int, ...], ...] | None:
    """The context-parallel size of each micro-batch of "ranks"; None without dynamic CP."""
    what = f'"context_parallel" of {where}'
    if (raw is not None) != is_dynamic:
        raise PlanFormatError(
            f'{what} and "max_context_parallel" of "config" need each other; add or leave out both'
        )
    if raw is None:
        return None
    # One for each micro-batch, and none of 0: readers divide by them before a plan is validated.
    sizes = tuple(
        tuple(_count(size, f"a size of {what}, rank {rank}") for size in _json(of_rank, list, what))
        for rank, of_rank in enumerate(_json(raw, list, what))
    )
    if list(map(len, sizes)) != list(map(len, ranks)) or 0 in {s for of in sizes for s in of}:
        raise PlanFormatError(
            f'{what} must hold a size of 1 or more for each micro-batch of "ranks", got {raw!r:.80}'
        )
    return sizes


def _settings(kind: type[_Settings], raw: dict[str, Any], what: str) -> _Settings:
    known = {option.name for option in fields(kind)}
    unknown = sorted(set(raw) - known)
    if unknown:
        raise PlanFormatError(
            f'unknown keys in "{what}": {", ".join(unknown):.200}; expected '
            f"{', '.join(sorted(known))}"
        )
    # An option that this release lacks may change what the plan means: refused above.
    try:
        return kind(**raw)  # options that are left out have their defaults
    except (PlanningError, TypeError) as error:
        raise PlanFormatError(f'"{what}" is not valid: {error}') from None


def _json(value: Any, kind: type, what: str) -> Any:
    """`value`, which must be a list or a dict."""
    if not isinstance(value, kind):
        name = "object" if kind is dict else "array"
        raise PlanFormatError(f"{what} must be a JSON {name}, got {value!r:.80}")
    return value


def _count(value: Any, what: str) -> int:
    number = as_integer(value)
    if number is None or number < 0:
        raise PlanFormatError(f"{what} must be an integer of 0 or more, got {value!r:.80}")
    return number


def _indices(raw: Any, where: str) -> tuple[int, ...]:
    return tuple(_count(sample, f"a sample index at {where}") for sample in _json(raw, list, where))
