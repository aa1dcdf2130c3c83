"""The guarantees of metrics and of `real_samples`; of several ranks: test_ranks.py."""

from __future__ import annotations

import copy

import numpy as np
import torch
from batch_cases import equal, full_batch, make_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_batching.rl import pad_batch, real_samples, sample_metrics


def test_verl_fault_metrics_count_padding() -> None:
    expected = {
        "rewards/mean": 2.5,
        "rewards/max": 4.0,
        "rewards/min": 1.0,
        "response_lengths/mean": 2.0,
        "response_lengths/max": 2.0,
        "response_lengths/min": 2.0,
    }
    batch = make_samples([(5, 2)] * 4) | {"rewards": [1.0, 2.0, 3.0, 4.0]}
    names, padded = ["rewards", "response_lengths"], pad_batch(batch, 16, pad_token_id=0)
    for fields in (names, iter(names)):  # they may come one by one
        assert sample_metrics(padded, fields) == expected  # type: ignore[arg-type]
    assert sample_metrics(make_samples([]), names[1:]) == {}


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
