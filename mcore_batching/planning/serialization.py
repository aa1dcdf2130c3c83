"""Plans as JSON, and their digest.

A document is `{"format": "mcore-batching/plan", "version": 1, "layout": {...}, "config": {...},
"scope": "global", "num_samples": n, "digest": "...", "steps": [{"num_microbatches": k, "ranks":
[[[3, 17], [5], []], ...]}]}`. A document of one step that covers other samples than 0 to n-1 lists
them as the step's `sample_indices`. One of a batch whose steps leave samples out has them as a list
`dropped`.

Guarantees: the digest is the SHA-256 of the document without its digest, keys sorted, no spaces,
and holds integers, booleans, strings and null only, so that nothing in it depends on how floats
print; reading refuses what is not such a document, and says what is wrong with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from mcore_batching.planning.checks import as_integer
from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.errors import PlanFormatError, PlanningError
from mcore_batching.planning.layout import Layout

if TYPE_CHECKING:
    from mcore_batching.planning.plan import StepPlan

FORMAT = "mcore-batching/plan"
VERSION = 1

Payload = dict[str, Any]
_Options = TypeVar("_Options", Layout, PlannerConfig)


@dataclass(frozen=True)
class StepDocument:
    """One step as read."""

    num_microbatches: int
    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    sample_indices: tuple[int, ...] | None


@dataclass(frozen=True)
class Document:
    """A plan document as read."""

    layout: Layout
    config: PlannerConfig
    scope: Literal["global", "local"]
    num_samples: int
    digest: str | None
    steps: tuple[StepDocument, ...]
    dropped: tuple[int, ...]


def payload(
    layout: Layout,
    config: PlannerConfig,
    scope: str,
    num_samples: int,
    steps: Sequence[StepPlan],
    *,
    with_samples: bool,
    dropped: Sequence[int] = (),
) -> Payload:
    """A document without its digest."""
    documents: list[Payload] = []
    for step in steps:
        document: Payload = {
            "num_microbatches": step.num_microbatches,
            "ranks": [[list(samples) for samples in rank] for rank in step.micro_batches],
        }
        if with_samples and step.sample_indices != tuple(range(num_samples)):
            document["sample_indices"] = list(step.sample_indices)
        documents.append(document)
    return {
        "format": FORMAT,
        "version": VERSION,
        "layout": asdict(layout),
        "config": _config(config),
        "scope": scope,
        "num_samples": num_samples,
        **({"dropped": list(dropped)} if dropped else {}),
        "steps": documents,
    }


def digest(content: Payload) -> str:
    """SHA-256 in hex of a document without its digest."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def dump(content: Payload) -> str:
    """A document with its digest, as JSON."""
    head = {key: value for key, value in content.items() if key != "steps"}
    return json.dumps({**head, "digest": digest(content), "steps": content["steps"]})


def check_digest(recorded: str | None, found: str) -> None:
    """Compare the digest that a document carries with that of the plan read from it.

    Raises:
        PlanFormatError: they differ, or the document carries none.
    """
    if recorded is None:
        raise PlanFormatError(
            f'the plan carries no "digest"; add "digest": "{found}", or pass verify_digest=False'
        )
    if recorded != found:
        raise PlanFormatError(
            f"the plan's digest is {recorded}, but its content gives {found}: it was changed after "
            "it was written; plan again, or pass verify_digest=False to read it anyway"
        )


def recorded_digest(text: str) -> str | None:
    """The digest that a document carries, or None."""
    return load(text).digest


def _config(config: PlannerConfig) -> Payload:
    """The options, without those that came later and are as they were before."""
    options = asdict(config)
    for later in ("plan_effort", "max_inflight_tokens"):
        if options[later] == PlannerConfig.__dataclass_fields__[later].default:
            del options[later]
    return options


def load(text: str) -> Document:
    """Read a document. Its digest is read, not compared: that takes the plan made from it.

    Raises:
        PlanFormatError: not such a document.
    """
    raw = _parse(text)
    scope = raw.get("scope", "global")
    if scope not in ("global", "local"):
        raise PlanFormatError(f'"scope" must be "global" or "local", got {scope!r}')
    steps = _expect(raw, "steps", list)
    if not steps:
        raise PlanFormatError('"steps" must hold at least one step, got an empty list')
    recorded = raw.get("digest")
    if recorded is not None and not isinstance(recorded, str):
        raise PlanFormatError(f'"digest" must be a string, got {recorded!r:.80}')
    return Document(
        layout=_options(Layout, _expect(raw, "layout", dict), "layout"),
        config=_options(PlannerConfig, _expect(raw, "config", dict), "config"),
        scope=scope,
        num_samples=_count(raw.get("num_samples"), '"num_samples"'),
        digest=recorded,
        steps=tuple(_step(step, index) for index, step in enumerate(steps)),
        dropped=_indices(raw.get("dropped", []), '"dropped"'),
    )


def _parse(text: str) -> Payload:
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
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
    return raw


def _expect(raw: Payload, key: str, kind: type) -> Any:
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


def _options(kind: type[_Options], raw: Payload, what: str) -> _Options:
    known = {option.name for option in fields(kind)}
    unknown = sorted(set(raw) - known)
    if unknown:
        raise PlanFormatError(
            f'unknown keys in "{what}": {", ".join(unknown)}; expected {", ".join(sorted(known))}'
        )
    try:
        return kind(**raw)
    except (PlanningError, TypeError) as error:
        raise PlanFormatError(f'"{what}" is not valid: {error}') from None


def _step(raw: Any, index: int) -> StepDocument:
    if not isinstance(raw, dict):
        raise PlanFormatError(f"step {index} must be a JSON object, got {raw!r:.80}")
    where = f"step {index}"
    ranks = _expect(raw, "ranks", list)
    samples = raw.get("sample_indices")
    return StepDocument(
        num_microbatches=_count(raw.get("num_microbatches"), f'"num_microbatches" of {where}'),
        ranks=tuple(
            tuple(
                _indices(micro_batch, f"{where}, rank {rank}, slot {slot}")
                for slot, micro_batch in enumerate(_as_list(micro_batches, f"{where}, rank {rank}"))
            )
            for rank, micro_batches in enumerate(ranks)
        ),
        sample_indices=None if samples is None else _indices(samples, f'{where}, "sample_indices"'),
    )


def _indices(raw: Any, where: str) -> tuple[int, ...]:
    return tuple(_count(sample, f"a sample index at {where}") for sample in _as_list(raw, where))


def _as_list(raw: Any, where: str) -> list[Any]:
    if not isinstance(raw, list):
        raise PlanFormatError(f"{where} must be a JSON array, got {raw!r:.80}")
    return raw
