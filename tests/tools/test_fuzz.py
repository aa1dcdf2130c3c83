"""Hostile inputs for the command line, plans, their documents and packed rows; and what a file of a
stranger cannot bring about: plans, records, cost models and data are JSON or text, bounded in size.

An input is a sound call with some of its values, at any depth, replaced by hostile ones. It
may be refused by one of the package's own errors; a command by its exit status and one line. What
is accepted must be right: plans pass `validate_plan`, packed samples come back in order.
Everything follows from an input's number.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from batch_cases import block_of

from mcore_batching import batch as batching
from mcore_batching import planning
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.loss import step_totals
from mcore_batching.planning import (
    CostModel,
    MCoreBatchingError,
    ParallelDims,
    Plan,
    PlannerConfig,
    files,
)
from mcore_batching.tools.cli import main as command

DIMS: dict[str, Any] = asdict(ParallelDims(data_parallel=2, pipeline_parallel=2))
CONFIG: dict[str, Any] = asdict(
    PlannerConfig(max_tokens_per_gpu=64, pad_total_to=8, plan_effort=20)
)
COSTS: dict[str, Any] = {"linear": 1.0, "quadratic": 0.1, "per_micro_batch": 3.0, "window": None}
BATCH_OPTIONS = {"samples_per_step", "groups", "groups_per_step", "forward_only"}
LENGTHS = [30, 7, 64, 1, 0, 12, 12, 90]
MOST_CPU_SECONDS = 10.0


class Odd:
    """An object that is nothing else."""


def hostile(rng: random.Random) -> Any:
    """A value that few functions expect."""
    return rng.choice(
        [
            *(None, True, False, -1, 0, 1, 2, 3, 2**31, 2**40 + 1, 2**63, -(2**63) - 1, 10**400),
            *(0.5, 7.0, -1.0, math.nan, math.inf, -math.inf, 1e308, Decimal(3), 3 + 4j),
            *("", "7", "a", "global", "drop", "\ud800", b"7", [], [[]], [[1]], [None], (), {}),
            *({"a": 1}, {1}, range(3), Odd(), Odd, [1, "a"], [1.0, math.nan], [-1, 5]),
            *(np.int64(5), np.float32(2.5), np.bool_(True), np.array([1, 2]), np.array(3)),
            *(np.array([[1.5]]), np.array(["7"]), np.uint16([5, 6, 7]), np.array(None)),
            *(torch.tensor(5), torch.tensor(2.5), torch.tensor(True), torch.tensor([1, 2, 3])),
            *(torch.tensor([]), torch.ones(2, 2), torch.tensor([True]), torch.tensor(1j)),
            *(torch.tensor([300, 2], dtype=torch.uint16), torch.tensor(math.nan)),
        ]
    )


def mutated(value: Any, rng: random.Random) -> Any:
    """The value with one part, at any depth, replaced, left out or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        kind = rng.random()
        if kind < 0.07:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.1:
            return value | {rng.choice(["extra", "uids", "position_ids"]): hostile(rng)}
        return value | {key: mutated(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        kind = rng.random()
        if kind < 0.1:
            return value[:place] + value[place + 1 :]
        if kind < 0.2:
            return [*value[:place], value[place], *value[place:]]
        return [*value[:place], mutated(value[place], rng), *value[place + 1 :]]
    return hostile(rng)


def spoiled(value: Any, rng: random.Random) -> Any:
    """The value with none to two mutations."""
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
        value = mutated(value, rng)
    return value


def keywords(value: Any, known: Container[str] | None = None) -> dict[str, Any]:
    """A mutated dict of keyword arguments, which remains one."""
    given = value if isinstance(value, dict) else {}
    return {k: v for k, v in given.items() if type(k) is str and (known is None or k in known)}


# Each target makes its input, then calls: what it raises is judged, what it asserts must hold.


def plans(rng: random.Random) -> None:
    given = keywords(
        spoiled({"lengths": list(LENGTHS), "dims": dict(DIMS), "config": dict(CONFIG)}, rng)
    )
    of_groups = {"groups": list("aabbccdd"), "groups_per_step": 2}
    options = spoiled(
        rng.choice([{}, {"samples_per_step": 3}, of_groups, {"forward_only": True}]), rng
    )
    dims = ParallelDims(**keywords(given.get("dims"), DIMS))
    config = PlannerConfig(**{"max_tokens_per_gpu": 64} | keywords(given.get("config"), CONFIG))
    costs = CostModel(**keywords(spoiled(dict(COSTS), rng), COSTS))
    if dims.data_parallel * dims.group_size > 4096 or dims.pipeline_parallel > 64:
        return  # sound, and slow
    lengths = given.get("lengths")
    plan = planning.plan_batch(lengths, dims, config, costs, **keywords(options, BATCH_OPTIONS))
    planning.validate_plan(plan, lengths)
    ran = [i for step in plan.steps for rank in step.micro_batches for held in rank for i in held]
    assert sorted(ran) == list(range(len(lengths)))
    assert Plan.from_json(plan.to_json(lengths)) == plan
    for step in plan.steps:
        made = planning.step_statistics(step, lengths, costs)
        assert math.isfinite(made.step_time)
        assert made.step_time >= made.floor_time * (1 - 1e-9)


def documents(rng: random.Random) -> None:
    dims, config = ParallelDims(**DIMS), PlannerConfig(**CONFIG)
    plan = planning.plan_batch(LENGTHS, dims, config, samples_per_step=3)
    raw = spoiled(json.loads(plan.to_json(LENGTHS)), rng)
    text = json.dumps(raw, default=repr, skipkeys=True)
    if rng.random() < 0.2:
        place = rng.randrange(len(text) + 1)
        text = text[:place] + rng.choice(["", "}", "\0", "NaN", "9" * 5000]) + text[place + 3 :]
    reader = rng.choice([Plan.from_json, Plan.from_json, CostModel.from_json])
    read: Any = reader(text, **({} if reader == CostModel.from_json else {"verify_digest": False}))
    if isinstance(read, Plan):
        lengths = spoiled(list(LENGTHS), rng)
        str(read)
        planning.validate_plan(read, lengths)
        for step in read.steps:
            planning.step_statistics(step, lengths)


def samples() -> dict[str, Any]:
    return {
        "tokens": [[1, 2, 3], [4, 5], [6]],
        "total_lengths": [3, 2, 1],
        "response_lengths": [2, 1, 0],
        "loss_masks": [[1.0, 0.5], [1.0], []],
        "rewards": [1.0, 0.0, 0.5],
        "uids": ["a", "a", "b"],
        "advantages": [torch.ones(2), torch.tensor([0.5]), []],
        "is_padding": [False, False, False],
    }


def packs(rng: random.Random) -> None:
    given = keywords(spoiled(samples(), rng))
    schema = batching.DEFAULT_SCHEMA.resolve(given)
    columns = Columns.read(given, schema)
    order = [2, 0, 1][: len(columns.total_lengths)]
    (row,) = block_of(columns, [order], align=4, row_align=8).rows()
    for start, index in zip(row.host_cu_seqlens_padded, order, strict=False):
        each = torch.as_tensor(given["tokens"][index]).long()
        assert torch.equal(row.tokens[0, start : start + len(each)], each)
    weights = step_totals(row.fields)[1][0]
    assert math.isfinite(weights)
    assert weights >= 0
    values = [f"output {index}" for index in order]
    restored = batching.restore_order(values, order, len(order))
    assert restored == [f"output {index}" for index in range(len(order))]
    assert batching.apply_order(restored, order) == values


NUMBERS = ["0", "1", "2", "3", "64", "-1", "10" * 9, "1e3", "x", "", "nan", "²", "7" * 5000]
FLAGS = [
    *("--max-tokens-per-gpu", "--dp", "--pp", "--vpp", "--cp", "--tp", "--ep", "--plan-effort"),
    *("--samples-per-step", "--microbatch-group-size", "--max-samples-per-row"),
]
WORDS = ["--balance", "--fill", "--packing", "--column"]


def file_of(rng: random.Random, folder: Path) -> str:
    """A file that is sound, spoiled, random or absent."""
    plan = planning.plan_batch(LENGTHS, ParallelDims(), PlannerConfig(max_tokens_per_gpu=64))
    sound = rng.choice(
        [
            "\n".join(map(str, LENGTHS)).encode(),
            b"n,g\n5,a\n7,b\n",
            b'{"n": 5, "g": "a"}\n{"n": 7, "g": "b"}\n',
            plan.to_json(LENGTHS).encode(),
            CostModel(**COSTS).to_json().encode(),
        ]
    )
    kind = rng.random()
    if kind < 0.4:
        place = rng.randrange(len(sound) + 1)
        sound = sound[:place] + rng.randbytes(rng.randint(1, 4)) + sound[place + 2 :]
    elif kind < 0.5:
        sound = rng.randbytes(rng.randint(0, 300))
    name = folder / f"file{rng.randrange(10**9)}{rng.choice(['.txt', '.csv', '.jsonl', '.json'])}"
    if kind < 0.95:
        name.write_bytes(sound)
    return rng.choice([str(name)] * 8 + [str(folder), "/dev/null", ""])


def commands(rng: random.Random) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        words = [rng.choice(["plan", "check", "compare", "replay", "plan", "nothing"])]
        words += [file_of(rng, folder) for _ in range(2 if words == ["check"] else 1)]
        if rng.random() < 0.9:
            words += ["--max-tokens-per-gpu", "64"]
        if rng.random() < 0.5:
            words += ["--column", "n"]
        for _ in range(rng.randint(0, 3)):
            words += [rng.choice(FLAGS), rng.choice(NUMBERS)]
        if rng.random() < 0.3:
            words += [rng.choice(WORDS), rng.choice(["n", "cost", "none", "split", "drop", ""])]
        if rng.random() < 0.3:
            words += ["--cost-model", file_of(rng, folder)]
        if rng.random() < 0.2:
            out = rng.choice(["x.json", "x.svg", "none/x.json", ""])
            words += [rng.choice(["--out", "--plot"]), str(folder / out)]
        if rng.random() < 0.3:
            words.append(rng.choice(["--no-advice", "--forward-only", "--version", "--help", "-"]))
        _run_command(words)


def _run_command(words: list[str]) -> None:
    output, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        mock.patch.object(sys, "stdin", io.StringIO("5\n7\n")),
    ):
        try:
            status = command(words)
        except SystemExit as end:  # of the parser, with its usage
            status = end.code
            errors.truncate(0)
    assert status in (0, 1, 2, 74), (words, status, errors.getvalue())
    assert errors.getvalue().count("\n") <= bool(status), (words, errors.getvalue())
    assert "Traceback" not in output.getvalue() + errors.getvalue()


def outcome_of(target: Callable[[random.Random], None], rng: random.Random) -> str:
    """The outcome of one input: "held" or "refused"."""
    signal.signal(signal.SIGVTALRM, _too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_CPU_SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target(rng)
    except MCoreBatchingError as error:
        return "refused" if len(str(error)) < 2000 else f"refused in {len(str(error))} characters"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return "held"


def _too_long(*_: object) -> None:
    raise TimeoutError(f"took more than {MOST_CPU_SECONDS:.0f} s of CPU time")


@pytest.mark.parametrize("target", [plans, documents, packs, commands])
@pytest.mark.parametrize("inputs", [75, pytest.param(750, marks=[pytest.mark.long], id="long")])
def test_hostile_inputs_are_refused_or_done_right(
    target: Callable[[random.Random], None], inputs: int
) -> None:
    outcomes, faults = Counter[str](), []
    for number in range(inputs):
        try:
            outcomes[outcome_of(target, random.Random(f"{inputs}-{number}"))] += 1
        except Exception:
            faults.append(f"input {number} of {inputs}:\n{traceback.format_exc()}")
    assert not faults, "\n\n".join(faults)
    # Otherwise nothing was put to the test.
    assert outcomes["held"] > 0
    assert outcomes["refused"] > 0 or target is commands
    assert {*outcomes} <= {"held", "refused"}


PACKAGE = Path(__file__).resolve().parents[2] / "mcore_batching"
MAKES_OBJECTS_OF_BYTES_OR_RUNS_CODE = (
    r"(?<![\w.])(eval|exec|compile|__import__)\(|torch\.load|weights_only|allow_pickle|yaml\.load"
    r"|\b(_?c?pickle|dill|cloudpickle|joblib|shelve|marshal)\b(?!\.dumps)|\w_object(_list)?\b"
    r"|^\s*from +(torch|yaml)[\w.]* +import[^#\n]*\b\w*load\b"
)
STARTS_A_PROCESS = (
    r"^\s*(import|from) +(subprocess|multiprocessing|pty|asyncio)|futures\.process"
    r"|ProcessPoolExecutor|\.multiprocessing|\bos\.(fork|exec|spawn|posix_spawn|system|popen)"
)


@pytest.mark.parametrize(
    ("pattern", "modules"),
    [
        # The job's own bytes: between ranks, and between a rank and the process it has started.
        (
            MAKES_OBJECTS_OF_BYTES_OR_RUNS_CODE,
            "batch/consensus batch/messages megatron/exchange megatron/job megatron/topology "
            "planning/worker",
        ),
        # Another could have the working directory on its path; tests of this one see it has not.
        (STARTS_A_PROCESS, "planning/worker"),
    ],
)
def test_few_modules_make_objects_of_bytes_or_start_a_process(pattern: str, modules: str) -> None:
    found = [
        path.relative_to(PACKAGE).with_suffix("").as_posix()
        for path in sorted(PACKAGE.rglob("*.py"))
        if re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE | re.IGNORECASE)
    ]
    assert found == modules.split()


@pytest.mark.parametrize("name", ["/dev/zero", "pipe"])
def test_a_job_refuses_devices_and_pipes_without_waiting(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a device or a pipe; copy its content to a file"):
        files.read_document(tmp_path / name)
