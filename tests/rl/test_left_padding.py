"""The guarantees of the left-padded layout, and the faults that others had with it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from batch_cases import make_samples, sample_shapes
from hypothesis import given, settings

from mcore_batching.batch import DEFAULT_SCHEMA, BatchError, Kind, SchemaError
from mcore_batching.rl import LeftPadded, left_pad, response_values, unpad

PAD, AXES, LAYERS, TOP_K = 999, 3, 2, 4


def full_samples(shapes: list[tuple[int, int]], axes: int = AXES) -> dict[str, Any]:
    """A value of every kind, distinct everywhere so that a shift by one shows."""
    samples = make_samples(shapes)
    return {
        **samples,
        "values": [torch.arange(r * 2.0).reshape(r, 2) + 100 * i for i, (_, r) in enumerate(shapes)]
        or [],
        "position_ids": [
            torch.arange(t).repeat(axes, 1) + torch.arange(axes)[:, None]
            if axes
            else torch.arange(t)
            for t, _ in shapes
        ],
        "rollout_routed_experts": [
            torch.randint(0, 60, (max(t - 1, 0), LAYERS, TOP_K), dtype=torch.uint8)
            for t, _ in shapes
        ],
        "rollout_top_p_token_offsets": [torch.arange(r + 1) for _, r in shapes],
        "rewards": [float(i) for i in range(len(shapes))],
        "uids": [f"prompt {i}" for i in range(len(shapes))],
        "multimodal_train_inputs": [{} for _ in shapes],
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


def require_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert len(found[key]) == len(values), key
        assert all(map(same, found[key], values)), key


@settings(max_examples=80)
@given(sample_shapes())
def test_unpad_is_the_inverse_of_left_pad(shapes: list[tuple[int, int]]) -> None:
    for axes in (0, AXES):
        samples = full_samples(shapes, axes)
        require_same(unpad(left_pad(samples, pad_token_id=PAD)), samples)


@settings(max_examples=60)
@given(sample_shapes())
def test_layout_token_by_token(shapes: list[tuple[int, int]]) -> None:
    samples = make_samples(shapes)
    blocks = left_pad(samples, pad_token_id=PAD)
    width = max(total for total, _ in shapes)
    widest = max(response for _, response in shapes)
    assert blocks.tokens.shape == (len(shapes), width)
    positions = blocks.position_ids
    for i, (total, response) in enumerate(shapes):
        ids = samples["tokens"][i].tolist()
        assert blocks.tokens[i].tolist() == [PAD] * (width - total) + ids
        assert blocks.attention_mask[i].tolist() == [False] * (width - total) + [True] * total
        assert positions[i].tolist() == [0] * (width - total) + list(range(total))
        mask = samples["loss_masks"][i].tolist()
        assert blocks.blocks["loss_masks"][i].tolist() == [0] * (widest - response) + mask
        assert blocks.response_mask[i].tolist() == [False] * (widest - response) + [True] * response


def test_position_ids_that_samples_bring_are_the_batchs() -> None:
    blocks = left_pad(full_samples([(2, 1), (3, 1)]), pad_token_id=PAD)
    assert blocks.position_ids.shape == (2, 3, AXES)
    assert blocks.position_ids[:, :, 1].tolist() == [[0, 1, 2], [1, 2, 3]]


def test_skyrl_fault_readers_that_slice_from_the_left_get_padding() -> None:
    samples = {
        **make_samples([(5, 1), (5, 3), (4, 0)]),
        "log_probs": [torch.tensor([-1.0]), torch.tensor([-2.0, -3.0, -4.0]), torch.zeros(0)],
    }
    blocks = left_pad(samples, pad_token_id=PAD)
    block = blocks.blocks["log_probs"]
    assert block[0, :1].tolist() == [0.0]
    # [-0:] is everything.
    expected = [[-1.0], [-2.0, -3.0, -4.0], []]
    assert [value.tolist() for value in response_values(blocks, block)] == expected


def test_response_values_refuse_what_is_not_aligned_to_responses() -> None:
    blocks = left_pad(make_samples([(5, 1), (5, 3)]), pad_token_id=PAD)
    with pytest.raises(BatchError, match=r"shape \[2, 3\].*right-aligned.*got \[2, 5\]"):
        response_values(blocks, torch.zeros(2, 5))


def test_skyrl_fault_samples_beyond_max_seq_len_are_warned_of_and_whole() -> None:
    samples = make_samples([(5, 1), (9, 3), (7, 7)])
    text = r"2 samples are longer than max_seq_len=6 \(sample 1, 2\), up to 9 tokens; none is cut"
    with pytest.warns(UserWarning, match=text) as caught:
        require_same(unpad(left_pad(samples, pad_token_id=PAD, max_seq_len=6)), samples)
    assert caught[0].filename == __file__  # the caller's line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for most in (None, 9):
            left_pad(samples, pad_token_id=PAD, max_seq_len=most)
        left_pad(make_samples([]), pad_token_id=PAD, max_seq_len=1)
    for bad in (0, 2.5, True):
        with pytest.raises(BatchError, match="max_seq_len must be"):
            left_pad(samples, pad_token_id=PAD, max_seq_len=bad)  # type: ignore[arg-type]


def test_padding_of_routed_experts_is_distinct_per_slot() -> None:
    block = left_pad(full_samples([(2, 1), (6, 1)]), pad_token_id=PAD).blocks
    experts = block["rollout_routed_experts"]
    assert (experts.shape, experts.dtype) == ((2, 5, LAYERS, TOP_K), torch.uint8)
    assert experts[0, :4].tolist() == [[[0, 1, 2, 3]] * LAYERS] * 4


def test_no_samples_and_no_tokens() -> None:
    blocks = left_pad(make_samples([]), pad_token_id=PAD)
    assert (blocks.tokens.shape, blocks.attention_mask.shape) == ((0, 0), (0, 0))
    assert blocks.tokens.dtype == torch.int64
    assert unpad(blocks)["tokens"] == response_values(blocks, blocks.blocks["loss_masks"]) == []
    empty = left_pad(make_samples([(0, 0), (0, 0)]), pad_token_id=PAD)
    assert (empty.tokens.shape, empty.tokens.dtype) == ((2, 0), torch.int64)


def test_blocks_of_ones_own() -> None:
    """Blocks from elsewhere are checked against the lengths."""
    parts: dict[str, Any] = {
        "others": {"total_lengths": [2, 4], "response_lengths": [1, 2]},
        "total_lengths": (2, 4),
        "response_lengths": (1, 2),
        "schema": DEFAULT_SCHEMA,
    }
    tokens = torch.tensor([[PAD, PAD, 1, 2], [3, 4, 5, 6]])
    blocks = LeftPadded(blocks={"tokens": tokens}, **parts)
    assert [value.tolist() for value in unpad(blocks)["tokens"]] == [[1, 2], [3, 4, 5, 6]]
    for shape in ((2, 5), (1, 4), (8,)):
        with pytest.raises(SchemaError, match=r"'tokens': expected a block of 2 samples, 4 rows"):
            LeftPadded(blocks={"tokens": torch.zeros(shape)}, **parts)
    with pytest.raises(SchemaError, match=r"'rewards': expected a block of 2 samples, 0 rows"):
        LeftPadded(blocks={"rewards": torch.zeros(2, 4)}, **parts)


def test_values_of_different_types_or_shapes_are_refused() -> None:
    samples = make_samples([(3, 1), (3, 2)])
    schema = DEFAULT_SCHEMA.declare("x", Kind.PER_RESPONSE_TOKEN)
    for value in (torch.zeros(2), torch.zeros(2, 4, dtype=torch.float64)):
        samples["x"] = [torch.zeros(1, 4), value]
        with pytest.raises(SchemaError, match=r"'x', sample 1: expected type torch\.float32 "):
            left_pad(samples, schema, pad_token_id=PAD)


def test_blocks_of_no_values_have_the_type_of_their_kind() -> None:
    """Lists that are all empty tell none."""
    samples = {"tokens": [[], []], "total_lengths": [0, 0], "response_lengths": [0, 0]}
    blocks = left_pad(samples | {"log_probs": [[], []]}, pad_token_id=PAD).blocks
    assert (blocks["tokens"].dtype, blocks["log_probs"].dtype) == (torch.int64, torch.float32)
    none = left_pad({key: [] for key in samples}, pad_token_id=PAD)
    assert (none.tokens.dtype, unpad(none)["tokens"]) == (torch.int64, [])
