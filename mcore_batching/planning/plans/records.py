"""A training job's record, step by step: lengths, plan and measured time.

A job writes one file of JSON lines into a folder:

    {"format": "mcore-batching/record", "version": 1, "layout": {...}, "config": {...},
     "cost_model": {...}}
    {"step": 0, "lengths": [...], "scope": "global", "ranks": [[[3, 17], [5]], ...],
     "measured_seconds": 1.25}

The first line holds for the steps after it, and is repeated when a part of it changes. Samples are
numbered from 0 in each step; under learnt costs `seconds_per_unit` is the time of one token's work
on a mean stage; `hosted_lengths` are those of further samples, computed in the segments of these.
Beside it lies `cost_model.json`, the last step's cost model.

A step is flushed before `append` returns, so a killed job loses no earlier one; a last line that
was cut short is left out on reading. A record that cannot be written is a warning, and the job goes
on without it.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from mcore_batching.planning.costs.cost import CostModel, in_units_of
from mcore_batching.planning.errors import PlanningError, named
from mcore_batching.planning.files import (
    MAX_JSON_CHARACTERS,
    bounded_lines,
    open_text,
    parse_json,
    write_whole,
)
from mcore_batching.planning.integers import at_least, check_lengths, number_up_to
from mcore_batching.planning.plans import plan_document
from mcore_batching.planning.plans.plan import StepPlan, step_document
from mcore_batching.planning.plans.validation import validate_plan

COST_MODEL_FILE = "cost_model.json"
FORMAT = "mcore-batching/record"
VERSION = 1


class RecordError(PlanningError):
    """A folder or file of records that cannot be read or made."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of a job."""

    step: int
    """Number of the step in its job, from 0."""
    plan: StepPlan
    """Over all data-parallel ranks; its samples are positions in `lengths`."""
    lengths: tuple[int, ...]
    """Total length of each sample of the step [samples], in tokens."""
    measured_seconds: float | None
    """Time of all forward and backward passes on the rank that wrote; None if not measured."""
    seconds_per_unit: float | None = None
    """Seconds of a unit of cost, where costs were learnt as the job ran; None elsewhere."""


class StepRecorder:
    """Writes a job's steps into a new file in a folder, made if need be; not where `writes` is
    False.

    Raises:
        RecordError: the folder cannot be made or written to.
    """

    def __init__(self, directory: str | Path, *, writes: bool = True) -> None:
        self._file: TextIO | None = None
        self._header: dict[str, Any] | None = None
        self._steps = 0
        self._folder = folder = Path(directory)
        if not writes:
            return
        started = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")  # files sort by job
        try:
            folder.mkdir(parents=True, exist_ok=True)
            name = f"steps-{started}-{os.getpid()}.jsonl"
            # "x": two nodes may start in one microsecond with one process id on a shared folder.
            self._file = (folder / name).open("x", encoding="utf-8")
        except OSError as error:
            raise RecordError(
                f"cannot record into {directory}: {error}; set {named('record')} to a writable "
                "folder"
            ) from None

    def append(
        self,
        plan: StepPlan,
        lengths: Sequence[int],
        measured_seconds: float | None = None,
        *,
        seconds_per_unit: float | None = None,
    ) -> None:
        """Write one step: its plan over all data-parallel ranks, the lengths of the batch that it
        refers to, the seconds of all its passes and of a unit of cost (None: not measured, not
        learnt)."""
        if self._file is None:
            return
        model = plan.cost_model
        # The unit on file is a token's work, so that costs of several jobs can be compared.
        if seconds_per_unit is not None and model.linear > 0:
            seconds_per_unit *= model.linear
            model = in_units_of(model, model.linear)
        header = {
            "format": FORMAT,
            "version": VERSION,
            "layout": plan_document.options_of(plan.dims),
            "config": asdict(plan.config),
            "cost_model": asdict(model),
        }
        step = {"step": self._steps, **_content(plan, lengths)}
        step["measured_seconds"] = measured_seconds
        if seconds_per_unit is not None:
            step["seconds_per_unit"] = seconds_per_unit
        # The header again only where it changed: it would be most of a short step's line.
        lines = [step] if header == self._header else [header, step]
        try:
            for line in lines:
                self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()
            if self._header is None or self._header["cost_model"] != header["cost_model"]:
                _write_cost_model(self._folder, model, seconds_per_unit)
        except OSError as error:
            # Raising here would leave the other ranks waiting inside their step.
            warnings.warn(
                f"{self._file.name}: {error}; no more steps are recorded", RuntimeWarning, 2
            )
            self._file = None
            return
        self._header = header
        self._steps += 1

    def close(self) -> None:
        """Close the file; steps appended afterwards are left out."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _content(plan: StepPlan, lengths: Sequence[int]) -> dict[str, Any]:
    """Samples and micro-batches of a step as its line has them, samples numbered from 0."""
    number = {sample: position for position, sample in enumerate(plan.sample_indices)}
    numbered = tuple(
        tuple(tuple(number[sample] for sample in samples) for samples in rank)
        for rank in plan.micro_batches
    )
    content: dict[str, Any] = {
        "lengths": [int(lengths[sample]) for sample in plan.sample_indices],
        "scope": plan.scope,
        **step_document(replace(plan, micro_batches=numbered)),
    }
    del content["num_microbatches"]  # which the ranks' lists show
    if plan.hosted_lengths:
        content["hosted_lengths"] = plan.hosted_lengths
    return content


def _write_cost_model(folder: Path, model: CostModel, seconds_per_unit: float | None) -> None:
    """Replace the file for other jobs and commands, one of which may be reading it."""
    document = json.loads(model.to_json()) | {"seconds_per_unit": seconds_per_unit}
    write_whole(folder / COST_MODEL_FILE, f"{json.dumps(document, indent=1)}\n".encode())


def read_records(directory: str | Path) -> list[StepRecord]:
    """All steps in a folder that `StepRecorder` wrote to, or in one of its files: job after job.

    Raises:
        RecordError: nothing is there, or a line is no record.
    """
    path = Path(directory)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    records = [record for file in files for record in _read_file(file)]
    if not records:
        raise RecordError(f"{directory} holds no recorded step; give a job's record folder")
    return records


def _read_file(file: Path) -> Iterator[StepRecord]:
    header: dict[str, Any] | None = None
    for number, line in enumerate(_lines(file), 1):
        if not line.endswith("\n") and len(line) <= MAX_JSON_CHARACTERS:
            return  # cut short when the job was killed
        try:
            raw = parse_json(line)
            if not isinstance(raw, dict):
                raise ValueError(f"expected a JSON object, got {raw!r:.60}")
            # A part of the header that changed is repeated, so any line may be one.
            if "format" in raw:
                header = _checked_header(raw)
                continue
            if header is None:
                raise ValueError(f'no line with "format": "{FORMAT}" comes before it')
            yield _record(raw, header)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            reason = f"no key {error}" if isinstance(error, KeyError) else str(error)
            raise RecordError(f"{file}:{number}: not a record of a step: {reason}") from None


def _lines(file: Path) -> Iterator[str]:
    try:
        with open_text(file) as opened:
            yield from bounded_lines(opened)
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"cannot read {file}: {error}") from error


def _checked_header(raw: Mapping[str, Any]) -> dict[str, Any]:
    if (raw["format"], raw["version"]) != (FORMAT, VERSION):
        raise ValueError(
            f"expected {FORMAT} version {VERSION}, got {raw['format']!r:.80} "
            f"{raw['version']!r:.80}; read it with the release that wrote it"
        )
    return {key: raw[key] for key in ("layout", "config", "cost_model")}


def _record(raw: Mapping[str, Any], header: Mapping[str, Any]) -> StepRecord:
    lengths = tuple(check_lengths(raw["lengths"]))
    # As a document of one step, so that its parts are checked in one place.
    step = dict(raw) | {"num_microbatches": len(raw["ranks"][0])}
    whole = {**header, "scope": raw["scope"], "num_samples": len(lengths), "steps": [step]}
    (fields,) = plan_document.read(whole)["steps"]
    fields |= {
        "sample_indices": tuple(range(len(lengths))),
        "cost_model": CostModel(**header["cost_model"]),
        "hosted_lengths": tuple(check_lengths(raw.get("hosted_lengths", ()))),
    }
    plan = StepPlan(**fields)
    validate_plan(plan, lengths)  # a broken plan would break a reader much later
    measured, unit = raw["measured_seconds"], raw.get("seconds_per_unit")
    return StepRecord(
        step=at_least("step", raw["step"], 0, RecordError),
        plan=plan,
        lengths=lengths,
        measured_seconds=None if measured is None else _time("measured_seconds", measured),
        seconds_per_unit=None if unit is None else _time("seconds_per_unit", unit),
    )


def _time(key: str, value: Any) -> float:
    # A float holds neither a 400-digit integer nor, as a number, 1e400 or NaN.
    return number_up_to(key, value, sys.float_info.max, RecordError)
