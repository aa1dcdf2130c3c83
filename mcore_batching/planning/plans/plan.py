"""Plans of a step and of a batch, as frozen data, and their JSON form.

    {"format": "mcore-batching/plan", "version": 1, "layout": {...}, "config": {...},
     "scope": "global", "num_samples": n, "digest": "...",
     "steps": [{"num_microbatches": k, "ranks": [[[3, 17], [5], []], ...]}]}

Optional keys:

- `context_parallel` of a step, under dynamic CP alone: the context-parallel size of each rank's
  micro-batches [ranks][num_microbatches]; "ranks" then lists data- and context-parallel ranks;
- `trees` of a step: samples that are computed together, each tree as its samples and the places at
  which its nodes start and end `[[samples], [start, end, start, end, ...]]`;
- `lengths_digest`: SHA-256 of the lengths, by which `check` compares them with others; not covered
  by `digest`.

Functions elsewhere check plans (`validation`), measure them (`statistics`), explain and draw them
(`tools`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.costs.cost import CostModel
from mcore_batching.planning.errors import LengthError, PlanFormatError, PlanningError, shortened
from mcore_batching.planning.files import parse_json_dict
from mcore_batching.planning.forest import PrefixTree
from mcore_batching.planning.integers import as_integer, check_lengths
from mcore_batching.planning.parallel_dims import ParallelDims

FORMAT = "mcore-batching/plan"
VERSION = 1
NEWER_OPTIONS = {"waits_for_sends", "plan_effort", "max_samples_per_row", "max_context_parallel"}
"""Added since version 1 of the format. Left out at their defaults: old plans keep their digests."""

_Settings = TypeVar("_Settings", ParallelDims, PlannerConfig)

Scope = Literal["global", "local"]
MicroBatches = tuple[tuple[int, ...], ...]
"""One rank's micro-batches in slot order: sample indices each, `()` for a placeholder."""
Sizes = tuple[tuple[int, ...], ...]
"""Context-parallel size of each micro-batch [ranks][num_microbatches]."""

MOST_SHOWN = 16
"""Entries of a list that `str(plan)` prints: a plan of 1024 ranks would fill the screen."""


class Row(NamedTuple):
    """One micro-batch of a step."""

    rank: int
    """The rank that has it; the first of those that share it."""
    slot: int
    """Its place in the rank's order."""
    size: int
    """Context-parallel size."""
    samples: tuple[int, ...]
    """`()` for a placeholder."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The samples of one optimizer step by rank and micro-batch, in the order in which they run.

    A plan that was read from a file may be broken: check it by `validate_plan`.
    """

    micro_batches: tuple[MicroBatches, ...]
    """`micro_batches[rank][slot]` is a tuple of sample indices; `()` is a placeholder. Ranks are
    data-parallel; under dynamic CP data- and context-parallel, context-parallel fastest, and ranks
    that share a row list the same samples."""
    num_microbatches: int
    """Micro-batches per rank."""
    sample_indices: tuple[int, ...]
    """The samples this step must cover, ascending: positions in the batch's lengths."""
    dims: ParallelDims
    """Sizes of the parallel groups it was made for."""
    config: PlannerConfig
    """The options it was made with."""
    context_parallel: Sizes | None = None
    """Context-parallel size of each micro-batch [ranks][num_microbatches]; None without dynamic CP.
    Ranks 4 to 7 share a row of size 4 of rank 6."""
    scope: Scope = "global"
    """"global": samples may go to any rank; "local": each stays on the rank that held it."""
    cost_model: CostModel = field(default_factory=CostModel, compare=False)
    """The costs it was made by; in neither the digest nor the JSON."""
    forward_only: bool = field(default=False, compare=False)
    """Made for forward passes alone; in neither the digest nor the JSON."""
    trees: tuple[PrefixTree, ...] = ()
    """Samples that are computed together; each tree is in one micro-batch. Further samples are
    computed by themselves."""

    @property
    def num_samples(self) -> int:
        """Samples this step must cover."""
        return len(self.sample_indices)

    @cached_property
    def _tree_of(self) -> dict[int, PrefixTree]:
        return {sample: tree for tree in self.trees for sample in tree.samples}

    def units(self, samples: Sequence[int]) -> list[int | PrefixTree]:
        """Trees and samples that are computed for some samples, whole micro-batches of them."""
        if not self.trees:  # nearly all plans, row by row
            return [*samples]
        # A tree stands where its first sample does.
        found = ((sample, self._tree_of.get(sample)) for sample in samples)
        return [
            sample if tree is None else tree
            for sample, tree in found
            if tree is None or tree.samples[0] == sample
        ]

    def row_size(self, rank: int, slot: int) -> int:
        """Context-parallel size of a micro-batch."""
        if self.context_parallel is None:
            return self.dims.context_parallel
        return self.context_parallel[rank][slot]

    def rows(self) -> Iterator[Row]:
        """Every micro-batch once, rank after rank; a shared one at its first rank."""
        for rank, micro_batches in enumerate(self.micro_batches):
            for slot, samples in enumerate(micro_batches):
                size = self.row_size(rank, slot)
                # A row of size 4 begins at a rank that 4 divides: the others only repeat it.
                if self.context_parallel is None or rank % size == 0:
                    yield Row(rank, slot, size, samples)

    def digest(self) -> str:
        """SHA-256 of the plan's content, in hex."""
        document = _document_of([self], self.num_samples)
        # Only of one step out of a batch: a whole batch is numbered from 0.
        if self.sample_indices != tuple(range(self.num_samples)):
            document["steps"][0]["sample_indices"] = list(self.sample_indices)
        return _digest(document)

    def __str__(self) -> str:
        """The plan for people: a line per rank, `[3 17] []`, under dynamic CP `[3 17]×2 []`; long
        ones cut short."""
        lines = [
            f"StepPlan: {counted(self.num_samples, 'sample')} on "
            f"{counted(len(self.micro_batches), rank_noun(self))}, "
            f"{self.num_microbatches} micro-batches per rank, {self.scope} scope, digest "
            f"{self.digest()[:12]}"
        ]
        for rank, rows in enumerate(self.micro_batches[:MOST_SHOWN]):
            sizes = self.context_parallel[rank] if self.context_parallel else [1] * len(rows)
            slots = [
                f"[{shortened(samples, MOST_SHOWN, ' ')}]{f'×{size}' if size > 1 else ''}"
                # Not strict: a broken plan is printed, too.
                for samples, size in zip(rows, sizes, strict=False)
            ]
            lines.append(f"  rank {rank}: {shortened(slots, MOST_SHOWN, ' ')}")
        return "\n".join(lines + left_out(len(self.micro_batches), "ranks"))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The steps of one batch, in order. Sample indices are positions in the batch's lengths."""

    steps: tuple[StepPlan, ...]
    """One or more, all of one `ParallelDims`, configuration and scope."""
    num_samples: int
    """Samples of the batch; the steps must cover 0 to `num_samples - 1`."""

    def __post_init__(self) -> None:
        """Check that the steps belong together."""
        if not self.steps:
            raise LengthError("a plan needs one step or more; pass steps=(step, ...)")
        first = self.steps[0]  # the JSON form has these once for all steps
        for index, step in enumerate(self.steps):
            if (step.dims, step.config, step.scope) != (first.dims, first.config, first.scope):
                raise LengthError(
                    f"step {index} has other dims, config or scope; make a plan for each",
                    index=index,
                )

    @property
    def dims(self) -> ParallelDims:
        """Sizes of the parallel groups it was made for."""
        return self.steps[0].dims

    @property
    def config(self) -> PlannerConfig:
        """The options it was made with."""
        return self.steps[0].config

    def digest(self) -> str:
        """SHA-256 of the plan's content, in hex; of one step, that of the step."""
        return _digest(_document_of(self.steps, self.num_samples))

    def to_json(self, lengths: Sequence[int] | None = None) -> str:
        """The plan as a `mcore-batching/plan` document.

        Args:
            lengths: total length of each sample of the batch [samples], in tokens; their digest is
                written as well.
        """
        document = _document_of(self.steps, self.num_samples)
        written = document | {"digest": _digest(document)}
        if lengths is not None:
            written["lengths_digest"] = lengths_digest(lengths)
        # Steps last: what a person looks for stands before megabytes of indices.
        written["steps"] = written.pop("steps")
        return json.dumps(written)

    @classmethod
    def from_json(cls, text: str, *, verify_digest: bool = True) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            PlanFormatError: not a plan, another version, or (unless `verify_digest` is False) a
                digest that does not match.
        """
        document = parse_json_dict(text, "a plan in JSON", PlanFormatError)
        return cls.of_document(document, verify_digest=verify_digest)

    @classmethod
    def of_document(cls, document: Any, *, verify_digest: bool = True) -> Plan:
        """The plan in a document that was parsed; errors as of `from_json`."""
        plan = _read(document)
        recorded, found = document.get("digest"), plan.digest() if verify_digest else None
        if verify_digest and recorded is None:
            raise PlanFormatError(
                f'the plan has no "digest"; add "digest": "{found}", or pass verify_digest=False'
            )
        if verify_digest and recorded != found:
            raise PlanFormatError(
                f"the digest is {recorded:.80}, the content's {found}; plan again, or pass "
                "verify_digest=False"
            )
        return plan

    def __str__(self) -> str:
        """The plan for people: a line per step, long ones cut short."""
        lines = [
            f"Plan: {counted(self.num_samples, 'sample')} in "
            f"{counted(len(self.steps), 'step')} on "
            f"{counted(len(self.steps[0].micro_batches), rank_noun(self.steps[0]))}, "
            f"{self.steps[0].scope} scope, digest {self.digest()[:12]}"
        ]
        for index, step in enumerate(self.steps[:MOST_SHOWN]):
            placeholders = sum(row.samples == () for row in step.rows())
            lines.append(
                f"  step {index}: {step.num_samples} samples, {step.num_microbatches} "
                f"micro-batches per rank, {placeholders} placeholders"
            )
        return "\n".join(lines + left_out(len(self.steps), "steps"))


def rank_noun(step: StepPlan) -> str:
    """The kind of rank that `micro_batches` has a list for."""
    return "data-parallel rank" if step.context_parallel is None else "rank"


def counted(count: int, noun: str) -> str:
    """A count with its noun in the singular or the plural: `1 sample`, `2 micro-batches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def left_out(count: int, noun: str) -> list[str]:
    """A line about entries beyond `MOST_SHOWN`; none if there are no more."""
    return [f"  and {count - MOST_SHOWN} more {noun}"] if count > MOST_SHOWN else []


def _document_of(steps: Sequence[StepPlan], num_samples: int) -> dict[str, Any]:
    """The document of steps, without its digest and the samples that steps cover."""
    first, documents = steps[0], list[dict[str, Any]]()
    for step in steps:
        ranks = [[list(samples) for samples in rank] for rank in step.micro_batches]
        documents.append({"num_microbatches": step.num_microbatches, "ranks": ranks})
        if step.context_parallel is not None:
            documents[-1]["context_parallel"] = [list(sizes) for sizes in step.context_parallel]
        if step.trees:
            documents[-1]["trees"] = [
                [list(tree.samples), [place for node in tree.nodes for place in node]]
                for tree in step.trees
            ]
    return {
        "format": FORMAT,
        "version": VERSION,
        "layout": _options_of(first.dims),
        "config": _options_of(first.config),
        "scope": first.scope,
        "num_samples": num_samples,
        "steps": documents,
    }


def _options_of(settings: ParallelDims | PlannerConfig) -> dict[str, Any]:
    defaults = {option.name: option.default for option in fields(settings)}
    return {
        name: value
        for name, value in asdict(settings).items()
        if name not in NEWER_OPTIONS or value != defaults[name]
    }


def _digest(document: dict[str, Any]) -> str:
    """SHA-256 in hex of a document without its digest."""
    # Python prints a float in the fewest digits that give it back: everywhere the same.
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def lengths_digest(lengths: Sequence[int]) -> str:
    """SHA-256 of lengths [samples], in hex."""
    return hashlib.sha256(",".join(map(str, check_lengths(lengths))).encode("ascii")).hexdigest()


def _read(raw: Any) -> Plan:
    # Values are checked for their kind alone: a broken plan can be read, and `validate_plan` names
    # what is wrong with it.
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
    for key in ("digest", "lengths_digest"):
        if not isinstance(raw.get(key), str | None):
            raise PlanFormatError(f'"{key}" must be a string, got {raw[key]!r:.80}')
    steps = _json(raw.get("steps"), list, '"steps"')
    if not steps:
        raise PlanFormatError('"steps" must hold at least one step, got an empty list')
    config, dims = _settings(PlannerConfig, raw, "config"), _settings(ParallelDims, raw, "layout")
    return Plan(
        steps=tuple(
            _read_step(step, f"step {i}", dims, config, scope) for i, step in enumerate(steps)
        ),
        num_samples=_counts(raw.get("num_samples"), '"num_samples"'),
    )


def _settings(kind: type[_Settings], raw: dict[str, Any], key: str) -> _Settings:
    given = _json(raw.get(key), dict, f'"{key}"')
    known = {option.name for option in fields(kind)}
    # An option that this release lacks may change what the plan means.
    if unknown := sorted(set(given) - known):
        raise PlanFormatError(
            f'unknown keys in "{key}": {", ".join(unknown):.200}; expected '
            f"{', '.join(sorted(known))}"
        )
    try:
        return kind(**given)  # options that are left out have their defaults
    except (PlanningError, TypeError) as error:
        raise PlanFormatError(f'"{key}" is not valid: {error}') from None


def _read_step(
    raw: Any, where: str, dims: ParallelDims, config: PlannerConfig, scope: Scope
) -> StepPlan:
    _json(raw, dict, where)
    ranks = _counts(raw.get("ranks"), f'"ranks" of {where}', "rank", "slot", "sample")
    what, sizes = f'"context_parallel" of {where}', raw.get("context_parallel")
    if (sizes is not None) != (config.max_context_parallel is not None):
        raise PlanFormatError(
            f'{what} and "max_context_parallel" of "config" need each other; add or leave out both'
        )
    if sizes is not None:
        sizes = _counts(sizes, what, "rank", "slot")
        # Readers divide by them before a plan is validated.
        if [*map(len, sizes)] != [*map(len, ranks)] or any(0 in of_rank for of_rank in sizes):
            raise PlanFormatError(
                f'{what} must hold a size of 1 or more for each micro-batch of "ranks", got '
                f"{raw['context_parallel']!r:.80}"
            )
    trees = _counts(raw.get("trees", []), f'"trees" of {where}', "tree", "list", "entry")
    for number, tree in enumerate(trees):
        if len(tree) != 2 or not tree[0] or len(tree[1]) % 2:
            raise PlanFormatError(
                f'"trees" of {where}, tree {number} must have samples, and a start and an end for '
                f"each node, got {tree!r:.80}"
            )
    return StepPlan(
        num_microbatches=_counts(raw.get("num_microbatches"), f'"num_microbatches" of {where}'),
        micro_batches=ranks,
        # What a step runs is what it must cover: `validate_plan` finds samples that are in none.
        sample_indices=tuple(sorted({i for rank in ranks for samples in rank for i in samples})),
        dims=dims,
        config=config,
        context_parallel=sizes,
        scope=scope,
        trees=tuple(
            PrefixTree(samples, tuple(zip(places[::2], places[1::2], strict=True)))
            for samples, places in trees
        ),
    )


def _counts(raw: Any, what: str, *places: str) -> Any:
    """An integer of 0 or more, or nested tuples of them; `places` are names of each list's
    entries."""
    if places:
        return tuple(
            _counts(each, f"{what}, {places[0]} {number}", *places[1:])
            for number, each in enumerate(_json(raw, list, what))
        )
    count = as_integer(raw)
    if count is None or count < 0:
        raise PlanFormatError(f"{what} must be an integer of 0 or more, got {raw!r:.80}")
    return count


def _json(value: Any, kind: type, what: str) -> Any:
    """`value`, which must be a list or a dict."""
    if not isinstance(value, kind):
        name = "object" if kind is dict else "array"
        raise PlanFormatError(f"{what} must be a JSON {name}, got {value!r:.80}")
    return value
