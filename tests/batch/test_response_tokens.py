"""Guarantees of response tokens' loss weights: one masking rule, applied once a row."""

from __future__ import annotations

import torch
from batch_cases import (
    make_samples,
    merge_packed,
    owned_responses,
    pack_on_all_ranks,
    sample_shapes,
)
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=150, deadline=None)
@given(sample_shapes(), st.sampled_from([1, 2, 4]), st.data())
def test_the_row_and_the_loss_weigh_every_token_alike(
    shapes: list[tuple[int, int]], size: int, data: st.DataObject
) -> None:
    """Token by token: the weight in the loss is the one at the position before it in the row."""
    samples = make_samples(shapes)
    tags = data.draw(st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes)))
    samples["is_padding"] = tags
    rows = pack_on_all_ranks(samples, size)
    offsets = rows[0].host_cu_seqlens_padded
    full = merge_packed([row.loss_mask for row in rows], offsets, -1)[0].tolist()
    streams = [torch.zeros(len(full)) for _ in rows]
    for i, (total, response) in enumerate(shapes):
        owners = sum(owned_responses(row)[i].int() for row in rows)
        assert owners.tolist() == [int(total - response + j > 0) for j in range(response)]
    for row, stream in zip(rows, streams, strict=True):
        masks = row.responses.loss_masks.split(row.response_lengths)
        for i, (total, response) in enumerate(shapes):
            expected = [
                0.0 if tags[i] or total - response + j == 0 else float(samples["loss_masks"][i][j])
                for j in range(response)
            ]
            assert masks[i].tolist() == expected
            for j, owned in enumerate(owned_responses(row)[i].tolist()):
                if owned:
                    stream[offsets[i] + total - response + j - 1] = expected[j]
    assert torch.stack(streams).sum(0).tolist() == full


def test_the_given_masks_are_neither_changed_nor_shared() -> None:
    samples = make_samples([(3, 3), (4, 2)])
    samples["loss_masks"] = [torch.ones(3), torch.ones(2)]
    (row,) = pack_on_all_ranks(samples | {"is_padding": [False, True]}, 1)
    assert [mask.tolist() for mask in samples["loss_masks"]] == [[1.0] * 3, [1.0] * 2]
    samples["loss_masks"][0].fill_(7.0)
    assert row.responses.loss_masks[:3].tolist() == [0.0, 1.0, 1.0]


def test_the_weights_travel_with_the_row() -> None:
    samples = make_samples([(5, 3), (4, 4)])
    (row,), (on_meta,) = (pack_on_all_ranks(samples, device=name) for name in ("cpu", "meta"))
    moved = on_meta.responses
    tensors = [value for value in vars(moved).values() if value is not None]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert vars(moved).keys() == vars(row.responses).keys()
    assert moved.loss_masks.shape == (7,)
    assert row.responses.loss_masks.dtype == torch.float32
