"""Forests of samples that begin alike, against the definition, token by token."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_batching.batch import DEFAULT_SCHEMA, Kind, SchemaError
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.prefix_tree import (
    find_forest_of,
    hashes_of_beginnings,
    require_shared,
)
from mcore_batching.planning.forest import Forest, find_forest

SCHEMA = DEFAULT_SCHEMA.declare("weights", Kind.PER_TOKEN)


def batch_of(turns: Sequence[tuple[str, int]], **fields: Sequence[Any]) -> dict[str, Any]:
    """Samples of tokens, a letter each, and the tokens of their responses."""
    batch = {
        "tokens": [[ord(letter) for letter in text] for text, _ in turns],
        "total_lengths": [len(text) for text, _ in turns],
        "response_lengths": [response for _, response in turns],
    }
    return SCHEMA.validate(batch | fields)


def found(batch: dict[str, Any], units: Sequence[int] | None = None, **options: Any) -> Forest:
    columns = Columns.read(batch, SCHEMA)
    forest = find_forest_of(columns, units or [0] * len(batch["tokens"]), **options)
    require_shared(forest, columns)
    return forest


def spelt(forest: Forest, batch: dict[str, Any]) -> list[str]:
    """The tokens of each node, in brackets behind those of its parents."""
    texts = ["".join(map(chr, tokens.tolist())) for tokens in batch["tokens"]]
    made: list[str] = []
    for node in forest.nodes:
        before = "" if node.parent < 0 else made[node.parent].replace("[", "").replace("]", "")
        made.append(f"{before}[{texts[node.sample][node.start : node.end]}]")
    return made


def test_a_shared_node_ends_one_token_short_of_what_is_common() -> None:
    batch = batch_of([("abcdghi", 3), ("abcdef", 2), ("x", 0), ("", 0)])
    forest = found(batch)
    assert spelt(forest, batch) == ["[abc]", "abc[dghi]", "abc[def]", "[x]"]
    assert [forest.path(sample) for sample in range(4)] == [[0, 1], [0, 2], [3], []]
    deeper = found(batch, spare=1)
    assert spelt(deeper, batch) == ["[ab]", "ab[cdghi]", "ab[cdef]", "[x]"]


def test_without_branches_only_turns_share() -> None:
    batch = batch_of([("abcd", 1), ("abce", 1), ("ab", 1)])
    forest = found(batch, branches=False)
    assert (forest.tokens, forest.has_branches) == (8, False)


def test_samples_of_different_units_share_nothing() -> None:
    batch = batch_of([("abcd", 1), ("abcd", 1), ("abce", 1)])
    assert found(batch, [0, 1, 1]).tokens == 4 + 6


AGREEING: dict[str, list[list[Any]]] = {
    "weights": [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]],
    "position_ids": [[[0, 1, 2], [5, 6, 7]], [[0, 1, 2, 3], [5, 6, 7, 8]]],
    "rollout_routed_experts": [[[[1]], [[1]]], [[[1]], [[1]], [[2]]]],
}


@pytest.mark.parametrize("name", AGREEING)
def test_values_per_token_must_agree_where_tokens_are_shared(name: str) -> None:
    turns = [("abc", 1), ("abcd", 1)]
    fields = AGREEING[name]
    assert found(batch_of(turns, **{name: fields})).tokens == 4
    other = torch.tensor(fields[0])
    other.view(-1)[1] += 1  # of the second token
    batch = batch_of(turns, **{name: [other, fields[1]]})
    forest = found(batch)
    assert spelt(forest, batch) == ["[a]", "a[bc]", "a[bcd]"]
    # Of a forest that was found before.
    same = found(batch_of(turns, **{name: fields}))
    with pytest.raises(SchemaError, match=f"field '{name}', sample 0: expected what sample 1, "):
        require_shared(same, Columns.read(batch, SCHEMA))


def test_equal_values_at_other_tokens_are_other_values() -> None:
    weights = [[0.0, 1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]]
    batch = batch_of([("abcde", 1), ("abcdef", 1)], weights=weights)
    assert spelt(found(batch), batch) == ["[a]", "a[bcde]", "a[bcdef]"]
    # By blocks, too: sums over all four values of a block are equal.
    hashes = hashes_of_beginnings(Columns.read(batch, SCHEMA), 4)
    assert find_forest([5, 6], hashes, block=4).tokens == 5 + 6


def test_no_value_agrees_with_no_value_and_nan_with_nan() -> None:
    weights = [torch.tensor([1, math.nan, 2]), torch.tensor([1, math.nan, 2, 3])]
    assert found(batch_of([("abc", 1), ("abcd", 1)], weights=weights)).tokens == 4
    fields = {"rollout_routed_experts": [[], [[[1]]]]}
    assert found(batch_of([("a", 0), ("ab", 1)], **fields)).tokens == 2


def test_a_value_that_a_sample_lacks_is_another_value() -> None:
    schema = SCHEMA.declare("recorded", Kind.ROUTED_EXPERTS, length_offset=-2)
    values = [torch.zeros(n - 2, 1, 1, dtype=torch.int64) for n in (3, 3, 5)]
    batch = batch_of([("abc", 1), ("abc", 0), ("abcde", 1)]) | {"recorded": values}
    columns = Columns.read(batch, schema)
    forest = find_forest_of(columns, [0, 0, 0])
    require_shared(forest, columns)
    assert (forest.tokens, forest.last[0]) == (1 + 2 + 4, forest.last[1])
    without = {name: value for name, value in batch.items() if name != "recorded"}
    same = found(without)
    with pytest.raises(SchemaError, match="field 'recorded'"):
        require_shared(same, columns)


def test_padding_and_multimodal_samples_stay_alone() -> None:
    turns = [("ab", 1), ("abcd", 1), ("abcdef", 1)]
    assert found(batch_of(turns, is_padding=[1, 0, 0])).tokens == 2 + 6
    image = {"pixel_values": torch.ones(1)}
    plain = found(batch_of(turns))
    for images, tokens in (([image, {}, None], 2 + 6), ([None, {}, image], 4 + 6)):
        batch = batch_of(turns, multimodal_train_inputs=images)
        assert found(batch).tokens == tokens
        with pytest.raises(SchemaError, match="field 'multimodal_train_inputs'"):
            require_shared(plain, Columns.read(batch, SCHEMA))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_tokens_of_any_integer_type(dtype: torch.dtype) -> None:
    batch = batch_of([("ab", 1), ("abcd", 1), ("b", 1)])
    batch["tokens"] = [batch["tokens"][0].to(dtype), *batch["tokens"][1:]]
    assert found(batch).tokens == 5


def drawn(seed: int) -> dict[str, Any]:
    """Samples that branch from one another at any place, some that differ in a field."""
    random_ = random.Random(seed)
    texts = [""]
    for _ in range(random_.randint(1, 12)):
        begun = random_.choice(texts)
        begun = begun[: random_.randint(0, len(begun))]
        texts.append(begun + "".join(random_.choices("ab", (3, 1), k=random_.randint(0, 5))))
    turns = [(text, random_.randint(0, len(text))) for text in texts]
    rare = random_.choice((0, 0.1))

    def values(*trailing: int, fewer: int = 0) -> list[torch.Tensor]:
        made = []
        for text, _ in turns:
            value = torch.zeros(max(len(text) - fewer, 0), *trailing)
            if value.numel() and random_.random() < rare:
                value.view(-1)[random_.randrange(value.numel())] = 1
            made.append(value)
        return made

    return batch_of(
        turns,
        weights=values(),
        position_ids=[each.long().T for each in values(2)],
        rollout_routed_experts=[each.long() for each in values(1, 2, fewer=1)],
        multimodal_train_inputs=[{"x": 1} if random_.random() < rare else None for _ in turns],
        is_padding=[random_.random() < rare for _ in turns],
    )


def common(batch: dict[str, Any], i: int, j: int) -> int:
    """Tokens that two samples may share, and the one behind them; by the definition."""
    if any(batch["is_padding"][k] or batch["multimodal_train_inputs"][k] for k in (i, j)):
        return 0
    for place in range(min(batch["total_lengths"][i], batch["total_lengths"][j])):
        before = place - 1
        if batch["tokens"][i][place] != batch["tokens"][j][place] or (
            before >= 0
            and not (
                batch["weights"][i][before] == batch["weights"][j][before]
                and batch["position_ids"][i][:, before].equal(batch["position_ids"][j][:, before])
                and batch["rollout_routed_experts"][i][before].equal(
                    batch["rollout_routed_experts"][j][before]
                )
            )
        ):
            return place
    return min(batch["total_lengths"][i], batch["total_lengths"][j])


def fewest(batch: dict[str, Any], spare: int) -> int:
    """Tokens that must be computed: each sample's own, behind what it shares with one before it."""
    totals = batch["total_lengths"]
    kept = [
        i
        for i in range(len(totals))
        # Of equal samples the last stands for all.
        if not any(
            common(batch, i, j) == totals[i] and (totals[j] > totals[i] or j > i)
            for j in range(len(totals))
            if j != i and totals[i]
        )
    ]
    shared = [
        max((max(0, common(batch, i, j) - 1 - spare) for j in kept[:place]), default=0)
        for place, i in enumerate(kept)
    ]
    return sum(totals[i] for i in kept) - sum(shared)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2), st.integers(1, 4))
def test_any_forest_spells_its_samples_with_one_label_a_position(
    seed: int, spare: int, block: int
) -> None:
    batch = drawn(seed)
    totals, tokens = batch["total_lengths"], batch["tokens"]
    forest = found(batch, spare=spare)
    for sample, total in enumerate(totals):
        place = 0
        for node in map(forest.nodes.__getitem__, forest.path(sample)):
            assert node.start == place < node.end
            place = node.end
            end = min(node.end + 1 + spare, total) if place < total else total
            # The tokens, and the labels of as many depths, of whichever sample they are taken from.
            assert tokens[node.sample][node.start : end].equal(tokens[sample][node.start : end])
        assert place >= total
    assert forest.tokens == fewest(batch, spare)
    # By blocks of several tokens less is shared, never more.
    hashes = hashes_of_beginnings(Columns.read(batch, SCHEMA), block)
    coarse = find_forest(totals, hashes, block=block, spare=spare)
    assert coarse.tokens >= forest.tokens
    assert block > 1 or coarse == find_forest(totals, hashes, spare=spare)
