"""Plans as frozen data, their JSON form and their digest.

A plan knows nothing of its readers: checking it (`planning.validation`), measuring it
(`planning.statistics`), explaining and drawing it (`tools`) are functions elsewhere.

A document is

    {"format": "mcore-batching/plan", "version": 1, "layout": {...}, "config": {...},
     "scope": "global", "num_samples": n, "digest": "...",
     "steps": [{"num_microbatches": k, "ranks": [[[3, 17], [5], []], ...]}]}

Optional keys:

- `sample_indices` of a step: the samples of one step out of a batch;
- `context_parallel` of a step, under dynamic CP alone: the context-parallel size of each rank's
  micro-batches [ranks][num_microbatches], the ranks of "ranks" being data- and context-parallel;
- `dropped`: the samples that a batch's steps leave out;
- `lengths_digest`: SHA-256 in hex of the lengths that the plan was made from, by which `check`
  tells them from others that would fit as well; there where `to_json` was given the lengths, and no
  part of what `digest` covers, so that a plan's digest does not depend on it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple, TypeVar

from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.cost import CostModel
from mcore_batching.planning.errors import LengthError, PlanFormatError, PlanningError
from mcore_batching.planning.integers import as_integer
from mcore_batching.planning.json_text import parse_json
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.problem import check_lengths

FORMAT = "mcore-batching/plan"
VERSION = 1

Scope = Literal["global", "local"]
MicroBatches = tuple[tuple[int, ...], ...]
"""One rank's micro-batches in slot order: sample indices each, `()` for a placeholder."""

_Settings = TypeVar("_Settings", ParallelDims, PlannerConfig)
_SHOWN = 16


class Row(NamedTuple):
    """One micro-batch of a step."""

    rank: int
    """Rank that has it; of several that share it the first."""
    slot: int
    """Its number on that rank."""
    size: int
    """Context-parallel size."""
    samples: tuple[int, ...]
    """None for a placeholder."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The samples of one optimizer step by rank and micro-batch, in the order in which they run.

    A plan that was read from a file may be broken; `validate_plan` tells.
    """

    micro_batches: tuple[MicroBatches, ...]
    """`micro_batches[rank][slot]` is a tuple of sample indices; `()` is a placeholder. Ranks are
    data-parallel; under dynamic CP data- and context-parallel, the latter fastest, and those that
    share a row list the same samples."""
    num_microbatches: int
    """Micro-batches per rank."""
    sample_indices: tuple[int, ...]
    """The samples this step must cover, ascending: positions in the batch's lengths."""
    dims: ParallelDims
    """Sizes of the parallel groups it was made for."""
    config: PlannerConfig
    """The options it was made with."""
    context_parallel: tuple[tuple[int, ...], ...] | None = None
    """Context-parallel size of each micro-batch [ranks][num_microbatches], under dynamic CP alone.
    Ranks r // c * c to r // c * c + c - 1 share a row of size c of rank r."""
    scope: Scope = "global"
    """"global": samples may go to any rank; "local": each stays on the rank that held it."""
    cost_model: CostModel = field(default_factory=CostModel, compare=False)
    """The costs it was made by. Not part of its identity: neither in the digest nor the JSON."""
    forward_only: bool = field(default=False, compare=False)
    """Made for forward passes alone. Not part of its identity, like `cost_model`."""

    @property
    def num_samples(self) -> int:
        """Samples this step must cover."""
        return len(self.sample_indices)

    def row_size(self, rank: int, slot: int) -> int:
        """Context-parallel size of a micro-batch: ranks that share it."""
        if self.context_parallel is None:
            return self.dims.context_parallel
        return self.context_parallel[rank][slot]

    def rows(self) -> Iterator[Row]:
        """Every micro-batch once, rank after rank: a shared one where its first rank has it."""
        for rank, micro_batches in enumerate(self.micro_batches):
            for slot, samples in enumerate(micro_batches):
                size = self.row_size(rank, slot)
                if self.context_parallel is None or rank % size == 0:
                    yield Row(rank, slot, size, samples)

    def digest(self) -> str:
        """SHA-256 in hex of the plan's content; equal on two ranks exactly if the plans are."""
        return _digest(_document([self], self.num_samples, with_samples=True))

    def to_json(self) -> str:
        """The plan as a `mcore-batching/plan` document of one step."""
        return _dump(_document([self], self.num_samples, with_samples=True))

    @classmethod
    def from_json(cls, text: str, *, verify_digest: bool = True) -> StepPlan:
        """The plan that `to_json` wrote; also reads a one-step document of `Plan.to_json`.

        Raises:
            PlanFormatError: not a plan, another format or version, more than one step, dropped
                samples, or (unless `verify_digest` is False) content that the digest does not
                match.
        """
        raw = _load(text)
        if len(raw["steps"]) != 1:
            raise PlanFormatError(
                f"expected a plan of one step, got {len(raw['steps'])}; read it with Plan.from_json"
            )
        if raw["dropped"]:
            raise PlanFormatError(
                f"expected a plan of all of its samples, got one that drops "
                f"{len(raw['dropped'])}; read it with Plan.from_json"
            )
        (step,) = raw["steps"]
        samples = step["sample_indices"]
        plan = _step(raw, step, range(raw["num_samples"]) if samples is None else samples)
        if verify_digest:
            _check_digest(raw["digest"], plan.digest())
        return plan

    @property
    def _rank_noun(self) -> str:
        """The kind of rank that `micro_batches` has a list for."""
        return "data-parallel rank" if self.context_parallel is None else "rank"

    def _size_mark(self, rank: int, slot: int) -> str:
        size = 1 if self.context_parallel is None else self.context_parallel[rank][slot]
        return f"×{size}" if size > 1 else ""

    def __str__(self) -> str:
        """The plan for people: a line per rank, long ones cut short."""
        lines = [
            f"StepPlan: {_counted(self.num_samples, 'sample')} on "
            f"{_counted(len(self.micro_batches), self._rank_noun)}, "
            f"{self.num_microbatches} micro-batches per rank, {self.scope} scope, digest "
            f"{self.digest()[:12]}"
        ]
        for rank, micro_batches in enumerate(self.micro_batches[:_SHOWN]):
            shown = " ".join(
                f"[{_abbreviated(samples)}]{self._size_mark(rank, slot)}"
                for slot, samples in enumerate(micro_batches[:_SHOWN])
            )
            lines.append(f"  rank {rank}: {shown}{_more(len(micro_batches))}")
        if len(self.micro_batches) > _SHOWN:
            lines.append(f"  {_more(len(self.micro_batches)).strip()} ranks")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The steps of one batch, in order. Sample indices are positions in the batch's lengths."""

    steps: tuple[StepPlan, ...]
    """One or more, all of one `ParallelDims`, configuration and scope."""
    num_samples: int
    """Samples of the batch; the steps must cover 0 to `num_samples - 1`, but for `dropped`."""
    dropped: tuple[int, ...] = ()
    """The samples that no step runs, ascending: those of groups left over under `last="drop"`."""

    def __post_init__(self) -> None:
        """Check that the steps belong together."""
        if not self.steps:
            raise LengthError("a plan needs at least one step, got none; pass steps=(step, ...)")
        first = self.steps[0]
        for index, step in enumerate(self.steps):
            if (step.dims, step.config, step.scope) != (first.dims, first.config, first.scope):
                raise LengthError(
                    f"all steps of a plan must share dims, config and scope; step {index} "
                    "differs from step 0; make one Plan for each",
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

    @property
    def scope(self) -> Scope:
        """As in `StepPlan.scope`."""
        return self.steps[0].scope

    def digest(self) -> str:
        """SHA-256 in hex of the plan's content; that of its step if there is one step and nothing
        is dropped."""
        return _digest(_document(self.steps, self.num_samples, dropped=self.dropped))

    def to_json(self, lengths: Sequence[int] | None = None) -> str:
        """The plan as a `mcore-batching/plan` document.

        Args:
            lengths: total length of each sample of the batch [samples], in tokens, of which the
                document then carries the digest.
        """
        document = _document(self.steps, self.num_samples, dropped=self.dropped)
        return _dump(
            document, {} if lengths is None else {"lengths_digest": lengths_digest(lengths)}
        )

    @classmethod
    def from_json(cls, text: str, *, verify_digest: bool = True) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            PlanFormatError: not a plan, another format or version, or (unless `verify_digest` is
                False) content that the digest does not match.
        """
        raw = _load(text)
        steps = []
        for step in raw["steps"]:
            if step["sample_indices"] is not None:
                raise PlanFormatError(
                    "expected a whole batch's plan, got one step out of a batch; read it with "
                    "StepPlan.from_json"
                )
            found = {sample for rank in step["ranks"] for samples in rank for sample in samples}
            steps.append(_step(raw, step, sorted(found)))
        plan = cls(steps=tuple(steps), num_samples=raw["num_samples"], dropped=raw["dropped"])
        if verify_digest:
            _check_digest(raw["digest"], plan.digest())
        return plan

    def __str__(self) -> str:
        """The plan for people: a line per step, long ones cut short."""
        lines = [
            f"Plan: {_counted(self.num_samples, 'sample')} in "
            f"{_counted(len(self.steps), 'step')} on "
            f"{_counted(len(self.steps[0].micro_batches), self.steps[0]._rank_noun)}, "
            f"{self.scope} scope, digest {self.digest()[:12]}"
        ]
        for index, step in enumerate(self.steps[:_SHOWN]):
            placeholders = sum(row.samples == () for row in step.rows())
            lines.append(
                f"  step {index}: {step.num_samples} samples, {step.num_microbatches} "
                f"micro-batches per rank, {placeholders} placeholders"
            )
        if len(self.steps) > _SHOWN:
            lines.append(f"  {_more(len(self.steps)).strip()} steps")
        if self.dropped:
            lines.append(
                f"  dropped with the groups left over: {_counted(len(self.dropped), 'sample')}: "
                f"{_abbreviated(self.dropped)}"
            )
        return "\n".join(lines)


def lengths_digest(lengths: Sequence[int]) -> str:
    """SHA-256 in hex of the lengths [samples] that a plan is made from."""
    return hashlib.sha256(",".join(map(str, check_lengths(lengths))).encode("ascii")).hexdigest()


def recorded_digests(text: str) -> tuple[str | None, str | None]:
    """The digests of the plan and of its lengths that a document carries; None for one it lacks.

    Raises:
        PlanFormatError: not a plan.
    """
    raw = _load(text)
    return raw["digest"], raw["lengths_digest"]


def step_from_data(
    *,
    num_samples: int,
    ranks: Any,
    dims: Any,
    config: Any,
    scope: Any,
    cost_model: CostModel,
    context_parallel: Any = None,
) -> StepPlan:
    """A plan of one step from parts of a JSON document that were read elsewhere.

    Args:
        num_samples: samples of the step, numbered from 0.
        ranks: as "ranks" of a document's step.
        dims: as "layout" of a document.
        config: as "config" of a document.
        scope: as "scope" of a document.
        cost_model: the costs it was made by.
        context_parallel: as "context_parallel" of a document's step; None where it is left out.

    Raises:
        PlanFormatError: the parts are not those of a plan.
    """
    count = len(ranks[0]) if isinstance(ranks, list) and ranks else 0
    raw = {"layout": dims, "config": config, "scope": scope, "num_samples": num_samples}
    step = {"num_microbatches": count, "ranks": ranks, "context_parallel": context_parallel}
    raw = _read(raw | {"steps": [step]})
    return _step(raw, raw["steps"][0], range(num_samples), cost_model)


def _document(
    steps: Sequence[StepPlan],
    num_samples: int,
    *,
    with_samples: bool = False,
    dropped: Sequence[int] = (),
) -> dict[str, Any]:
    """A document without its digest."""
    first = steps[0]
    documents: list[dict[str, Any]] = []
    for step in steps:
        document: dict[str, Any] = {
            "num_microbatches": step.num_microbatches,
            "ranks": [[list(samples) for samples in rank] for rank in step.micro_batches],
        }
        if step.context_parallel is not None:
            document["context_parallel"] = [list(sizes) for sizes in step.context_parallel]
        if with_samples and step.sample_indices != tuple(range(num_samples)):
            document["sample_indices"] = list(step.sample_indices)
        documents.append(document)
    return {
        "format": FORMAT,
        "version": VERSION,
        "layout": asdict(first.dims),
        "config": _config(first.config),
        "scope": first.scope,
        "num_samples": num_samples,
        **({"dropped": list(dropped)} if dropped else {}),
        "steps": documents,
    }


def _config(config: PlannerConfig) -> dict[str, Any]:
    """The options as JSON. Options newer than version 1 of the format are written only where they
    are not at their default, so that the digests of older plans stay what they were."""
    options = asdict(config)
    for newer in (
        "plan_effort",
        "max_samples_per_row",
        "max_inflight_tokens",
        "max_context_parallel",
    ):
        if options[newer] == PlannerConfig.__dataclass_fields__[newer].default:
            del options[newer]
    return options


def _digest(document: dict[str, Any]) -> str:
    # Integers, booleans, strings and null only: nothing depends on how floats print.
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _dump(document: dict[str, Any], beside: Mapping[str, str] | None = None) -> str:
    """A document as text; `beside` is written into it, and no part of its digest."""
    head = {key: value for key, value in document.items() if key != "steps"} | dict(beside or {})
    return json.dumps({**head, "digest": _digest(document), "steps": document["steps"]})


def _check_digest(recorded: str | None, found: str) -> None:
    if recorded is None:
        raise PlanFormatError(
            f'the plan carries no "digest"; add "digest": "{found}", or pass verify_digest=False'
        )
    if recorded != found:
        raise PlanFormatError(
            f"the plan's digest is {recorded}, but its content gives {found}: it was changed after "
            "it was written; plan again, or pass verify_digest=False to read it anyway"
        )


def _load(text: str) -> dict[str, Any]:
    """Read a document. Its digest is read, not compared: that takes the plan made from it."""
    try:
        raw = parse_json(text)
    except ValueError as error:
        raise PlanFormatError(f"expected a plan in JSON, got text that is none: {error}") from None
    if not isinstance(raw, dict):
        raise PlanFormatError(f"expected a JSON object, got {type(raw).__name__}")
    if raw.get("format") != FORMAT:
        raise PlanFormatError(
            f'expected "format": "{FORMAT}", got {raw.get("format")!r}; pass a file that '
            "`mcore-batching plan --out` or `to_json` wrote"
        )
    if raw.get("version") != VERSION or isinstance(raw.get("version"), bool):
        raise PlanFormatError(
            f'expected plan "version" {VERSION}, got {raw.get("version")!r}; read it with the '
            "release that wrote it, or plan again"
        )
    return _read(raw)


def _read(raw: dict[str, Any]) -> dict[str, Any]:
    """The document's parts, checked, with defaults filled in."""
    scope = raw.get("scope", "global")
    if scope not in ("global", "local"):
        raise PlanFormatError(f'"scope" must be "global" or "local", got {scope!r}')
    steps = _expect(raw, "steps", list)
    if not steps:
        raise PlanFormatError('"steps" must hold at least one step, got an empty list')
    for key in ("digest", "lengths_digest"):
        if not isinstance(raw.get(key), str | None):
            raise PlanFormatError(f'"{key}" must be a string, got {raw[key]!r:.80}')
    config = _settings(PlannerConfig, _expect(raw, "config", dict), "config")
    is_dynamic = config.max_context_parallel is not None
    return {
        "dims": _settings(ParallelDims, _expect(raw, "layout", dict), "layout"),
        "config": config,
        "scope": scope,
        "num_samples": _count(raw.get("num_samples"), '"num_samples"'),
        "digest": raw.get("digest"),
        "lengths_digest": raw.get("lengths_digest"),
        "steps": [_read_step(step, index, is_dynamic) for index, step in enumerate(steps)],
        "dropped": _indices(raw.get("dropped", []), '"dropped"'),
    }


def _read_step(raw: Any, index: int, is_dynamic: bool) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise PlanFormatError(f"step {index} must be a JSON object, got {raw!r:.80}")
    where = f"step {index}"
    samples = raw.get("sample_indices")
    ranks = tuple(
        tuple(
            _indices(micro_batch, f"{where}, rank {rank}, slot {slot}")
            for slot, micro_batch in enumerate(_list(micro_batches, f"{where}, rank {rank}"))
        )
        for rank, micro_batches in enumerate(_expect(raw, "ranks", list))
    )
    return {
        "num_microbatches": _count(raw.get("num_microbatches"), f'"num_microbatches" of {where}'),
        "ranks": ranks,
        "context_parallel": _read_sizes(raw.get("context_parallel"), ranks, where, is_dynamic),
        "sample_indices": (
            None if samples is None else _indices(samples, f'{where}, "sample_indices"')
        ),
    }


def _read_sizes(
    raw: Any, ranks: tuple[MicroBatches, ...], where: str, is_dynamic: bool
) -> tuple[tuple[int, ...], ...] | None:
    """The context-parallel size of each micro-batch of "ranks"; None without dynamic CP."""
    what = f'"context_parallel" of {where}'
    if (raw is not None) != is_dynamic:
        raise PlanFormatError(
            f'{what} must be there exactly where "max_context_parallel" is set in "config": add '
            "it, or leave the other out"
        )
    if raw is None:
        return None
    sizes = tuple(
        tuple(_count(size, f"a size of {what}, rank {rank}") for size in _list(of_rank, what))
        for rank, of_rank in enumerate(_list(raw, what))
    )
    if list(map(len, sizes)) != list(map(len, ranks)) or 0 in {s for of in sizes for s in of}:
        raise PlanFormatError(
            f'{what} must hold a size of 1 or more for each micro-batch of "ranks", got {raw!r:.80}'
        )
    return sizes


def _step(
    raw: dict[str, Any],
    step: dict[str, Any],
    sample_indices: Iterable[int],
    cost_model: CostModel | None = None,
) -> StepPlan:
    return StepPlan(
        micro_batches=step["ranks"],
        num_microbatches=step["num_microbatches"],
        sample_indices=tuple(sample_indices),
        dims=raw["dims"],
        config=raw["config"],
        context_parallel=step["context_parallel"],
        scope=raw["scope"],
        cost_model=cost_model or CostModel(),
    )


def _settings(kind: type[_Settings], raw: dict[str, Any], what: str) -> _Settings:
    known = {option.name for option in fields(kind)}
    unknown = sorted(set(raw) - known)
    if unknown:
        raise PlanFormatError(
            f'unknown keys in "{what}": {", ".join(unknown):.200}; expected '
            f"{', '.join(sorted(known))}"
        )
    try:
        return kind(**raw)
    except (PlanningError, TypeError) as error:
        raise PlanFormatError(f'"{what}" is not valid: {error}') from None


def _expect(raw: dict[str, Any], key: str, kind: type) -> Any:
    value = raw.get(key)
    if not isinstance(value, kind):
        raise PlanFormatError(
            f'"{key}" must be a JSON {"object" if kind is dict else "array"}, got {value!r:.80}'
        )
    return value


def _count(value: Any, what: str) -> int:
    number = as_integer(value)
    if number is None or number < 0:
        raise PlanFormatError(f"{what} must be an integer of 0 or more, got {value!r:.80}")
    return number


def _indices(raw: Any, where: str) -> tuple[int, ...]:
    return tuple(_count(sample, f"a sample index at {where}") for sample in _list(raw, where))


def _list(raw: Any, where: str) -> list[Any]:
    if not isinstance(raw, list):
        raise PlanFormatError(f"{where} must be a JSON array, got {raw!r:.80}")
    return raw


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun if count == 1 else noun + 's'}"


def _abbreviated(samples: Sequence[int]) -> str:
    return " ".join(map(str, samples[:_SHOWN])) + _more(len(samples))


def _more(count: int) -> str:
    return f" … {count - _SHOWN} more" if count > _SHOWN else ""
