"""Placeholders in slime that plans in its rollout manager: drawn, run, and left out of results."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.stand_ins import forget
from slime_package import slime

import mcore_batching
from mcore_batching.batch import DEFAULT_SCHEMA, Kind, OrderError, SchemaError
from mcore_batching.integrations.slime import HookError, init
from mcore_batching.integrations.slime.trainer import PlaceholderLengths, _Guarded, zero_count_mask

__all__ = ["slime"]


def modules() -> SimpleNamespace:
    name = "slime.backends.megatron_utils"
    return SimpleNamespace(
        data=importlib.import_module(f"{name}.data"), model=importlib.import_module(f"{name}.model")
    )


def rollout_data(*micro_batches: list[int]) -> dict[str, Any]:
    lengths = [3, 5, 2]
    return {
        "tokens": [torch.arange(length) for length in lengths],
        "total_lengths": lengths,
        "response_lengths": [1, 2, 1],
        "loss_masks": [torch.ones(n, dtype=torch.int) for n in (1, 2, 1)],
        "log_probs": [torch.rand(n) for n in (1, 2, 1)],
        "rollout_mask_sums": torch.tensor([1.0, 2.0, 1.0]),
        "rollout_top_p_token_ids": [[4], [5, 6, 7], [8]],
        "rollout_top_p_token_offsets": [[0, 1], [0, 2, 3], [0, 1]],
        "partition": [7, 8, 9],
        "micro_batch_indices": list(micro_batches),
    }


KEYS = [
    *("tokens", "packed_seq_params", "total_lengths", "response_lengths", "loss_masks"),
    *("log_probs", "rollout_mask_sums", "rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
    *("partition", "multimodal_train_inputs"),
]


def test_a_placeholder_is_a_sample_of_one_token_with_an_empty_response(slime: Path) -> None:
    found = modules()
    with mcore_batching.hook(found.data, found.model) as hooked:
        assert hooked.hooked == [
            "slime.backends.megatron_utils.data.get_data_iterator",
            "slime.backends.megatron_utils.model.forward_only",
        ]
        data = rollout_data([1], [], [0, 2])
        (iterator,) = found.data.get_data_iterator(data)
        first, empty, last = (found.model.get_batch(iterator, KEYS) for _ in range(3))
    assert first["partition"] == [8]
    assert [int(each) for each in last["rollout_mask_sums"]] == [1, 1]
    assert [each.tolist() for each in empty["tokens"]] == [[0]]
    assert empty["total_lengths"] == [1]
    assert empty["response_lengths"] == [0]
    assert [each.numel() for each in empty["log_probs"]] == [0]
    assert [float(each) for each in empty["rollout_mask_sums"]] == [0.0]
    assert [each.tolist() for each in empty["rollout_top_p_token_ids"]] == [[]]
    assert [each.tolist() for each in empty["rollout_top_p_token_offsets"]] == [[0]]
    assert empty["partition"] == [None]
    assert empty["packed_seq_params"] is empty["multimodal_train_inputs"] is None
    count = sum(torch.clamp_min(mask.sum(), 1) for mask in empty["loss_masks"])
    assert int(count) == 0
    with pytest.raises(IndexError, match="all 3 micro-batches have been drawn"):
        iterator.get_next(KEYS)
    assert iterator.reset() is iterator
    assert iterator.offset == 0


def sums(logits: str, *, total_lengths: list[int], tokens: list[torch.Tensor]) -> Any:
    return logits, {"sums": [int(each.sum()) for each in tokens]}


def test_forward_only_leaves_out_what_placeholders_put_out(slime: Path) -> None:
    found = modules()
    with mcore_batching.hook(found.data, found.model):
        iterators = found.data.get_data_iterator(rollout_data([], [1], [], [0, 2]))
        made = found.model.forward_only(
            sums, None, None, iterators, [4], "old_", use_rollout_top_p_replay=True
        )
    assert made == {"old_sums": [3, 10, 1], "replay": True}


def test_another_number_of_outputs_is_refused_where_each_rank_runs_by_itself(slime: Path) -> None:
    """As in slime's server of log-probs: its forward pass is no collective over all ranks."""

    def other_sums(logits: str, **batch: Any) -> Any:
        _, made = sums(logits, **batch)
        return logits, {"sums": made["sums"][1:]}

    found = modules()
    with mcore_batching.hook(found.data, found.model):
        iterators = found.data.get_data_iterator(rollout_data([1, 0], [2]))
        with pytest.raises(OrderError, match=r"1 values for 'sums' in a micro-batch of 2 samples"):
            found.model.forward_only(other_sums, None, None, iterators, [2])


def test_a_function_that_fails_has_a_value_of_any_name_for_each_sample_until_all_raise() -> None:
    def fails(logits: Any, **batch: Any) -> Any:
        raise ValueError(f"of {len(batch['total_lengths'])}")

    errors: list[Exception] = []
    guarded = _Guarded(fails, errors.append)
    for lengths, values in (([3, 4], [None, None]), (PlaceholderLengths([1]), [])):
        _, made = guarded(torch.zeros(1), total_lengths=lengths)
        assert made["any name"] == values
    assert [str(error) for error in errors] == ["of 2", "of 1"]


def test_a_field_without_a_kind_is_refused_at_the_first_micro_batch(slime: Path) -> None:
    found = modules()
    data = rollout_data([0, 1, 2]) | {"bonus": [1.0, 2.0, 3.0]}
    with mcore_batching.hook(found.data, found.model):
        (iterator,) = found.data.get_data_iterator(data)
        with pytest.raises(SchemaError, match="bonus"):
            iterator.get_next(["tokens", "bonus"])
    schema = DEFAULT_SCHEMA.declare("bonus", Kind.PER_SAMPLE)
    data["micro_batch_indices"] = [[0, 1, 2], []]
    with mcore_batching.hook(found.data, found.model, schema=schema):
        (iterator,) = found.data.get_data_iterator(data)
        assert iterator.get_next(["tokens", "bonus"])["bonus"] == [1.0, 2.0, 3.0]
        assert iterator.get_next(["total_lengths", "loss_masks", "bonus"])["bonus"] == [0.0]


def test_a_field_with_too_few_values_is_refused_at_the_first_micro_batch(slime: Path) -> None:
    """Not where the missing sample is drawn, on one rank in the middle of the pipeline."""
    found = modules()
    data = rollout_data([0], [1, 2])
    del data["log_probs"][2]
    with mcore_batching.hook(found.data, found.model):
        (iterator,) = found.data.get_data_iterator(data)
        with pytest.raises(SchemaError, match=r"log_probs.*3 values, one for each sample.*2"):
            iterator.get_next(["tokens", "log_probs"])


def test_routed_experts_of_a_placeholder_can_be_replayed(slime: Path) -> None:
    """``fill_routing_replay`` asks for these two fields alone."""
    found = modules()
    data = rollout_data([0, 1, 2], [])
    data["rollout_routed_experts"] = [torch.zeros(n - 1, 2, 4, dtype=torch.int) for n in (3, 5, 2)]
    with mcore_batching.hook(found.data, found.model):
        (iterator,) = found.data.get_data_iterator(data)
        keys = ["rollout_routed_experts", "tokens"]
        assert len(iterator.get_next(keys)["tokens"]) == 3
        drawn = iterator.get_next(keys)
    assert drawn["rollout_routed_experts"][0].shape == (0, 2, 4)
    assert drawn["tokens"][0].shape == (1,)


def test_slime_calls_init(slime: Path, capfd: Any) -> None:
    found = modules()
    own = found.data.get_data_iterator
    init(SimpleNamespace())
    assert "hooked slime.backends.megatron_utils.data.get_data_iterator" in capfd.readouterr().out
    assert found.data.get_data_iterator is not own
    with pytest.raises(HookError, match="hooked already"):
        init(SimpleNamespace())


def test_a_function_called_in_another_way_is_refused(slime: Path) -> None:
    path = slime / "backends" / "megatron_utils" / "model.py"
    path.write_text(path.read_text().replace("total_lengths=batch", "lengths=batch"))
    forget("slime", "miles")
    found = modules()
    with mcore_batching.hook(found.data, found.model):
        iterators = found.data.get_data_iterator(rollout_data([0, 1, 2]))
        with pytest.raises(HookError, match="no total_lengths"):
            found.model.forward_only(sums, None, None, iterators, [1])


def denominators(mask: torch.Tensor) -> torch.Tensor:
    """What loss functions do with a loss mask: at least one token a sample."""
    return torch.clamp_min(mask.sum(), 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.bool])
def test_a_zero_count_mask_adds_nothing_to_a_sum_of_counts(dtype: torch.dtype) -> None:
    count = denominators(zero_count_mask(torch.zeros(0, dtype=dtype)))
    total = sum([count])
    assert type(total) is torch.Tensor
    assert total == 0
    assert sum([denominators(torch.ones(3)), count]) == 3
    assert torch.tensor([total, 2.0]).tolist() == [0.0, 2.0]
    accumulated = torch.zeros([], dtype=torch.int)  # what Megatron's schedules do with it
    accumulated += sum([denominators(zero_count_mask(torch.zeros(0, dtype=torch.int32)))])
    assert accumulated == 0
    assert torch.clamp(zero_count_mask(torch.zeros(0, dtype=dtype)).sum(), min=1) + 0 == 0


def test_a_zero_count_mask_divides_by_one() -> None:
    mask = zero_count_mask(torch.zeros(0, dtype=torch.int32))
    values = torch.zeros(0, requires_grad=True)
    mean = (values * mask).sum() / denominators(mask)
    assert type(mean) is torch.Tensor
    assert mean == 0
    mean.backward()
    assert values.grad is not None
    assert torch.tensor(3.0) / denominators(mask) == 3


def test_a_zero_count_mask_is_else_an_empty_mask() -> None:
    mask = zero_count_mask(torch.zeros(0, dtype=torch.int32))
    assert mask.dtype == torch.int32
    assert len(mask) == mask.numel() == 0
    for made in (mask[0:0], mask.float(), torch.cat([mask, torch.ones(2)]), mask.sum(dim=0) + 1):
        assert type(made) is torch.Tensor
    assert torch.cat([mask, torch.ones(2)]).tolist() == [1.0, 1.0]
    assert mask.sum().item() == 0
    with pytest.raises(ValueError, match=r"found one of shape \[2\]"):
        zero_count_mask(torch.ones(2))
