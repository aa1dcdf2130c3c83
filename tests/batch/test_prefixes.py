"""Forests of samples that begin alike, against the definition, token by token."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_batching.batch import DEFAULT_SCHEMA, Kind, SchemaError
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.prefix_tree import find_forest_of, hashes_of_beginnings, require_shared
from mcore_batching.planning.forest import Forest, find_forest

SCHEMA = DEFAULT_SCHEMA.declare("weights", Kind.PER_TOKEN).declare(
    "recorded", Kind.ROUTED_EXPERTS, length_offset=-2
)


FIELDS = ("weights", "position_ids", "rollout_routed_experts", "recorded")


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


def test_equal_values_at_other_tokens_are_other_values() -> None:
    """Also by blocks: sums over all four values of a block are equal."""
    weights = [[0.0, 1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]]
    batch = batch_of([("abcde", 1), ("abcdef", 1)], weights=weights)
    hashes = hashes_of_beginnings(Columns.read(batch, SCHEMA), 4)
    assert find_forest([5, 6], hashes, block=4).tokens == 5 + 6


def drawn(seed: int) -> dict[str, Any]:
    """Samples that branch from one another at any place, some that differ in a field, or lack its
    last values."""
    random_ = random.Random(seed)
    texts = [""]
    for _ in range(random_.randint(1, 12)):
        begun = random_.choice(texts)
        begun = begun[: random_.randint(0, len(begun))]
        texts.append(begun + "".join(random_.choices("ab", (3, 1), k=random_.randint(0, 5))))
    turns = [(text, random_.randint(0, len(text))) for text in texts]
    rare, same = random_.choice((0, 0.1)), random_.choice((0, 1, math.nan))

    def values(*trailing: int, fewer: int = 0, same: float = 0) -> list[torch.Tensor]:
        made = []
        for text, _ in turns:
            value = torch.full((max(len(text) - fewer, 0), *trailing), same)
            if value.numel() and random_.random() < rare:
                value.view(-1)[random_.randrange(value.numel())] = 2
            made.append(value)
        return made

    batch = batch_of(
        turns,
        weights=values(same=same),
        position_ids=[each.long().T for each in values(2)],
        rollout_routed_experts=[each.long() for each in values(1, 2, fewer=1)],
        multimodal_train_inputs=[{"x": 1} if random_.random() < rare else None for _ in turns],
        is_padding=[random_.random() < rare for _ in turns],
    )
    if random_.random() < 0.3:
        batch["recorded"] = [each.long() for each in values(1, 1, fewer=2)]
    types = (torch.int64, torch.int32, torch.int16, torch.uint8)
    batch["tokens"] = [each.to(random_.choice(types)) for each in batch["tokens"]]
    return batch


def alike(batch: dict[str, Any], name: str, i: int, j: int, place: int) -> bool:
    """True if two samples have the same value of a field at a token, or both have none."""
    one, other = (
        each[..., place : place + 1] if name == "position_ids" else each[place : place + 1]
        for each in (batch[name][i], batch[name][j])
    )
    return one.shape == other.shape and torch.allclose(one, other, equal_nan=True)


def common(batch: dict[str, Any], units: Sequence[int], i: int, j: int) -> int:
    """Tokens that two samples may share, and the one behind them; by the definition."""
    if units[i] != units[j] or any(
        batch["is_padding"][k] or batch["multimodal_train_inputs"][k] for k in (i, j)
    ):
        return 0
    fields = [name for name in FIELDS if name in batch]
    shortest = min(batch["total_lengths"][i], batch["total_lengths"][j])
    for place in range(shortest):
        is_alike = batch["tokens"][i][place] == batch["tokens"][j][place]
        if not is_alike or (
            place and not all(alike(batch, name, i, j, place - 1) for name in fields)
        ):
            return place
    return shortest


def fewest(batch: dict[str, Any], units: Sequence[int], spare: float) -> int:
    """Tokens that must be computed: each sample's own, behind what it shares with one before it."""
    totals = batch["total_lengths"]
    kept = [
        i
        for i in range(len(totals))
        # Of equal samples the last stands for all.
        if not any(
            common(batch, units, i, j) == totals[i] and (totals[j] > totals[i] or j > i)
            for j in range(len(totals))
            if j != i and totals[i]
        )
    ]
    shared = [
        max((max(0, common(batch, units, i, j) - 1 - spare) for j in kept[:place]), default=0)
        for place, i in enumerate(kept)
    ]
    return sum(totals[i] for i in kept) - sum(shared)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2), st.integers(1, 4), st.booleans())
def test_any_forest_spells_its_samples_with_one_label_a_position(
    seed: int, spare: int, block: int, branches: bool
) -> None:
    batch = drawn(seed)
    totals, tokens = batch["total_lengths"], batch["tokens"]
    units = random.Random(seed).choices((0, 1), (4, 1), k=len(totals))
    options: dict[str, Any] = {"spare": spare, "branches": branches}
    forest = found(batch, units, **options)
    for sample, total in enumerate(totals):
        place = 0
        for node in map(forest.nodes.__getitem__, forest.path(sample)):
            assert node.start == place < min(node.end, total)
            place = node.end
            end = min(node.end + 1 + spare, total) if place < total else total
            # The tokens, and the labels of as many depths, of whichever sample they are taken from.
            assert tokens[node.sample][node.start : end].equal(tokens[sample][node.start : end])
        assert place >= total
    # Without branches only a sample that begins another shares its tokens.
    assert forest.tokens == fewest(batch, units, spare if branches else math.inf)
    assert branches or not forest.has_branches
    # By blocks of several tokens less is shared, never more.
    hashes = hashes_of_beginnings(Columns.read(batch, SCHEMA), block, units=units)
    coarse = find_forest(totals, hashes, block=block, **options)
    assert coarse.tokens >= forest.tokens
    assert block > 1 or coarse == forest


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_what_samples_of_a_forest_share_is_compared_value_by_value(seed: int) -> None:
    """A forest by the tokens alone is refused exactly where the fields would have made another."""
    batch = drawn(seed)
    names = "tokens", "total_lengths", "response_lengths"
    by_tokens, columns = found({name: batch[name] for name in names}), Columns.read(batch, SCHEMA)
    batch["is_padding"] = [False] * len(batch["tokens"])  # these are never sent in one tree
    own = found(batch)
    if own.tokens != by_tokens.tokens:
        with pytest.raises(SchemaError):
            require_shared(by_tokens, columns)
    try:
        require_shared(by_tokens, columns)
        return
    except SchemaError as error:
        caught = error
    assert own != by_tokens  # as many tokens may be shared in another way
    assert re.search(r"field '\w+', sample \d+: expected what sample \d+, ", str(caught))
    key = caught.key
    assert key in (*FIELDS, "multimodal_train_inputs")
    i, j = (int(each) for each in re.findall(r"sample (\d+)", str(caught)))
    places = range(max(batch["total_lengths"]))
    assert key not in FIELDS or not all(alike(batch, key, i, j, place) for place in places)
