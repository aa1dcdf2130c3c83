"""The guarantees of the left-padded layout, and the faults that others had with it."""

from __future__ import annotations

import warnings

import pytest
import torch
from batch_cases import AXES, LAYERS, TOP_K, equal, full_batch, make_samples, sample_shapes
from hypothesis import given, settings

from mcore_batching.rl import left_pad, response_values, unpad

PAD = 999


@settings(max_examples=80)
@given(sample_shapes())
def test_unpad_is_the_inverse_of_left_pad(shapes: list[tuple[int, int]]) -> None:
    for axes in ((), (AXES,)):
        samples = full_batch(shapes, axes=axes)
        del samples["returns"]
        assert equal(unpad(left_pad(samples, pad_token_id=PAD)), samples)


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
    # Readers that slice from the left get padding (SkyRL); of an empty response [-0:] is all of it.
    for name in ("loss_masks", "advantages"):
        assert all(map(torch.equal, response_values(blocks, blocks.blocks[name]), samples[name]))


def test_position_ids_that_samples_bring_are_the_batchs() -> None:
    blocks = left_pad(full_batch([(2, 1), (3, 1)]), pad_token_id=PAD)
    assert blocks.position_ids.shape == (2, 3, AXES)
    assert blocks.position_ids[:, :, 1].tolist() == [[0, 1, 2], [1, 2, 3]]


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
    first = make_samples([(2, 0), (3, 2)]) | {"values": [[], torch.ones(2, 3)]}
    assert left_pad(first, pad_token_id=PAD).blocks["values"].shape == (2, 2, 3)
