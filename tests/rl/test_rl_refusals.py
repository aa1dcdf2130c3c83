"""What the helpers of reinforcement learning refuse: a call, its error, its text."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from batch_cases import full_batch, make_samples
from ranks_worker import turns_of
from torch import ones, tensor, zeros

from mcore_batching.batch import (
    DEFAULT_SCHEMA,
    BatchError,
    Kind,
    OrderError,
    SchemaError,
    make_placeholder,
)
from mcore_batching.rl import (
    LeftPadded,
    compute_advantages,
    left_pad,
    pad_batch,
    real_samples,
    required_batch_multiple,
    response_values,
    sample_metrics,
)
from mcore_batching.rl.advantages import outcome_advantages
from mcore_batching.rl.real_samples import real_indices

Row = tuple[Callable[[], Any], type[Exception], str]
ONE = make_samples([(2, 1)])
TWO = make_samples([(3, 2), (2, 1)])
SIZES = {"data_parallel_size": 2, "samples_per_prompt": 8, "actor_mini_batch_size": 15}


ADVANTAGES: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    *[
        (
            {},
            {"estimator": bad},
            BatchError,
            f"^unknown estimator {bad!r}; set one of grpo, dr_grpo, rloo, reinforce_baseline$",
        )
        for bad in ("gae", "opo", "maxrl", "ppo", None)
    ],
    ({}, {"outcome": "first"}, BatchError, "outcome must be one of 'last', 'sum', got 'first'"),
    ({}, {"outcome": ones(2)}, BatchError, "outcome must be one of 'last', 'sum', got tensor"),
    (
        {"trajectory_ids": [5, 5, 5, 6, 7, 8]},
        {"step_wise": False},
        BatchError,
        r"trajectory 5 has 3 samples \(0, 1, 2\).*set step_wise=True",
    ),
    ({}, {"steps": [[0, 2], [2, 1]]}, OrderError, "each in one at most, got 2; pass"),
    ({}, {"steps": [[0, -1], [6]]}, OrderError, "steps of indices below 6, .* got -1, 6; pass"),
    ({}, {"steps": [[0.5]]}, OrderError, "expected integer steps, got 0.5"),
    ({}, {"steps": 3}, BatchError, "steps must be a sequence, got int 3"),
    ({"uids": None}, {}, SchemaError, "'uids': expected 6 values, .* found no such field"),
    ({"trajectory_ids": None}, {}, SchemaError, "'trajectory_ids'"),
    ({"loss_masks": [ones(1)] * 6}, {}, SchemaError, "'loss_masks', sample 0: expected 2 rows"),
    ({"loss_masks": []}, {}, SchemaError, "'loss_masks': expected 6 values"),
    ({"rewards": [1.0]}, {}, SchemaError, "'rewards': expected 6 values, .* found 1 values"),
    # float() would read "1".
    *[
        (
            {"rewards": [bad] + [1.0] * 5},
            {"outcome": "sum"},
            SchemaError,
            "'rewards', sample 0: expected one number",
        )
        for bad in ("1", b"1", None, [1.0, 2.0], "nan")
    ],
]


@pytest.mark.parametrize(("changed", "options", "error", "text"), ADVANTAGES)
def test_advantages_refused(
    changed: dict[str, Any], options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        compute_advantages(turns_of(0) | changed, **{"step_wise": True} | options)


def blocks_of(**blocks: torch.Tensor) -> Any:
    """Blocks of two samples, of 2 and 4 tokens."""
    others = {"total_lengths": [2, 4], "response_lengths": [1, 2]}
    return LeftPadded(
        blocks=blocks,
        others=others,
        total_lengths=(2, 4),
        response_lengths=(1, 2),
        schema=DEFAULT_SCHEMA,
    )


def left_padded(values: Any) -> Any:
    batch = make_samples([(3, 1), (3, 2)]) | {"x": values}
    return left_pad(batch, DEFAULT_SCHEMA.declare("x", Kind.PER_RESPONSE_TOKEN), pad_token_id=0)


def tagged(**fields: Any) -> dict[str, Any]:
    return make_samples([(2, 1)] * 3) | {"rewards": [1.0] * 3} | fields


def metrics_of(values: Any) -> Any:
    return sample_metrics({"total_lengths": [2, 2], "rewards": values}, ["rewards"])


REFUSALS: list[Row] = [
    *[
        (
            lambda bad=bad: outcome_advantages([1.0, bad], ["a", "a"], "grpo"),
            BatchError,
            f"reward {bad} of trajectory 1, group 'a', is not fini",
        )
        for bad in (math.nan, math.inf, -math.inf)
    ],
    # The left-padded layout.
    (
        lambda: response_values(
            left_pad(make_samples([(5, 1), (5, 3)]), pad_token_id=0), zeros(2, 5)
        ),
        BatchError,
        r"shape \[2, 3\].*right-aligned.*got \[2, 5\]",
    ),
    *[
        (
            lambda bad=bad: left_pad(ONE, pad_token_id=0, max_seq_len=bad),
            BatchError,
            "max_seq_len must be",
        )
        for bad in (0, 2.5, True)
    ],
    *[
        (
            lambda shape=shape: blocks_of(tokens=zeros(shape)),
            SchemaError,
            "'tokens': expected a block of 2 samples, 4 rows",
        )
        for shape in ((2, 5), (1, 4), (8,))
    ],
    (
        lambda: blocks_of(rewards=zeros(2, 4)),
        SchemaError,
        "'rewards': expected a block of 2 samples, 0 rows",
    ),
    *[
        (
            lambda odd=odd: left_padded([zeros(1, 4), odd]),
            SchemaError,
            r"'x', sample 1: expected type torch\.float32 ",
        )
        for odd in (zeros(2), zeros(2, 4).double())
    ],
    # Values are checked as any batch's.
    (
        lambda: left_pad(TWO | {"tokens": [[1j, 2, 3], [4, 5]]}, pad_token_id=0),
        SchemaError,
        "'tokens'.* real numbers",
    ),
    (
        lambda: left_pad(TWO | {"mine": [zeros(3), zeros(2) * 1j]}, pad_token_id=0),
        SchemaError,
        "'mine'",
    ),
    # A token's id is an integer.
    *[
        (lambda call=call, bad=bad: call(bad), BatchError, "pad_token_id must be a token's id")
        for bad in (True, 1.0, None, "1", math.nan, 2**63, tensor(True))
        for call in (
            lambda bad: make_placeholder(DEFAULT_SCHEMA, ONE, None, pad_token_id=bad),
            lambda bad: left_pad(ONE, pad_token_id=bad),
            lambda bad: pad_batch(ONE, 4, pad_token_id=bad),
        )
    ],
    # Padding samples.
    (
        lambda: pad_batch(make_samples([]), 4, pad_token_id=0),
        BatchError,
        "need a sample to be like, got none; leave the step out",
    ),
    *[
        (
            lambda name=name, bad=bad: pad_batch(
                ONE, **{"multiple": 2, "pad_token_id": 0} | {name: bad}
            ),
            BatchError,
            rf"{name} must be (an integer|[01] or more)",
        )
        for name in ("multiple", "identifier_seed")
        for bad in (-1, -2, 1.5, True)
    ],
    *[
        (
            lambda name=name, bad=bad: required_batch_multiple(**SIZES | {name: bad}),
            BatchError,
            f"{name} must be (an integer|1 or more)",
        )
        for name in (*SIZES, "critic_mini_batch_size")
        for bad in (0, 1.5, True)
    ],
    # Tags, and metrics of the samples without one.
    *[
        (
            lambda call=call: call(tagged(is_padding=[False, True])),
            SchemaError,
            "'is_padding': expected 3 values, .* 2 values",
        )
        for call in (real_indices, real_samples, lambda each: sample_metrics(each, ["rewards"]))
    ],
    *[
        (
            lambda bad=bad: real_indices(tagged(is_padding=[False, bad, False])),
            SchemaError,
            "'is_padding', sample 1",
        )
        # Of a text even "False" is true.
        for bad in ("False", [1, 2], np.array([0, 1]), math.nan, tensor(math.inf))
    ],
    *[
        (
            lambda bad=bad: real_samples(full_batch([(2, 1)] * 6) | {"meta_info": bad}),
            SchemaError,
            "meta_info.*6 values, one per sample",
        )
        for bad in ({"uids": ["a"] * 6}, "a text of 6", 3, list(range(5)))
    ],
    *[
        (lambda bad=bad: metrics_of(bad), SchemaError, "'rewards'.*: expected .* per sample")
        for bad in (None, [1.0], [1.0, 2.0, 3.0], [1.0, "a"], [1.0, "2"], [1.0, ones(2)])
    ],
    (
        lambda: metrics_of(ones(2, dtype=torch.complex64)),
        SchemaError,
        "'rewards', sample 0: expected one number per sample",
    ),
    *[
        (
            lambda bad=bad: sample_metrics(tagged(), bad),
            BatchError,
            f"fields must {text}",
        )
        for text, wrong in (
            ("be a sequence", ("rewards", 3, None, {0: 1}, {0, 1}, tensor(3))),
            ("hold names of fields", ([3],)),
        )
        for bad in wrong
    ],
]


@pytest.mark.parametrize(("call", "error", "text"), REFUSALS, ids=[row[-1] for row in REFUSALS])
def test_refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_what_resembles_it_passes() -> None:
    rewards = [True, tensor([0.0]), 1.0, 0.0, 0.0, 0.0]
    compute_advantages(turns_of(0) | {"rewards": rewards}, step_wise=True, outcome="sum")
    for seven in (7, np.int64(7), tensor(7)):
        assert left_pad(TWO, pad_token_id=seven).tokens[1, 0] == 7
    assert real_indices(tagged(is_padding=[tensor(True), None, False])) == [1, 2]
