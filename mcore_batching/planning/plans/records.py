"""A training job's record, step by step: lengths, plan and measured time.

A job writes one file of JSON lines into a folder, a step each:

    {"format": "mcore-batching/record", "version": 2, "step": 0, "measured_seconds": 1.25,
     "lengths": [...], "cost_model": {...}, "seconds_per_unit": null, "plan": {a plan of one step}}

Samples are numbered from 0 in each step; under learnt costs `seconds_per_unit` is the time of one
token's work on a mean stage. Beside the file lies `cost_model.json`, the last step's cost model.

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

from mcore_batching.planning.costs.cost import CostModel
from mcore_batching.planning.errors import PlanningError, named
from mcore_batching.planning.files import (
    MAX_JSON_CHARACTERS,
    bounded_lines,
    open_text,
    parse_json_dict,
    write_whole,
)
from mcore_batching.planning.integers import at_least, check_lengths, number_up_to
from mcore_batching.planning.plans.plan import Plan, StepPlan
from mcore_batching.planning.plans.validation import validate_plan

COST_MODEL_FILE = "cost_model.json"
FORMAT = "mcore-batching/record"
VERSION = 2


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
        self._cost_model: CostModel | None = None
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
        """Write one step: its plan over all data-parallel ranks, of samples numbered from 0, and
        their lengths; the seconds of all its passes and of a unit of cost (None: not measured, not
        learnt)."""
        if self._file is None:
            return
        model = plan.cost_model
        step = {
            "format": FORMAT,
            "version": VERSION,
            "step": self._steps,
            "measured_seconds": measured_seconds,
            "lengths": list(map(int, lengths)),
            "cost_model": asdict(model),
            "seconds_per_unit": seconds_per_unit,
        }
        head = json.dumps(step, separators=(",", ":")).removesuffix("}")
        try:
            document = Plan(steps=(plan,), num_samples=plan.num_samples).to_json()
            self._file.write(f'{head},"plan":{document}}}\n')
            self._file.flush()
            if self._cost_model != model:
                # For other jobs and commands, one of which may be reading it.
                costs = asdict(model) | {"seconds_per_unit": seconds_per_unit}
                text = f"{json.dumps(costs, indent=1)}\n"
                write_whole(self._folder / COST_MODEL_FILE, text.encode())
        except OSError as error:
            # Raising here would leave the other ranks waiting inside their step.
            warnings.warn(
                f"{self._file.name}: {error}; no more steps are recorded", RuntimeWarning, 2
            )
            self._file = None
            return
        self._cost_model = model
        self._steps += 1

    def close(self) -> None:
        """Close the file; steps appended afterwards are left out."""
        if self._file is not None:
            self._file.close()
            self._file = None


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
    where = str(file)
    try:
        with open_text(file) as opened:
            for number, line in enumerate(bounded_lines(opened), 1):
                where = f"{file}:{number}"
                if not line.endswith("\n") and len(line) <= MAX_JSON_CHARACTERS:
                    return  # cut short when the job was killed
                yield _record(parse_json_dict(line, "a record", RecordError))
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"cannot read {file}: {error}") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        reason = f"no key {error}" if isinstance(error, KeyError) else str(error)
        raise RecordError(f"{where}: not a record of a step: {reason}") from None


def _record(raw: Mapping[str, Any]) -> StepRecord:
    if (raw["format"], raw["version"]) != (FORMAT, VERSION):
        raise ValueError(
            f"expected {FORMAT} version {VERSION}, got {raw['format']!r:.80} "
            f"{raw['version']!r:.80}; read it with the release that wrote it"
        )
    lengths = tuple(check_lengths(raw["lengths"]))
    plan = Plan.of_document(raw["plan"])
    # A broken plan, or one of some of the samples, would break a reader much later.
    validate_plan(plan, lengths)
    if len(plan.steps) > 1:
        raise ValueError(f"its plan has {len(plan.steps)} steps, expected one")
    times = {"measured_seconds": raw["measured_seconds"]}
    times["seconds_per_unit"] = raw.get("seconds_per_unit")
    for key, value in times.items():
        # A float holds neither a 400-digit integer nor, as a number, 1e400 or NaN.
        if value is not None:
            times[key] = number_up_to(key, value, sys.float_info.max, RecordError)
    return StepRecord(
        step=at_least("step", raw["step"], 0, RecordError),
        plan=replace(plan.steps[0], cost_model=CostModel(**raw["cost_model"])),
        lengths=lengths,
        **times,
    )
