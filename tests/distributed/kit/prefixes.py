"""Turns of trajectories, and branches, that share tokens: what is printed of them, and reported."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from kit.calls import Calls
from kit.guarantees import error_of, on_all_ranks, printed
from kit.model import small_model
from kit.samples import VOCABULARY
from mcore_batching.batch import DEFAULT_SCHEMA, Kind
from mcore_batching.megatron import add_fields, response_log_probs, schedule_of
from mcore_batching.megatron.job import job_of
from mcore_batching.planning import ParallelDims, step_statistics

TOTALS = [4, 9, 15, 24]
"""Turns of each trajectory, in tokens."""
BRANCH = 20
"""Tokens of a further sample of each trajectory, the first 15 of them those of a turn."""
TRAJECTORIES = 3
"""Of each rank."""
SAMPLES = len(TOTALS) + 1
TOKENS = 2 * TRAJECTORIES * (sum(TOTALS) + BRANCH)
SHARED = TOTALS[-2] - 1
"""A branch begins with the last token that it has in common with a turn."""
COMPUTED = 2 * TRAJECTORIES * (TOTALS[-1] + BRANCH - SHARED)
KEYS = 2 * TRAJECTORIES * (SHARED + TOTALS[-1] + BRANCH)


def turns() -> dict[str, list[Any]]:
    """This rank's samples: turn after turn of each trajectory, all but a token of each a response.

    The response of a turn is what it is longer by than the one before, less one token.
    """
    seed = parallel_state.get_data_parallel_rank()
    generator = torch.Generator(device="cpu").manual_seed(seed)
    tokens = []
    for _ in range(TRAJECTORIES):
        whole = torch.randint(VOCABULARY, TOTALS[-1:], generator=generator, device="cpu")
        branch = whole[:BRANCH].clone()
        branch[TOTALS[-2] :] = (branch[TOTALS[-2] :] + 1) % VOCABULARY
        tokens += [*(whole[:total].clone() for total in TOTALS), branch]
    responses = [total - prompt - 1 for total, prompt in zip(TOTALS, [0, *TOTALS], strict=False)]
    return {
        "tokens": tokens,
        "total_lengths": [*TOTALS, BRANCH] * TRAJECTORIES,
        "response_lengths": [*responses, BRANCH - 5] * TRAJECTORIES,
    }


def said_and_reported(dims: ParallelDims) -> None:
    """What planning prints, and what plans, learnt costs and errors have of samples and trees."""
    # A row holds two trajectories.
    flags = {"max_tokens_per_gpu": 2 * TOTALS[-1], "dynamic_batch_share_prefixes": True}
    calls = Calls(dims, dynamic_batch_exchange=False, **flags)
    calls.data, count = turns(), SAMPLES * TRAJECTORIES
    is_second = parallel_state.get_data_parallel_rank() == 1
    marks = [torch.zeros(total) for total in calls.data["total_lengths"]]
    marks[1][2] = float(is_second)
    marked = DEFAULT_SCHEMA.declare("mark", Kind.PER_TOKEN)
    saved = f"{TOKENS:,} tokens of samples computed as {COMPUTED:,}: {TOKENS / COMPUTED:.1f}x fewer"
    apart = "tokens that samples have in common are computed for each"
    for text, lines, call in (
        ("", 0, lambda: calls.planned(dynamic_batch_share_prefixes=False)[1]),
        # And fewer tokens saved.
        (apart, 2, lambda: calls.plan_of(calls.data | {"mark": marks}, schema=marked)[1]),
        (saved, 1, lambda: calls.plan()[1]),
        # And that the flag is the default.
        (saved, 2, lambda: calls.planned(dynamic_batch_exchange=True)[1]),
    ):
        job_of().memory.said.clear()
        said = printed(call, call)
        assert (text in said) if is_second else (said == "")
        assert said.count("\n") == (lines if is_second else 0), said
    seconds = [[i for i in range(count) if i % 5 < 2], [i for i in range(count) if i % 5 >= 2]]
    cut = schedule_of(calls.planned_with(steps=seconds)[0])
    assert cut.forest is not None
    assert cut.forest.tokens == TRAJECTORIES * (TOTALS[1] + TOTALS[-1] + BRANCH - SHARED)
    iterators, counts = calls.plan()
    schedule = schedule_of(iterators)
    statistics = step_statistics(*schedule.step_plan(0))
    assert statistics.num_samples == 2 * count
    found = [statistics.real_tokens, statistics.sample_tokens, statistics.keys]
    assert found == [COMPUTED, TOKENS, KEYS]
    assert schedule.forest is not None
    for trajectory in range(TRAJECTORIES):
        # The shared node, the last turn's and the branch's.
        *begun, turn, branch = list(schedule.forest.last)[trajectory * SAMPLES :][:SAMPLES]
        assert (turn, branch) == (3 * trajectory + 1, 3 * trajectory + 2)
        assert {*begun} <= {turn, branch}
    assert not any(schedule.rows_alone(0))  # costs are learnt of rows without trees

    def no_number(logits: torch.Tensor, row: Any, totals: Any) -> Any:
        return sum(each.sum() for each in response_log_probs(logits, row)) * float("nan"), {}

    def nothing(logits: torch.Tensor, row: Any, totals: Any) -> Any:
        return logits.sum() * 0.0, {}

    planned = iterators, counts
    assert "samples [0, 1, 2, 3" in error_of(lambda: calls.train_planned(planned, no_number))
    small = {"max_tokens_per_gpu": TOTALS[-1] - 1, "dynamic_batch_on_oversize": "error"}
    for exchanges in (False, True):
        # The first trajectory's last turn, as its samples are numbered.
        plan = functools.partial(calls.planned, **small, dynamic_batch_exchange=exchanges)
        assert f"sample {len(TOTALS) - 1} has {TOTALS[-1]} tokens" in error_of(plan)
    # Dropout of a model that is evaluated alone shares nothing.
    evaluated = small_model(dims)
    get_model_config(evaluated[0]).hidden_dropout = 0.1
    calls.forward(model=evaluated, data_iterator=iterators, num_microbatches=counts)
    drawn = error_of(lambda: iterators[0].get_next(["tokens"]))
    assert "unset --dynamic-batch-share-prefixes" in drawn
    for differs in (False, is_second):
        values = [torch.full((total,), total * differs) for total in calls.data["total_lengths"]]
        added = error_of(functools.partial(add_fields, iterators, {"beside": values}))
        said = added or error_of(lambda: calls.train_planned(planned, nothing))
        others = on_all_ranks(bool(differs))
        assert said.startswith("PlanningFailedError") == any(others)
        assert ("field 'beside', sample " in said) == any(others)
