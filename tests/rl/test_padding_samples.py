"""The guarantees of `pad_batch`, and the faults of padding that others had."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from batch_cases import equal, full_batch, make_samples, sample_shapes
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_batching.batch import (
    DEFAULT_SCHEMA,
    Fill,
    Kind,
    Schema,
    SchemaError,
)
from mcore_batching.rl import pad_batch, required_batch_multiple

PAD, EOS = 5, 7


def padded(count: int = 3, multiple: int = 5, **arguments: Any) -> dict[str, Any]:
    batch = full_batch([(4 + i, 2 + i % 2) for i in range(count)])
    return pad_batch(batch, multiple, pad_token_id=PAD, **arguments)


@settings(max_examples=60)
@given(sample_shapes(), st.integers(1, 40), st.integers(0, 99))
def test_divisible_minimal_and_untouched(
    shapes: list[tuple[int, int]], multiple: int, seed: int
) -> None:
    batch = full_batch(shapes, seed)
    before = copy.deepcopy(batch)
    result = pad_batch(batch, multiple, pad_token_id=PAD, response_token_id=EOS)
    size = len(result["tokens"])
    assert size % multiple == 0
    assert len(shapes) <= size < len(shapes) + multiple
    assert equal(batch, before)
    assert result["is_padding"] == [False] * len(shapes) + [True] * (size - len(shapes))
    assert result["returns"] is None
    for key, values in batch.items():
        if values is not None:
            assert len(result[key]) == size
            assert result[key] is not values
            assert all(a is b for a, b in zip(result[key], values, strict=False))
    assert len(set(result["uids"][len(shapes) :])) == size - len(shapes)
    assert not set(result["uids"][len(shapes) :]) & set(batch["uids"])
    DEFAULT_SCHEMA.validate(result)
    # Tags of the batch stay, and all identifiers are new.
    again = pad_batch(result, size + 3, pad_token_id=PAD)
    assert again["is_padding"] == [*result["is_padding"], *[True] * 3]
    assert len(set(again["uids"][len(shapes) :])) == size + 3 - len(shapes)
    assert len(set(again["sample_indices"])) == size + 3


def test_fabricated_values_share_memory_with_nothing() -> None:
    batch = padded(3, 6)
    before = copy.deepcopy(batch)
    for key in ("tokens", "values", "position_ids", "rollout_routed_experts", "loss_masks"):
        batch[key][3] += 1
    for key in batch:
        if batch[key] is not None:
            assert equal(batch[key][:3] + batch[key][4:], before[key][:3] + before[key][4:]), key
    assert batch["multimodal_train_inputs"][3] is not batch["multimodal_train_inputs"][4]


@pytest.mark.parametrize(
    ("uids", "kind"),
    [
        (["a", "padding-0"], str),
        ([4, 4], int),
        ([torch.tensor(3), torch.tensor(-1)], int),
        ([3, 3], int),
        ([3, "x"], str),
        ([None, None], str),
        ([("a", 1), ("b", 2)], str),
    ],
)
def test_new_uids_are_of_the_type_of_the_others(uids: list[Any], kind: type) -> None:
    names = ("uids", "trajectory_ids", "uid", "prompt_uid")  # the last two are verl's and SkyRL's
    batch = make_samples([(4, 2), (3, 1)]) | dict.fromkeys(names, uids)
    result = pad_batch(batch, 4, pad_token_id=PAD)
    fresh = result["uids"][2:]
    assert all(result[name][2:] == fresh for name in names)
    assert {type(each) for each in fresh} == {kind}
    assert len({*map(str, fresh), *map(str, uids)}) == 2 + len({*map(str, uids)})
    assert all(-(2**63) <= each < 0 for each in fresh if isinstance(each, int))


@given(st.integers(0, 2**70), st.integers(1, 4))
def test_identifiers_are_new_in_every_call_and_repeat_with_a_seed(seed: int, num_new: int) -> None:
    """Two batches of equal content, joined after they were padded, had padding samples of one
    uid."""
    batch = full_batch([(4, 2), (5, 3)])

    def identifiers(given_batch: dict[str, Any], **arguments: Any) -> list[Any]:
        size = len(given_batch["tokens"])
        result = pad_batch(given_batch, size + num_new, pad_token_id=PAD, **arguments)
        return [*result["uids"][size:], *result["sample_indices"][size:]]

    assert len({*identifiers(batch), *identifiers(copy.deepcopy(batch))}) == 4 * num_new
    seeded = identifiers(batch, identifier_seed=seed)
    assert identifiers(copy.deepcopy(batch), identifier_seed=seed) == seeded
    assert not {*seeded} & {*identifiers(batch, identifier_seed=seed + 1)}
    # A batch that is padded again, with the same seed, has each once.
    padded_once = pad_batch(batch, 2 + num_new, pad_token_id=PAD, identifier_seed=seed)
    again = identifiers(padded_once, identifier_seed=seed)
    assert len({*seeded, *again}) == 4 * num_new


def test_identifiers_leave_the_random_state_of_the_training_alone() -> None:
    batch = full_batch([(4, 2)])
    states = random.getstate(), torch.get_rng_state()
    for seed in (None, 3):
        pad_batch(batch, 4, pad_token_id=PAD, identifier_seed=seed)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


BFLOAT = torch.bfloat16
FILLS: list[tuple[str, Any, Any]] = [
    ("total_lengths", [4, 3], 2),
    ("response_lengths", [2, 1], 1),
    ("tokens", [[4, 5, 6, 7], [4, 5, 6]], torch.tensor([PAD, EOS])),
    ("loss_masks", [[1, 1], [1]], torch.tensor([0])),
    ("rewards", [1.0, 2.0], 0.0),
    ("max_seq_lens", [64, 64], 2),
    ("advantages", [torch.ones(2).double(), torch.ones(1).double()], torch.zeros(1).double()),
    ("values", [torch.ones(n, 2, dtype=BFLOAT) for n in (2, 1)], torch.zeros(1, 2, dtype=BFLOAT)),
    ("rollout_top_p_token_offsets", [[0, 1, 2], [0, 1]], torch.tensor([0, 0])),
    ("metadata", [{"turn": 1}, {"turn": 2}], None),
    ("multimodal_train_inputs", [{"pixels": torch.ones(4)}, None], {}),
    # Positions have the axes of the batch's, and one expert for each slot.
    ("position_ids", [torch.arange(4), torch.arange(3)], torch.tensor([0, 1])),
    ("position_ids", [[0, 1, 2, 3], [0, 1, 2]], torch.tensor([0, 1])),
    ("position_ids", [[[0] * 4] * 2, [[0] * 3] * 2], torch.tensor([[0, 1]] * 2)),
    (
        "position_ids",
        [torch.zeros(3, n, dtype=torch.int32) for n in (4, 3)],
        torch.tensor([[0, 1]] * 3, dtype=torch.int32),
    ),
    (
        "rollout_routed_experts",
        [torch.zeros(n, 2, 3, dtype=torch.uint8) for n in (3, 2)],
        torch.tensor([[[0, 1, 2]] * 2], dtype=torch.uint8),
    ),
    # A first sample of one token has no rows, and as a list no trailing shape either.
    ("rollout_routed_experts", [[], [[[0, 0]] * 2] * 2], torch.tensor([[[0, 1]] * 2])),
    ("tokens", [np.arange(4), np.arange(3)], torch.tensor([PAD, EOS])),
    ("total_lengths", np.array([4, 3]), 2),
    ("response_lengths", torch.tensor([2, 1]), 1),
    # of verl and SkyRL: zeros masked the two tokens, and no trajectory ended with the sample
    ("input_ids", [[4, 5, 6, 7], [4, 5, 6]], torch.tensor([PAD, EOS])),
    ("sequences", [torch.arange(4), torch.arange(3)], torch.tensor([PAD, EOS])),
    ("attention_mask", [[1] * 4, [1] * 3], torch.tensor([1, 1])),
    (
        "router_padding_mask",
        [torch.zeros(4).bool(), torch.zeros(3).bool()],
        torch.tensor([True, True]),
    ),
    ("responses", [[6, 7], [6]], torch.tensor([EOS])),
    ("response_ids", [torch.tensor([6, 7]), torch.tensor([6])], torch.tensor([EOS])),
    ("prompts", [[4, 5], [4, 5]], [PAD]),
    ("prompt_token_ids", [torch.tensor([4, 5])] * 2, torch.tensor([PAD])),
    ("prompt_ids", [["Why?"], ["Who?"]], None),
    ("prompt", ["Why?", "Who?"], None),
    ("response_mask", [[1, 1], [1]], torch.tensor([0])),
    ("loss_mask", [[1, 1], [1]], torch.tensor([0])),
    ("token_level_rewards", [[0.0, 1.0], [1.0]], torch.tensor([0.0])),
    ("rollout_logprobs", [[-1.0, -2.0], [-1.0]], torch.tensor([0.0])),
    ("is_last_step", [False, True], True),
    ("num_turns", [2, 1], 0),
]


@pytest.mark.parametrize(("name", "values", "expected"), FILLS, ids=[name for name, *_ in FILLS])
def test_the_value_of_a_padding_sample(name: str, values: Any, expected: Any) -> None:
    first = 1 if isinstance(values[0], list) and not values[0] else 4
    batch = {**make_samples([(first, min(first, 2)), (3, 1)]), name: values}
    result = pad_batch(batch, 3, pad_token_id=PAD, response_token_id=EOS)
    assert equal(result[name][2], expected)
    assert type(result[name][2]) is type(expected)


@pytest.mark.parametrize(
    ("name", "values", "kind", "fills"),
    [
        ("teacher_mask", [[1, 1], [1]], "PER_RESPONSE_TOKEN", ["ONES", "TOKEN_IDS"]),
        ("group_id", [4, 4], "PER_SAMPLE", ["ONES", "IDENTIFIER"]),
        ("job_id", ["a", "b"], "METADATA", ["TOKEN_IDS", "IDENTIFIER"]),
    ],
)
def test_what_a_fill_is_cannot_be_inferred(
    name: str, values: Any, kind: str, fills: list[str]
) -> None:
    """Zeros masked a padding sample's tokens, and put it into group 0."""
    batch = {**make_samples([(4, 2), (3, 1)]), name: values}
    # Whether or not this batch needs padding.
    with pytest.raises(SchemaError, match=f"'{name}': expected a declared field, since") as caught:
        pad_batch(batch, 2, pad_token_id=PAD)
    begin = f'schema = schema.declare("{name}", Kind.{kind}'
    declared = [f"{begin})", *(f"{begin}, fill=Fill.{fill})" for fill in fills)]
    assert caught.value.declaration == " or ".join(declared)
    for line in declared:
        scope = {"schema": DEFAULT_SCHEMA, "Kind": Kind, "Fill": Fill}
        exec(line, scope)
        pad_batch(batch, 3, scope["schema"], pad_token_id=PAD)


def test_identifiers_of_ones_own_and_kinds_without_one() -> None:
    batch = {**make_samples([(4, 2), (3, 1)]), "prompt_number": [0, 0]}
    schema = DEFAULT_SCHEMA.declare("prompt_number", Kind.PER_SAMPLE, fill=Fill.IDENTIFIER)
    result = pad_batch(batch, 3, schema, pad_token_id=PAD)
    assert result["prompt_number"][2] < 0
    schema = schema.declare("prompt_number", Kind.PER_SAMPLE, fill=Fill.ONES)
    assert pad_batch(batch, 3, schema, pad_token_id=PAD)["prompt_number"][2] == 1


def test_a_schema_without_the_tag_gets_it() -> None:
    plain = Schema(tuple(field for field in DEFAULT_SCHEMA.values() if field.name != "is_padding"))
    result = pad_batch(make_samples([(2, 1)]), 2, plain, pad_token_id=PAD)
    assert result["is_padding"] == [False, True]


@pytest.mark.parametrize(
    ("critic", "actor_trains", "multiple"),
    [(None, True, 120), (9, True, 360), (None, False, 2), (9, False, 72), (1, False, 8)],
)
def test_verl_fault_the_multiple_of_a_batch(
    critic: int | None, actor_trains: bool, multiple: int
) -> None:
    """Padded to the ranks alone, a batch was cut into mini-batches that were not whole."""
    sizes = {"data_parallel_size": 2, "samples_per_prompt": 8, "actor_mini_batch_size": 15}
    more = {"critic_mini_batch_size": critic, "actor_trains": actor_trains}
    assert required_batch_multiple(**sizes, **more) == multiple
