"""Hosts of samples that begin others, against the definition and exact matching."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_batching.batch import DEFAULT_SCHEMA, Kind
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.prefix_tree import Hosts, find_hosts

SCHEMA = DEFAULT_SCHEMA.declare("weights", Kind.PER_TOKEN)
Steps = list[list[int]]


def batch_of(turns: Sequence[tuple[str, int]], **fields: Sequence[Any]) -> dict[str, Any]:
    """Samples of tokens, a letter each, and the tokens of their responses."""
    batch = {
        "tokens": [[ord(letter) for letter in text] for text, _ in turns],
        "total_lengths": [len(text) for text, _ in turns],
        "response_lengths": [response for _, response in turns],
    }
    return SCHEMA.validate(batch | fields)


def found(batch: dict[str, Any], steps: Steps | None = None) -> Hosts:
    return find_hosts(Columns.read(batch, SCHEMA), steps=steps)


def test_turns_are_computed_in_the_last_one() -> None:
    hosts = found(batch_of([("ab", 1), ("abcdef", 1), ("abcd", 2), ("ax", 1), ("", 0)]))
    assert hosts == Hosts(host=(1, 1, 1, 3, 4), alone={}, tokens=14, computed=8)


def test_a_turn_that_was_sampled_twice_has_another_host() -> None:
    turns = [("ab", 1), ("ab", 1), ("abcd", 1), ("abcd", 1), ("abcdef", 1), ("abcdef", 1)]
    hosts = found(batch_of(turns))
    assert (len(set(hosts.host)), hosts.computed, hosts.alone) == (2, 12, {"responses overlap": 1})


def test_responses_that_share_a_token_stay_apart() -> None:
    for responses in ((1, 3), (0, 3), (2, 4)):
        own, others = responses
        hosts = found(batch_of([("ab", own), ("abcd", others)]))
        assert (hosts.host, hosts.alone) == ((0, 1), {"responses overlap": 1})


def test_a_step_ends_a_chain() -> None:
    batch = batch_of([("ab", 1), ("abcd", 1), ("abcdef", 1), ("abcdefgh", 1)])
    hosts = found(batch, [[0, 1], [2, 3]])
    assert (hosts.host, hosts.alone) == ((1, 1, 3, 3), {"another optimizer step": 1})


AGREEING: dict[str, list[list[Any]]] = {
    "weights": [[1.0, 2.0], [1.0, 2.0, 3.0]],
    "position_ids": [[[0, 1], [5, 6]], [[0, 1, 2], [5, 6, 7]]],
    "rollout_routed_experts": [[[[1]]], [[[1]], [[2]]]],
}


@pytest.mark.parametrize("name", AGREEING)
def test_values_per_token_must_agree_where_tokens_are_shared(name: str) -> None:
    turns = [("ab", 1), ("abc", 1)]
    fields = AGREEING[name]
    assert found(batch_of(turns, **{name: fields})).host == (1, 1)
    other = torch.tensor(fields[0])
    other.view(-1)[-1] += 1
    hosts = found(batch_of(turns, **{name: [other, fields[1]]}))
    assert (hosts.host, hosts.alone) == ((0, 1), {f"field {name!r} differs": 1})


def test_values_of_other_kinds_need_not_agree() -> None:
    fields = {"log_probs": [[0.1], [0.2]], "rewards": [0.0, 1.0], "uids": ["a", "b"]}
    assert found(batch_of([("ab", 1), ("abc", 1)], **fields)).host == (1, 1)


def test_no_values_agree_with_no_values_and_types_need_not_agree() -> None:
    for dtype in (torch.float64, torch.float32):
        weights = [torch.tensor([1, math.nan]), torch.tensor([1, math.nan, 3], dtype=dtype)]
        assert found(batch_of([("ab", 1), ("abc", 1)], weights=weights)).host == (1, 1)


def test_a_sample_of_one_token_has_no_recorded_experts_to_agree() -> None:
    fields = {"rollout_routed_experts": [[], [[[1]]]]}
    assert found(batch_of([("a", 0), ("ab", 1)], **fields)).host == (1, 1)


@pytest.mark.parametrize("offset", [-1, -2])
def test_a_value_that_only_the_host_has_is_of_a_token_that_predicts_nothing(offset: int) -> None:
    schema = SCHEMA.declare("recorded", Kind.ROUTED_EXPERTS, length_offset=offset)
    values = [torch.zeros(n + offset, 1, 1, dtype=torch.int64) for n in (3, 3, 5)]
    batch = batch_of([("abc", 1), ("abc", 0), ("abcde", 1)]) | {"recorded": values}
    hosts = find_hosts(Columns.read(batch, schema))
    assert hosts.host == ((2, 2, 2) if offset == -1 else (1, 1, 2))


def test_multimodal_samples_stay_alone_and_are_counted() -> None:
    image = {"pixel_values": torch.ones(1)}
    turns = [("ab", 1), ("abcd", 1), ("abcdef", 1)]
    for given_, host in (([image, {}, None], (0, 2, 2)), ([None, {}, image], (1, 1, 2))):
        hosts = found(batch_of(turns, multimodal_train_inputs=given_))
        assert (hosts.host, hosts.alone) == (host, {"multimodal inputs": 1})


def test_padding_samples_stay_alone_in_silence() -> None:
    hosts = found(batch_of([("ab", 1), ("abcd", 1), ("abcdef", 1)], is_padding=[1, 0, 0]))
    assert (hosts.host, hosts.alone) == ((0, 2, 2), {})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_tokens_of_any_integer_type(dtype: torch.dtype) -> None:
    batch = batch_of([("ab", 1), ("abcd", 1), ("b", 1)])
    batch["tokens"] = [batch["tokens"][0].to(dtype), *batch["tokens"][1:]]
    assert found(batch).host == (1, 1, 2)


def drawn(seed: int) -> tuple[dict[str, Any], Steps]:
    """A few trajectories' turns, shuffled, some twice, some that differ in a field."""
    random_ = random.Random(seed)
    turns: list[tuple[str, int]] = []
    for _ in range(random_.randint(1, 3)):
        text = ""
        for _ in range(random_.randint(1, 5)):
            text += "".join(random_.choices("ab", (4, 1), k=random_.randint(0, 2)))
            response = random_.choice((0, 1, 1, 2))
            text += "".join(random_.choices("ab", (4, 1), k=response))
            response = random_.choice((response, random_.randint(0, len(text))))
            turns += [(text, response)] * random_.choice((1, 1, 1, 2))
    turns = random_.sample(turns, min(len(turns), 10))
    rare = random_.choice((0, 0.1))

    def values(*trailing: int, fewer: int = 0) -> list[torch.Tensor]:
        made = []
        for text, _ in turns:
            value = torch.zeros(max(len(text) - fewer, 0), *trailing)
            if value.numel() and random_.random() < rare:
                value.view(-1)[random_.randrange(value.numel())] = 1
            made.append(value)
        return made

    batch = batch_of(
        turns,
        weights=values(),
        position_ids=[each.long().T for each in values(2)],
        rollout_routed_experts=[each.long() for each in values(1, 2, fewer=1)],
        multimodal_train_inputs=[{"x": 1} if random_.random() < rare else None for _ in turns],
        is_padding=[random_.random() < rare for _ in turns],
    )
    num_steps = random_.choice((1, 1, 2))
    steps: Steps = [[] for _ in range(num_steps)]
    for i in range(len(turns)):
        steps[random_.randrange(num_steps)].append(i)
    return batch, steps


def may_follow(batch: dict[str, Any], steps: Steps, i: int, j: int) -> bool:
    """True if sample i may come before sample j in a chain; by the definition, token by token."""
    total = batch["total_lengths"][i]
    prompt = batch["total_lengths"][j] - batch["response_lengths"][j]
    same = (total, batch["response_lengths"][i]) == (
        batch["total_lengths"][j],
        batch["response_lengths"][j],
    )
    if i == j or (same and i > j) or not 0 < total <= prompt:
        return False
    return (
        any({i, j} <= set(step) for step in steps)
        and not any(batch["is_padding"][k] or batch["multimodal_train_inputs"][k] for k in (i, j))
        and all(
            batch["tokens"][i][t] == batch["tokens"][j][t]
            and batch["weights"][i][t] == batch["weights"][j][t]
            and batch["position_ids"][i][:, t].equal(batch["position_ids"][j][:, t])
            for t in range(total)
        )
        and all(
            batch["rollout_routed_experts"][i][t].equal(batch["rollout_routed_experts"][j][t])
            for t in range(total - 1)
        )
    )


def least(batch: dict[str, Any], steps: Steps) -> tuple[int, int]:
    """Fewest possible hosts and their tokens.

    Chains that cover an order are the pairs of a matching, and longest samples first, augmenting
    paths leave the fewest tokens unmatched.
    """
    totals = batch["total_lengths"]
    count = range(len(totals))
    next_of = {i: [j for j in count if may_follow(batch, steps, i, j)] for i in count}
    taken: dict[int, int] = {}

    def is_matched(i: int, tried: set[int]) -> bool:
        for j in next_of[i]:
            if j not in tried:
                tried.add(j)
                if j not in taken or is_matched(taken[j], tried):
                    taken[j] = i
                    return True
        return False

    for i in sorted(count, key=totals.__getitem__, reverse=True):
        is_matched(i, set())
    alone = [totals[i] for i in count if i not in taken.values()]
    return len(alone), sum(alone)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_hosts_obey_the_rule_and_are_the_fewest_possible(seed: int) -> None:
    batch, steps = drawn(seed)
    hosts = found(batch, steps)
    totals, count = batch["total_lengths"], range(len(batch["tokens"]))
    for host in set(hosts.host):
        assert hosts.host[host] == host
        chain = sorted(
            (i for i in count if hosts.host[i] == host),
            key=lambda i: (totals[i], -batch["response_lengths"][i], i),
        )
        for own, following in pairwise(chain):
            assert may_follow(batch, steps, own, following)
    assert (len(set(hosts.host)), hosts.computed) == least(batch, steps)
    assert hosts.tokens == sum(totals)


def test_turns_are_found_among_eight_million_tokens() -> None:
    trajectory = torch.arange(40_000)
    tokens = [trajectory[: 2_000 * (turn + 1)] + base for base in range(20) for turn in range(20)]
    random.Random(0).shuffle(tokens)
    lengths = {
        "total_lengths": [len(each) for each in tokens],
        "response_lengths": [100] * len(tokens),
    }
    hosts = find_hosts(Columns.read({"tokens": tokens} | lengths, SCHEMA))
    assert (hosts.tokens, hosts.computed) == (8_400_000, 800_000)
