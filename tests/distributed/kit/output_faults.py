"""What comes of outputs that are too few, too many or of no sample, on the last rank alone.

By the paths of frameworks: what replaces slime's where it plans before it deals out samples
or as it trains (`kit.listed_batches`); and slime and miles from their checkouts. Those of the
engine are rows of `FAULTS.md`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

import mcore_batching
from kit import listed_batches
from kit.exactness import difference, log_probs_by_lengths
from kit.harness import Job
from kit.samples import make_samples, take
from kit.slime import SAMPLES, arguments, model_of, modules_of
from mcore_batching.batch import DEFAULT_SCHEMA
from mcore_batching.integrations.slime.trainer import planned_iterators
from mcore_batching.megatron.topology import is_last_stage
from mcore_batching.planning import ParallelDims

Outputs = dict[str, list[Any]]
Change = Callable[[Outputs], Outputs]

MICRO_BATCHES = {
    1: [[[3, 0], [], [1], [5, 4], [7, 2], [6]]],
    2: [[[2, 0], [], [1, 3]], [[1, 2], [0], [3]]],
}
"""Samples of every data-parallel rank, by the number of ranks, where the framework is told them."""

CAP_TOKENS = 32  # two micro-batches of each replica at least
TOLERANCE = 2e-6  # rows of other contents, as in `test_exactness`


def _raise(made: Outputs) -> Outputs:
    raise ZeroDivisionError("in f")


CHANGES: dict[str, tuple[int, Change]] = {
    "one too few": (0, lambda made: {name: each[:-1] for name, each in made.items()}),
    "one too few later": (1, lambda made: {name: each[:-1] for name, each in made.items()}),
    "one too many": (0, lambda made: {name: [*each, each[-1]] for name, each in made.items()}),
    "a None": (0, lambda made: {name: [None, *each[1:]] for name, each in made.items()}),
    "a failure": (1, _raise),
    "a name more later": (1, lambda made: made | {"mine": made["log_probs"]}),
    "wrong order": (0, lambda made: {name: each[::-1] for name, each in made.items()}),
}
"""From which call on the outputs of ``f`` are changed, and how."""

_WRONG_COUNT = r".*OrderError: .* returned \d values.* for 'log_probs' in a micro-ba"
ENDS = {
    "one too few": _WRONG_COUNT,
    "one too few later": _WRONG_COUNT,
    "one too many": _WRONG_COUNT,
    "a None": r".*OrderError: .* returned \d values, some of them None, for 'log_probs'",
    "a failure": r".*ZeroDivisionError: in f",
    "a name more later": r".*OrderError: .* \['log_probs', 'mine'\] for one micro-batch",
    "no sample": "right",
    "a sample twice": r".*OrderError: .*micro_batch_indices .* doubled \[0\]",
    "a sample left out": r".*OrderError: .*micro_batch_indices .* missing \[\d",
    "a micro-batch less": r"CollationFailedError: .*rank 1: ",
    "all right": "right",
}
"""What every rank says at the end of each case, the first three words of the error aside."""


def jobs_of(of: str, source: str = "", *layouts: str) -> list[Job]:
    """`outputs` by this path, with the fault on one replica (dp2), or on the last stage (pp2)."""
    known = {"dp2": {"data_parallel": 2}, "pp2": {"pipeline_parallel": 2}}
    return [
        Job(
            "-".join(["outputs", *of.split(), layout]),
            "kit.output_faults:outputs",
            2,
            known[layout],
            {
                "dims": known[layout],
                "of": of,
                "source": source,
            },
        )
        for layout in layouts or known
    ]


def check(ranks: list[dict[str, str]]) -> None:
    """Every case ended as it must on all ranks; of a wrong order nobody can know."""
    assert len(ranks[0]) > 6
    unseen = [report.pop("wrong order") for report in ranks]
    assert any(text.startswith("right are [") for text in unseen), unseen
    for number, report in enumerate(ranks):
        for name, found in report.items():
            assert re.match(ENDS[name], found, re.DOTALL), (number, name, found)
            if name != "no sample" and ENDS[name] != "right":
                assert re.match("(Forward|Collation)FailedError|OrderError|ZeroDiv", found), found


def outputs(dims: dict[str, Any], of: str, source: str) -> dict[str, str]:
    """What every case ends with on this rank: an error, or whether the samples' outputs are right.

    Args:
        dims: arguments of `ParallelDims`.
        of: the kit's ``planned slime``, ``planned miles`` (by how these collect outputs) and
            ``planning slime``; ``slime unplanned``, ``slime`` and ``miles`` of a checkout.
        source: folder with the framework.
    """
    shape = ParallelDims(**dims)
    at_fault = dist.get_rank() == dist.get_world_size() - 1
    replica = parallel_state.get_data_parallel_rank()
    micro_batches = MICRO_BATCHES[shape.data_parallel][replica]
    count = sum(map(len, micro_batches))
    samples = take(make_samples(), SAMPLES[replica * count : (replica + 1) * count])
    path = _path(of, source, shape)
    model = model_of(shape, path.args)

    def run(
        change: Change | None = None,
        begins: int = 0,
        held: list[list[int]] | None = None,
        fewer: int = 0,
        data: dict[str, Any] = samples,
    ) -> list[Any]:
        rollout = {key: list(values) for key, values in data.items() if key != "advantages"}
        if path.told:
            rollout["micro_batch_indices"] = held or micro_batches
            rollout["num_microbatches"] = [len(rollout["micro_batch_indices"])]
        iterators, counts = path.iterators(path.args, model, rollout)
        calls = itertools.count()

        @functools.wraps(path.f)
        def f(logits: torch.Tensor, **keywords: Any) -> Any:
            made = path.f(logits, **keywords)
            *output, values = made if isinstance(made, tuple) else (made,)
            if change is not None and at_fault and next(calls) >= begins:
                values = change(values)
            return (*output, values) if output else values

        counts = [counts[0] - fewer]
        found = path.forward(f, path.args, model, iterators, counts, **path.options)
        return found.get("log_probs", [])

    def ended(**changes: Any) -> str:
        alone = changes if at_fault or "change" in changes else {}
        try:
            found = run(**alone)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        expected = right if "data" not in alone else []
        assert len(found) == len(expected)
        pairs = enumerate(zip(found, expected, strict=True))
        good = [i for i, (a, b) in pairs if a.shape == b.shape and difference(a, b) < TOLERANCE]
        return "right" if len(good) == len(expected) else f"right are {good}"

    with path.hooked():
        right = run()
        assert len(right) == (count if is_last_stage() else 0)
        report = {
            name: ended(change=change, begins=begins) for name, (begins, change) in CHANGES.items()
        }
        if path.told:
            doubled = [[0 if i == 1 else i for i in each] for each in micro_batches]
            report["a sample twice"] = ended(held=doubled)
            report["a sample left out"] = ended(held=[each[:1] for each in micro_batches])
        report["a micro-batch less"] = ended(fewer=1)
        if shape.data_parallel > 1:
            report["no sample"] = ended(held=[[]] * 3, data=take(make_samples(), []))
        report["all right"] = ended()
    return report


def _path(of: str, source: str, shape: ParallelDims) -> SimpleNamespace:
    """How this path plans, is hooked and called."""
    args = arguments(shape, True, "grpo")
    args.use_dynamic_batch_size, args.use_rollout_entropy = True, False
    args.max_tokens_per_gpu = CAP_TOKENS
    plans = of in ("planning slime", "slime unplanned")
    path = SimpleNamespace(args=args, told=not plans, options={})
    path.hooked = contextlib.nullcontext
    if of.startswith("plann"):
        args.collects_outputs = of == "planned miles"
        path.f, path.forward = _collected_log_probs, listed_batches.forward_only
        path.iterators = _planned if plans else _listed
        return path
    modules = modules_of(of, source, shape, args)
    path.f, path.iterators = modules.loss.get_log_probs_and_entropy, modules.iterators
    path.options = {"rollout_id": 0} if of == "miles" else {}
    path.forward = lambda *arguments, **options: modules.model.forward_only(*arguments, **options)
    path.hooked = lambda: mcore_batching.hook(modules.data, modules.model)
    return path


def _planned(args: Any, model: Any, rollout: dict[str, Any]) -> tuple[Any, list[int]]:
    plan = functools.partial(planned_iterators, DEFAULT_SCHEMA, listed_batches.Listed)
    return plan(_raise, args, model, rollout)


def _listed(args: Any, model: Any, rollout: dict[str, Any]) -> tuple[Any, list[int]]:
    return listed_batches.iterators_of(rollout), rollout["num_microbatches"]


def _collected_log_probs(
    logits: torch.Tensor, *, non_loss_data: bool = False, **keywords: Any
) -> Any:
    """As Megatron's schedule takes them: collected, or behind a tensor as a loss would be."""
    made = log_probs_by_lengths(logits, **keywords)
    return made if non_loss_data else (logits.new_zeros(0), made)
