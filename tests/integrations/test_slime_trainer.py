"""slime's and miles' trainers, hooked: placeholders are drawn, run, and left out of results; passes
are timed for the rollout manager's costs."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from frameworks import (
    TRAINERS,
    rewrite,
    slime_arguments,
    slime_plan,
    trainer_of,
    trainer_sizes,
)
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

import mcore_batching
from mcore_batching.batch import DEFAULT_SCHEMA, Kind, OrderError, SchemaError
from mcore_batching.integrations.slime import HookError, init, trainer
from mcore_batching.integrations.slime.learning import TrainersCosts, shape_costs, trainers_costs
from mcore_batching.integrations.slime.trainer import PlaceholderLengths, zero_count_mask
from mcore_batching.megatron import timing
from mcore_batching.planning.costs.layers_of import first_guess

Small = Callable[..., Path]


def rollout_data(*micro_batches: list[int]) -> dict[str, Any]:
    """Samples of 3, 5 and 2 tokens, with responses of 1, 2 and 1."""
    lengths, responses = [3, 5, 2], [1, 2, 1]
    return {
        "tokens": [torch.arange(length) for length in lengths],
        "total_lengths": lengths,
        "response_lengths": responses,
        "loss_masks": [torch.ones(n, dtype=torch.int) for n in responses],
        "log_probs": [torch.rand(n) for n in responses],
        "rollout_mask_sums": torch.tensor([1.0, 2.0, 1.0]),
        "rollout_top_p_token_ids": [[4], [5, 6, 7], [8]],
        "rollout_top_p_token_offsets": [[0, 1], [0, 2, 3], [0, 1]],
        "rollout_routed_experts": [
            torch.zeros(length - 1, 2, 4, dtype=torch.int) for length in lengths
        ],
        "partition": [7, 8, 9],
        "micro_batch_indices": list(micro_batches),
    }


@pytest.fixture
def hooked(small: Small) -> Iterator[Any]:
    small("slime")
    found = trainer_of("slime")
    with mcore_batching.hook(found.data, found.model):
        yield found


def test_a_placeholder_is_a_sample_of_one_token_with_an_empty_response(hooked: Any) -> None:
    keys = [key for key in rollout_data() if key != "micro_batch_indices"]
    keys += ["packed_seq_params", "multimodal_train_inputs"]
    (iterator,) = hooked.data.get_data_iterator(rollout_data([1], [], [0, 2]))
    first, empty, last = (iterator.get_next(keys) for _ in range(3))
    assert first["partition"] == [8]
    assert [int(each) for each in last["rollout_mask_sums"]] == [1, 1]
    count = sum(torch.clamp_min(mask.sum(), 1) for mask in empty["loss_masks"])
    assert int(count) == 0
    assert [each.shape for each in empty.pop("rollout_routed_experts")] == [(0, 2, 4)]
    plain = {
        name: values and [each.tolist() if torch.is_tensor(each) else each for each in values]
        for name, values in empty.items()
    }
    assert plain == {
        "tokens": [[0]],
        "total_lengths": [1],
        "response_lengths": [0],
        "loss_masks": [[]],
        "log_probs": [[]],
        "rollout_mask_sums": [0.0],
        "rollout_top_p_token_ids": [[]],
        "rollout_top_p_token_offsets": [[0]],
        "partition": [None],
        "packed_seq_params": None,
        "multimodal_train_inputs": None,
    }


def sums(logits: str, *, total_lengths: list[int], tokens: list[torch.Tensor]) -> Any:
    return logits, {"sums": [int(each.sum()) for each in tokens]}


def test_forward_only_leaves_out_what_placeholders_put_out(hooked: Any) -> None:
    iterators = hooked.data.get_data_iterator(rollout_data([], [1], [], [0, 2]))
    made = hooked.model.forward_only(
        sums, None, None, iterators, [4], "old_", use_rollout_top_p_replay=True
    )
    assert made == {"old_sums": [3, 10, 1], "replay": True}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sums: {"sums": sums[1:]}, "1 values for 'sums' in a micro-batch of 2 samples"),
        (lambda sums: {"sums": sums, f"of {len(sums)}": sums}, "return the same names for all"),
    ],
)
def test_other_outputs_are_refused_where_each_rank_runs_by_itself(
    hooked: Any, change: Callable[[list[int]], Any], message: str
) -> None:
    """As in slime's server of log-probs: its forward pass is no collective over all ranks."""

    def changed(logits: str, **batch: Any) -> Any:
        return logits, change(sums(logits, **batch)[1]["sums"])

    iterators = hooked.data.get_data_iterator(rollout_data([1, 0], [2]))
    with pytest.raises(OrderError, match=message):
        hooked.model.forward_only(changed, None, None, iterators, [2])


def test_a_function_that_fails_has_a_value_of_any_name_for_each_sample_until_all_raise() -> None:
    def fails(logits: Any, **batch: Any) -> Any:
        raise ValueError(f"of {len(batch['total_lengths'])}")

    errors: list[Exception] = []
    guarded = trainer._Guarded(fails, errors.append)
    for lengths, values in (([3, 4], [None, None]), (PlaceholderLengths([1]), [])):
        _, made = guarded(torch.zeros(1), total_lengths=lengths)
        assert made["any name"] == values
    assert [str(error) for error in errors] == ["of 2", "of 1"]
    with pytest.raises(HookError, match="no total_lengths"):
        trainer._Guarded(fails, None)("logits", lengths=[1])


def test_fields_are_checked_at_the_first_micro_batch(small: Small) -> None:
    """Not where a placeholder or the missing value is drawn, on one rank in mid-pipeline."""
    small("slime")
    found = trainer_of("slime")
    data = rollout_data([0], [1, 2], []) | {"bonus": [1.0, 2.0, 3.0]}
    with mcore_batching.hook(found.data, found.model):
        (iterator,) = found.data.get_data_iterator(data)
        with pytest.raises(SchemaError, match="bonus"):
            iterator.get_next(["tokens", "bonus"])
    schema = DEFAULT_SCHEMA.declare("bonus", Kind.PER_SAMPLE)
    with mcore_batching.hook(found.data, found.model, schema=schema):
        (iterator,) = found.data.get_data_iterator(data)
        drawn = [iterator.get_next(["tokens", "loss_masks", "bonus"])["bonus"] for _ in range(3)]
        assert drawn == [[1.0], [2.0, 3.0], [0.0]]
        del data["log_probs"][2]
        with pytest.raises(SchemaError, match=r"log_probs.*3 values, one for each sample.*2"):
            iterator.reset().get_next(["tokens", "log_probs"])


def test_slime_that_plans_where_it_trains(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(trainer, "planned_iterators", lambda *arguments: given.extend(arguments))
    folder, signature = small("slime"), "get_data_iterator(rollout_data)"
    rewrite(TRAINERS["slime"][0], folder, signature, "get_data_iterator(args, model, rollout_data)")
    found = trainer_of("slime")
    own, schema = found.data.get_data_iterator, DEFAULT_SCHEMA.declare("bonus", Kind.PER_SAMPLE)
    with mcore_batching.hook(found.data, found.model, schema=schema):
        found.data.get_data_iterator(1, 2, 3)
    assert given == [schema, found.data.DataIterator, own, 1, 2, 3]
    monkeypatch.undo()
    args, data = SimpleNamespace(use_dynamic_batch_size=False), rollout_data([0])
    with mcore_batching.hook(found.data, found.model):
        (iterator,) = found.data.get_data_iterator(args, None, data)
    assert type(iterator) is found.data.DataIterator


def sums_of_miles(logits: str, *, non_loss_data: bool, **batch: Any) -> Any:
    return sums(logits, **batch)[1]


def test_what_miles_trainer_plans_itself_stays_its_own(small: Small) -> None:
    """Images and adapters: fields without a kind among them, and iterators of its own class."""
    small("miles")
    found = trainer_of("miles")
    data = rollout_data() | {"adapter_slots": [0, 0, 1]}
    del data["micro_batch_indices"]
    args = SimpleNamespace(use_dynamic_batch_size=True)
    with mcore_batching.hook(found.data, found.model):
        (iterator,), counts = found.data.get_data_iterator(args, None, data)
        assert type(iterator) is found.data.DataIterator
        assert counts == [3]
        assert iterator.get_next(["adapter_slots"]) == {"adapter_slots": [0]}
        made = found.model.forward_only(sums_of_miles, None, None, [iterator], counts, rollout_id=0)
        assert made["sums"] == [3, 10, 1]
        data |= {"micro_batch_indices": [[1], [], [0, 2]], "num_microbatches": [3]}
        iterators, counts = found.data.get_data_iterator(None, None, data)
        assert isinstance(iterators[0], trainer.PlaceholderIterator)
        made = found.model.forward_only(sums_of_miles, None, None, iterators, counts, rollout_id=0)
        assert made["sums"] == [3, 10, 1]


def counted(mask: torch.Tensor) -> torch.Tensor:
    """What loss functions do with a loss mask: at least one token a sample."""
    return torch.clamp_min(mask.sum(), 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.bool])
def test_a_zero_count_mask_counts_nothing_and_is_else_an_empty_mask(dtype: torch.dtype) -> None:
    mask = zero_count_mask(torch.zeros(0, dtype=dtype))
    count = counted(mask)
    total = sum([count])
    assert type(total) is torch.Tensor
    assert sum([counted(torch.ones(3)), count]) == 3
    assert torch.tensor([total, 2.0]).tolist() == [0.0, 2.0]
    accumulated = torch.zeros([])  # what Megatron's schedules do with it
    accumulated += total
    assert accumulated == total == mask.sum().item() == 0
    assert torch.clamp(mask.sum(), min=1) + 0 == 0
    # A mean over it divides by 1, and stays attached.
    values = torch.zeros(0, requires_grad=True)
    mean = (values * mask).sum() / count
    assert type(mean) is torch.Tensor
    assert mean == 0
    mean.backward()
    assert values.grad is not None
    assert torch.tensor(3.0) / count == 3
    assert mask.dtype == dtype
    assert len(mask) == mask.numel() == 0
    for made in (mask[0:0], mask.double(), torch.cat([mask, torch.ones(2)]), mask.sum(dim=0) + 1):
        assert type(made) is torch.Tensor
    assert torch.cat([mask, torch.ones(2)]).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"found one of shape \[2\]"):
        zero_count_mask(torch.ones(2))


SIZES = {"hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 256}


class Mark(float):
    """A time of the clock, as a device's event."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: float) -> float:
        return 1e3 * (end - self)


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainersCosts]:
    """The rollout manager's actor, in this process. A micro-batch costs as much as 50 tokens, far
    more than the model's shape says."""
    made, ray, now = TrainersCosts(first_guess(SIZES)), MagicMock(), [0.0]
    options = ray.remote(TrainersCosts).options
    options().remote().add.remote = made.add
    options().remote().cost_model.remote = made.cost_model
    ray.get = lambda result: result
    monkeypatch.setitem(sys.modules, "ray", ray)

    def forward_step(forward_step_func: Any, data_iterator: Any, *given: Any) -> str:
        lengths = data_iterator.get_next(["total_lengths"])["total_lengths"]
        # Log-probs teach nothing.
        now[0] += 50e-3 + 1e-3 * sum(lengths) if torch.is_grad_enabled() else 1.0
        return "made"

    monkeypatch.setattr(schedules, "forward_step", forward_step)
    monkeypatch.setattr(timing, "mark", lambda: Mark(now[0]))
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    trainers_costs.cache_clear()
    yield made
    trainers_costs.cache_clear()
    ray.remote.assert_called_with(TrainersCosts)
    assert options.call_args.kwargs.items() >= {"get_if_exists": True, "num_cpus": 0}.items()
    options().remote.assert_any_call(first_guess(SIZES))


def planned(lengths: list[int], cost_model: str = "auto") -> list[list[int]]:
    """The micro-batches of a step on the only data-parallel rank, as places in ``lengths``."""
    options = {"dynamic_batch_cost_model": cost_model, "dynamic_batch_plan_effort": 100}
    args = slime_arguments(160, **SIZES, pipeline_model_parallel_size=4, **options)
    partitions, micro_batches, *_ = slime_plan(args, trainer_sizes(1), lengths)
    return [[partitions[0][place] for place in samples] for samples in micro_batches[0]]


def trained(lengths: list[int]) -> list[list[int]]:
    """The plan of a rollout, which is trained by it as slime does: log-probs come first, and
    iterators are drawn from inside the forward step."""
    plan, tokens = planned(lengths), [torch.zeros(n, dtype=torch.long) for n in lengths]
    rollout = {"tokens": tokens, "total_lengths": lengths, "micro_batch_indices": plan}
    (iterator,) = trainer_of("slime").data.get_data_iterator(rollout)
    for has_gradients in (False, True):
        with torch.set_grad_enabled(has_gradients):
            for _ in plan:
                assert schedules.forward_step(None, iterator, "model") == "made"
        iterator.reset()
    return plan


def test_costs_are_learnt_from_what_the_trainer_times_and_change_the_plan(
    actor: TrainersCosts, small: Small, tmp_path: Path, capfd: Any
) -> None:
    """The first rollouts are planned by what the model's shape costs, later ones by what passes
    took."""
    small("slime")
    draw = random.Random(5)
    rollouts = [[draw.choice([5, 10, 20, 40, 80]) for _ in range(12)] for _ in range(10)]
    args = slime_arguments(160, **SIZES, dynamic_batch_cost_model="auto")
    init(args)
    assert "schedules.forward_step" in capfd.readouterr().out
    plans = [trained(lengths) for lengths in rollouts]
    fixed = [planned(lengths, "fixed") for lengths in rollouts]
    shape = shape_costs(args)
    actor.add([0.0] * len(actor._evidence))  # a rank that timed nothing takes nothing away
    assert any(actor._evidence)
    learnt = actor.cost_model()
    assert shape.per_micro_batch / shape.linear != pytest.approx(50, rel=0.5)
    assert learnt.per_micro_batch / learnt.linear == pytest.approx(50, rel=0.15)
    assert plans[:2] == fixed[:2]
    assert all(ours != theirs for ours, theirs in zip(plans[5:], fixed[5:], strict=True))
    path = tmp_path / "costs.json"
    path.write_text(learnt.to_json())
    assert planned(rollouts[-1]) == planned(rollouts[-1], str(path))
