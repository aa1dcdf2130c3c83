"""The guarantees of padding samples (`pad_batch` puts them in, `real_samples` and metrics leave
them out), of placeholders, which are such samples less a token, and of left-padded blocks; and the
faults of padding that others had."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from batch_cases import AXES, LAYERS, TOP_K, equal, full_batch, make_samples, sample_shapes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import arange, ones, tensor, zeros

from mcore_batching.batch import DEFAULT_SCHEMA, Fill, Kind, Schema, SchemaError, make_placeholder
from mcore_batching.batch.fields import TRAITS
from mcore_batching.rl import (
    left_pad,
    pad_batch,
    real_samples,
    required_batch_multiple,
    response_values,
    unpad,
)

PAD, EOS = 5, 7


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
    DEFAULT_SCHEMA.validate(result)
    # Tags of the batch stay.
    again = pad_batch(result, size + 3, pad_token_id=PAD)
    assert again["is_padding"] == [*result["is_padding"], *[True] * 3]


def test_fabricated_values_share_memory_with_nothing() -> None:
    batch = pad_batch(full_batch([(4, 2), (5, 3), (6, 2)]), 6, pad_token_id=PAD)
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
        ([tensor(3), tensor(-1)], int),
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


SCHEMA = DEFAULT_SCHEMA.declare("hidden", Kind.PER_TOKEN).declare("experts", Kind.ROUTED_EXPERTS)
BFLOAT, HALF = torch.bfloat16, torch.float16
FILLS: list[tuple[str, Any, Any]] = [
    ("tokens", [[4, 5, 6, 7], [4, 5, 6]], tensor([PAD, EOS])),
    ("tokens", [np.arange(4), np.arange(3)], tensor([PAD, EOS])),
    ("tokens", [arange(4).int(), arange(3).int()], tensor([PAD, EOS]).int()),
    ("tokens", [np.arange(n, dtype=np.uint16) for n in (4, 3)], tensor([PAD, EOS])),
    ("total_lengths", [4, 3], 2),
    ("total_lengths", np.array([4, 3]), 2),
    ("response_lengths", [2, 1], 1),
    ("max_seq_lens", [64, 64], 2),
    ("hidden", [ones(n, 4, 5, dtype=HALF) for n in (4, 3)], zeros(2, 4, 5, dtype=HALF)),
    ("hidden", [[[1.5, 2.5]] * n for n in (4, 3)], zeros(2, 2)),
    ("loss_masks", [[1, 1], [1]], tensor([0])),
    ("loss_masks", [ones(2).int(), ones(1).int()], tensor([0]).int()),
    ("advantages", [np.ones((n, 3)) for n in (2, 1)], zeros(1, 3).double()),
    ("values", [ones(n, 2, dtype=BFLOAT) for n in (2, 1)], zeros(1, 2, dtype=BFLOAT)),
    ("values", [np.full((n, 2), np.nan, np.float32) for n in (2, 1)], zeros(1, 2)),
    ("rollout_top_p_token_offsets", [[0, 1, 2], [0, 1]], tensor([0, 0])),
    ("rewards", [1.0, 2.0], 0.0),
    ("rewards", [np.float32(2.5), np.float32(1)], 0.0),
    ("rewards", [[1.5, 2, 3]] * 2, zeros(3)),
    ("raw_reward", [tensor([1.0, float("nan")])] * 2, zeros(2)),
    ("truncated", [True, False], False),
    ("round_number", [np.int16(3), np.int16(4)], 0),
    ("metadata", [{"turn": 1}, {"turn": 2}], None),
    ("multimodal_train_inputs", [{"pixels": ones(4)}, None], {}),
    # Positions have the axes of the batch's, and one expert for each slot.
    ("position_ids", [arange(4), arange(3)], tensor([0, 1])),
    ("position_ids", [[0, 1, 2, 3], [0, 1, 2]], tensor([0, 1])),
    ("position_ids", [[[0] * 4] * 2, [[0] * 3] * 2], tensor([[0, 1]] * 2)),
    ("position_ids", [zeros(3, n).int() for n in (4, 3)], tensor([[0, 1]] * 3).int()),
    (
        "rollout_routed_experts",
        [zeros(n, 2, 3, dtype=torch.uint8) for n in (3, 2)],
        tensor([[[0, 1, 2]] * 2], dtype=torch.uint8),
    ),
    # A first sample of one token has no rows, and as a list no trailing shape either.
    ("rollout_routed_experts", [[], [[[0, 0]] * 2] * 2], tensor([[[0, 1]] * 2])),
    # Zeros, as verl has them, send every slot of the token to expert 0.
    ("experts", [zeros(n, 2, 4).short() for n in (4, 3)], tensor([[[0, 1, 2, 3]] * 2] * 2).short()),
    (
        "experts",
        [np.zeros((n, 2, 3), np.int16) for n in (4, 3)],
        tensor([[[0, 1, 2]] * 2] * 2).short(),
    ),
    ("experts", [[[[0, 0]] * 2] * n for n in (4, 3)], tensor([[[0, 1]] * 2] * 2)),
    # of verl and SkyRL: zeros masked the two tokens, and no trajectory ended with the sample
    ("input_ids", [[4, 5, 6, 7], [4, 5, 6]], tensor([PAD, EOS])),
    ("sequences", [arange(4), arange(3)], tensor([PAD, EOS])),
    ("attention_mask", [[1] * 4, [1] * 3], tensor([1, 1])),
    ("router_padding_mask", [zeros(4).bool(), zeros(3).bool()], tensor([True, True])),
    ("responses", [[6, 7], [6]], tensor([EOS])),
    ("response_ids", [tensor([6, 7]), tensor([6])], tensor([EOS])),
    ("prompts", [[4, 5], [4, 5]], [PAD]),
    ("prompt_token_ids", [tensor([4, 5])] * 2, tensor([PAD])),
    ("prompt_ids", [["Why?"], ["Who?"]], None),
    ("prompt", ["Why?", "Who?"], None),
    ("response_mask", [[1, 1], [1]], tensor([0])),
    ("loss_mask", [[1, 1], [1]], tensor([0])),
    ("token_level_rewards", [[0.0, 1.0], [1.0]], tensor([0.0])),
    ("rollout_logprobs", [[-1.0, -2.0], [-1.0]], tensor([0.0])),
    ("is_last_step", [False, True], True),
    ("num_turns", [2, 1], 0),
]
"""A field, values of two samples, and the value of a padding sample."""
PLACEHOLDERS = {"total_lengths": 1, "response_lengths": 0, "max_seq_lens": 1, "is_last_step": False}
PLACEHOLDERS |= dict.fromkeys(("prompts", "prompt_token_ids"))
"""The value of a placeholder, where it is neither the same nor one row less."""


@pytest.mark.parametrize(("name", "values", "padding"), FILLS, ids=[name for name, *_ in FILLS])
def test_the_values_of_padding_samples_and_placeholders(
    name: str, values: Any, padding: Any
) -> None:
    first = 1 if isinstance(values[0], list) and not values[0] else 4
    batch = {**make_samples([(first, min(first, 2)), (3, 1)]), name: values}
    result = pad_batch(batch, 3, SCHEMA, pad_token_id=PAD, response_token_id=EOS)
    placeholder = PLACEHOLDERS.get(name, padding)
    if TRAITS[SCHEMA[name].kind].rows:
        placeholder = padding[..., :-1] if name == "position_ids" else padding[:-1]
    made = make_placeholder(SCHEMA, [name], {name: values[::-1]}, pad_token_id=PAD)
    for found, expected in ((result[name][2], padding), (made[name][0], placeholder)):
        assert equal(found, expected)
        assert type(found) is type(expected)


DEFAULTS = {
    "tokens": tensor([PAD]),
    "total_lengths": 1,
    "response_lengths": 0,
    "max_seq_lens": 1,
    "hidden": zeros(1),
    "loss_masks": zeros(0),
    "rollout_top_p_token_offsets": zeros(1),
    "rewards": 0,
    "position_ids": tensor([0]),
    "rollout_routed_experts": zeros(0, 0, 0).long(),
    "experts": zeros(1, 0, 0).long(),
    "multimodal_train_inputs": {},
    "uids": None,
    "input_ids": tensor([PAD]),
    "attention_mask": tensor([1]),
    "responses": tensor([]).long(),
}


def test_placeholders_of_ranks_without_samples() -> None:
    assert {SCHEMA[key].kind for key in DEFAULTS} == set(Kind)
    empty: list[Any] = [None, {}, {name: [] for name in DEFAULTS}, dict.fromkeys(DEFAULTS)]
    for nothing in empty:
        made = make_placeholder(SCHEMA, DEFAULTS, nothing, pad_token_id=PAD)
        assert equal(made, {name: [value] for name, value in DEFAULTS.items()})
    # Nor does a value that has no axes of layers and slots show any.
    made = make_placeholder(SCHEMA, ["experts"], {"experts": [zeros(0).short()]})
    assert equal(made["experts"], [zeros(1, 0, 0).long()])
    # The first value that is there is the example, without its gradient.
    batch = {"hidden": [None, torch.rand(3, 4, requires_grad=True)]}
    (made,) = make_placeholder(SCHEMA, ["hidden"], batch)["hidden"]
    assert made.shape == (1, 4)
    assert not made.requires_grad


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


def test_identifiers_of_ones_own() -> None:
    batch = {**make_samples([(4, 2), (3, 1)]), "prompt_number": [0, 0]}
    schema = DEFAULT_SCHEMA.declare("prompt_number", Kind.PER_SAMPLE, fill=Fill.IDENTIFIER)
    assert pad_batch(batch, 3, schema, pad_token_id=PAD)["prompt_number"][2] < 0


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


@settings(max_examples=40)
@given(st.lists(st.booleans(), max_size=12))
def test_every_field_is_sliced_alike(tags: list[bool]) -> None:
    batch = full_batch([(3, 1)] * len(tags)) | {
        "rewards": torch.arange(len(tags)).double(),
        "scores": np.arange(len(tags)),
        "metadata": tuple({"number": i} for i in range(len(tags))),
        "is_padding": tags,
    }
    before = copy.deepcopy(batch)
    part = real_samples(batch)
    real = [index for index, tag in enumerate(tags) if not tag]
    assert part.keys() == batch.keys()
    for name, values in batch.items():
        if values is None:
            assert part[name] is None
        else:
            assert equal([*part[name]], [values[index] for index in real]), name
            assert equal([*values], [*before[name]]), name
    assert isinstance(part["rewards"], torch.Tensor)
    assert isinstance(part["scores"], np.ndarray)
    part["uids"].append("new")
    assert len(batch["uids"]) == len(tags)


@settings(max_examples=80)
@given(sample_shapes(), st.booleans())
def test_layout_token_by_token_and_back(shapes: list[tuple[int, int]], has_axes: bool) -> None:
    samples = full_batch(shapes, axes=(AXES,) if has_axes else ())
    del samples["returns"]
    blocks = left_pad(samples, pad_token_id=PAD)
    assert equal(unpad(blocks), samples)
    width = max(total for total, _ in shapes)
    widest = max(response for _, response in shapes)
    assert blocks.tokens.shape == (len(shapes), width)
    # Those that samples bring, or counted.
    counted = left_pad(make_samples(shapes), pad_token_id=PAD).position_ids
    positions = blocks.position_ids if has_axes else counted[:, None]
    for i, (total, response) in enumerate(shapes):
        ids = samples["tokens"][i].tolist()
        assert blocks.tokens[i].tolist() == [PAD] * (width - total) + ids
        assert blocks.attention_mask[i].tolist() == [False] * (width - total) + [True] * total
        for axis, found in enumerate(positions[i].tolist()):
            assert found == [0] * (width - total) + list(range(axis, axis + total))
        mask = samples["loss_masks"][i].tolist()
        assert blocks.blocks["loss_masks"][i].tolist() == [0] * (widest - response) + mask
        assert blocks.response_mask[i].tolist() == [False] * (widest - response) + [True] * response
    # Readers that slice from the left get padding (SkyRL); of an empty response [-0:] is all of it.
    for name in ("loss_masks", "advantages"):
        assert all(map(torch.equal, response_values(blocks, blocks.blocks[name]), samples[name]))


def test_skyrl_fault_samples_beyond_max_seq_len_are_warned_of_and_whole() -> None:
    samples = make_samples([(5, 1), (9, 3), (7, 7)])
    text = r"2 samples are longer than max_seq_len=6 \(sample 1, 2\), up to 9 tokens; none is cut"
    with pytest.warns(UserWarning, match=text) as caught:
        assert equal(unpad(left_pad(samples, pad_token_id=PAD, max_seq_len=6)), samples)
    assert caught[0].filename == __file__  # the caller's line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for most in (None, 9):
            left_pad(samples, pad_token_id=PAD, max_seq_len=most)
        left_pad(make_samples([]), pad_token_id=PAD, max_seq_len=1)


def test_padding_of_routed_experts_is_distinct_per_slot() -> None:
    block = left_pad(full_batch([(2, 1), (6, 1)]), pad_token_id=PAD).blocks
    experts = block["rollout_routed_experts"]
    assert (experts.shape, experts.dtype) == ((2, 5, LAYERS, TOP_K), torch.uint8)
    assert experts[0, :4].tolist() == [[[0, 1, 2, 3]] * LAYERS] * 4


def test_blocks_of_no_values_have_the_type_of_their_kind() -> None:
    """Lists that are all empty tell none."""
    none = left_pad(make_samples([]), pad_token_id=PAD)
    assert (none.tokens.shape, none.attention_mask.shape) == ((0, 0), (0, 0))
    assert unpad(none)["tokens"] == response_values(none, none.blocks["loss_masks"]) == []
    samples = {"tokens": [[], []], "total_lengths": [0, 0], "response_lengths": [0, 0]}
    empty = left_pad(samples | {"log_probs": [[], []]}, pad_token_id=PAD)
    assert (empty.tokens.shape, empty.blocks["log_probs"].dtype) == ((2, 0), torch.float32)
    lists = left_pad({key: [] for key in samples}, pad_token_id=PAD)
    assert {each.tokens.dtype for each in (none, empty, lists)} == {torch.int64}
    # Nor does an empty one beside others.
    first = make_samples([(2, 0), (3, 2)]) | {"values": [[], ones(2, 3)]}
    assert left_pad(first, pad_token_id=PAD).blocks["values"].shape == (2, 2, 3)
