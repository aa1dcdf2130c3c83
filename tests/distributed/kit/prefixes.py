"""Turns of trajectories, and branches, that share tokens: what is printed of them, and reported."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from kit.calls import small_model
from kit.exactness import arguments, log_probs_of
from kit.model import adam
from kit.samples import VOCABULARY
from mcore_batching.batch import DEFAULT_SCHEMA, Kind
from mcore_batching.megatron import (
    CollectiveError,
    add_fields,
    forward_only,
    get_data_iterator,
    response_log_probs,
    schedule_of,
    train_step,
)
from mcore_batching.planning import ParallelDims, step_statistics

TOTALS = [4, 9, 15, 24]
"""Turns of each trajectory, in tokens."""
BRANCH = 20
"""Tokens of a further sample of each trajectory, the first 15 of them those of a turn."""
TRAJECTORIES = 3
"""Of each rank."""


def turns() -> dict[str, list[Any]]:
    """This rank's samples: turn after turn of each trajectory, all but a token of each a response.

    The response of a turn is what it is longer by than the one before, less one token.
    """
    seed = parallel_state.get_data_parallel_rank()
    generator = torch.Generator(device="cpu").manual_seed(seed)
    whole = [
        torch.randint(VOCABULARY, (TOTALS[-1],), generator=generator, device="cpu")
        for _ in range(TRAJECTORIES)
    ]
    before = [0, *TOTALS[:-1]]
    responses = [total - prompt - 1 for total, prompt in zip(TOTALS, before, strict=True)]
    return {
        "tokens": [part for tokens in whole for part in _samples(tokens)],
        "total_lengths": [*TOTALS, BRANCH] * TRAJECTORIES,
        "response_lengths": [*responses, BRANCH - 5] * TRAJECTORIES,
    }


def _samples(tokens: torch.Tensor) -> list[torch.Tensor]:
    branch = tokens[:BRANCH].clone()
    branch[TOTALS[-2] :] = (branch[TOTALS[-2] :] + 1) % VOCABULARY
    return [*(tokens[:total].clone() for total in TOTALS), branch]


def said_and_reported(dims: dict[str, Any], reference: str) -> dict[str, Any]:
    """What planning prints, and what plans, learnt costs and errors have of samples and trees."""
    shape, model = ParallelDims(**dims), small_model(dims, reference)
    # A row holds two trajectories.
    off, on = (
        arguments(
            shape,
            max_tokens_per_gpu=2 * TOTALS[-1],
            dynamic_batch_share_prefixes=flag,
            dynamic_batch_exchange=False,
        )
        for flag in (False, True)
    )
    data, count = turns(), (len(TOTALS) + 1) * TRAJECTORIES
    printed = {"off": _printed(lambda: get_data_iterator(off, model, data)[1])}
    printed["on"] = _printed(lambda: get_data_iterator(on, model, data)[1])
    marks = [torch.zeros(total) for total in data["total_lengths"]]
    is_second = parallel_state.get_data_parallel_rank() == 1
    marks[1][2] = float(is_second)
    marked = DEFAULT_SCHEMA.declare("mark", Kind.PER_TOKEN)
    printed["mark"] = _printed(
        lambda: get_data_iterator(on, model, data | {"mark": marks}, schema=marked)[1]
    )
    seconds = [[i for i in range(count) if i % 5 < 2], [i for i in range(count) if i % 5 >= 2]]
    cut = schedule_of(get_data_iterator(on, model, data, steps=seconds)[0])
    moved = arguments(shape, max_tokens_per_gpu=2 * TOTALS[-1], dynamic_batch_share_prefixes=True)
    printed["exchanged"] = _printed(lambda: get_data_iterator(moved, model, data)[1])
    iterators, counts = get_data_iterator(on, model, data)
    schedule = schedule_of(iterators)
    plan, lengths = schedule.step_plan(0)
    statistics = step_statistics(plan, lengths)
    optimizer = adam(model, distributed=False)

    def no_number(logits: torch.Tensor, row: Any, totals: Any) -> Any:
        del totals
        return sum(each.sum() for each in response_log_probs(logits, row)) * float("nan"), {}

    def step(loss: Any = no_number) -> Any:
        return train_step(loss, on, model, iterators, counts, optimizer)

    errors = {"not finite": _raised(step)}
    for exchanges in (False, True):
        small = arguments(
            shape,
            max_tokens_per_gpu=TOTALS[-1] - 1,
            dynamic_batch_share_prefixes=True,
            dynamic_batch_on_oversize="error",
            dynamic_batch_exchange=exchanges,
        )
        said = _raised(functools.partial(get_data_iterator, small, model, data))
        errors[f"oversize, {exchanges}"] = said
    # Dropout of a model that is evaluated alone shares nothing.
    evaluated = small_model(dims, reference)
    get_model_config(evaluated[0]).hidden_dropout = 0.1
    errors["evaluated"] = _raised(
        lambda: forward_only(log_probs_of, on, evaluated, iterators, counts)
    )
    errors["drawn"] = _raised(lambda: iterators[0].get_next(["tokens"]))
    for name, differs in (("agreeing field", False), ("other field", is_second)):
        values = [torch.full((total,), total * differs) for total in data["total_lengths"]]
        added = _raised(functools.partial(add_fields, iterators, {"beside": values}))
        errors[name] = added or _raised(lambda: step(_nothing))
    return {
        "printed": printed,
        "last": list(schedule.forest.last if schedule.forest else ()),
        "cut": 0 if cut.forest is None else cut.forest.tokens,
        "rows": schedule.rows_alone(0),
        "samples": statistics.num_samples,
        "tokens": [statistics.real_tokens, statistics.sample_tokens, statistics.keys],
        "errors": errors,
    }


def _nothing(logits: torch.Tensor, row: Any, totals: Any) -> Any:
    del row, totals
    return logits.sum() * 0.0, {}


def _printed(call: Callable[[], Any]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        call()
        call()
    return printed.getvalue()


def _raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except (CollectiveError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
