"""Packed rows in a stock script: its ``get_batch``, read from its forward step and replaced, gives
their fields in the order in which it unpacks them; calls and losses that are refused."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batch_cases import pack
from hypothesis import given
from hypothesis import strategies as st
from kit.stand_ins import module_of

from mcore_batching.batch import PackedMicroBatch, make_placeholder
from mcore_batching.integrations.megatron_lm import (
    forward_backward,
    next_batch,
    script_batches,
    with_batching_statistics,
)
from mcore_batching.integrations.megatron_lm.forward_backward import check_loss, row_given
from mcore_batching.integrations.megatron_lm.script_batches import (
    SEVEN_FIELDS,
    SIX_FIELDS,
    TEN_FIELDS,
    PackedRows,
    fields_unpacked_by,
    installation,
    use_packed_batches,
)
from mcore_batching.integrations.megatron_lm.stock_steps import STOCK_SCHEMA, StockSteps
from mcore_batching.megatron import DynamicBatchArgumentError
from mcore_batching.planning import ParallelDims, PlannerConfig, plan_step, step_statistics

PAD = 9
SAMPLES: dict[str, list[Any]] = {
    "tokens": [torch.tensor([1, 2, 3]), torch.tensor([4, 5])],
    "labels": [torch.tensor([2, 3, 7]), torch.tensor([5, 8])],
    "loss_mask": [torch.tensor([0.0, 1.0, 1.0]), torch.tensor([1.0, 1.0])],
    "position_ids": [torch.arange(3), torch.arange(2)],
    "total_lengths": [3, 2],
    "response_lengths": [0, 0],
}


def rows(counts_flops: bool = True, is_placeholder: bool = False, **changed: int) -> PackedRows:
    """The samples as one row, each padded to a multiple of 4, or a placeholder."""
    samples = SAMPLES
    if is_placeholder:
        samples = make_placeholder(STOCK_SCHEMA, list(SAMPLES), SAMPLES, pad_token_id=PAD)
    options: dict[str, Any] = {"align": 4, "pad_token_id": PAD, "has_labels": True}
    row = pack(samples, STOCK_SCHEMA, is_placeholder=is_placeholder, **options)
    return PackedRows(iter([dataclasses.replace(row, **changed)]), counts_flops=counts_flops)


EXPECTED = {
    "tokens": (torch.int64, [[1, 2, 3, PAD, 4, 5, PAD, PAD]]),
    "labels": (torch.int64, [[2, 3, 7, 0, 5, 8, 0, 0]]),
    "loss_mask": (torch.float32, [[0, 1, 1, 0, 1, 1, 0, 0]]),
    "position_ids": (torch.int64, [[0, 1, 2, 0, 0, 1, 0, 0]]),
    "cu_seqlens": (torch.int32, [[0, 3, 5]]),
    "cu_seqlens_padded": (torch.int32, [[0, 4, 8]]),
    "max_seqlen": (torch.int32, 4),
}
"""Type and values of each field of `rows` in a script's batch; others are None."""


def script(tmp_path: Path, text: str) -> Any:
    """A module of its own, with its source on disk, as scripts are."""
    path = tmp_path / "script.py"
    path.write_text(GET_BATCH + textwrap.dedent(text) + DECORATED)
    return module_of(path)


GET_BATCH = """
def get_batch(data_iterator, vp_stage=None):
    return [f"{name}{vp_stage or ''}" for name in next(data_iterator)]
"""
DECORATED = """
import torch

decorated = torch.no_grad()(forward_step)
"""
STOCK = """
def forward_step(data_iterator, model):
    tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params = get_batch(
        data_iterator, model
    )
    return tokens, packed_seq_params
"""
BRANCHES = """
def forward_step(data_iterator, model):
    first = second = None
    batch = get_batch(data_iterator)
    if len(batch) == 8:
        tokens, labels, loss_mask, attention_mask, position_ids, a, b, c = batch
    elif len(batch) == 7:
        (
            tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params,
            padding_mask,
        ) = batch
    else:
        tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params = batch
        first, second = "xy"
    return tokens, packed_seq_params
"""
ALPHABETICAL = """
def forward_step(data_iterator, model):
    first, second = other(data_iterator)
    whole = get_batch
    (
        attention_mask, cu_seqlens, cu_seqlens_padded, hybrid_cp_group, labels,
        local_cp_size, loss_mask, max_seqlen, position_ids, tokens,
    ) = get_batch(data_iterator)
    a, b = timers("x"), 2
"""


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    installation.undo()


def test_names_are_read_of_get_batch_alone(tmp_path: Path) -> None:
    """Of several branches the longest that fits."""
    expected = {STOCK: SIX_FIELDS, BRANCHES: SEVEN_FIELDS, ALPHABETICAL: TEN_FIELDS}
    for text, fields in expected.items():
        assert fields_unpacked_by(script(tmp_path, text).forward_step) == fields


@pytest.mark.parametrize("name", ["forward_step", "decorated"])
@pytest.mark.parametrize("text", [STOCK, BRANCHES], ids=["plain", "branches"])
def test_get_batch_takes_packed_rows_and_ordinary_iterators(
    tmp_path: Path, text: str, name: str
) -> None:
    module = script(tmp_path, text)
    original = module.get_batch
    use_packed_batches(functools.partial(functools.partial(getattr(module, name))))
    ours, iterator = module.get_batch, rows()
    tokens, params = module.forward_step(iterator, None)
    assert tokens is iterator.current.tokens
    assert tokens.tolist() == EXPECTED["tokens"][1]
    assert params.qkv_format == "thd"
    with pytest.raises(StopIteration):
        module.forward_step(iterator, None)
    stage = "" if text == BRANCHES else "1"
    assert module.forward_step(iter(["abcdef"]), 1) == (f"a{stage}", f"f{stage}")
    use_packed_batches(module.forward_step)
    assert module.get_batch is ours is not original
    for _ in range(2):
        installation.undo()
        assert module.get_batch is original


def test_a_script_that_calls_next_batch_itself_is_left_alone(tmp_path: Path) -> None:
    module = script(
        tmp_path,
        """
        from mcore_batching.integrations.megatron_lm import next_batch

        def get_batch(data_iterator):
            packed = next_batch(data_iterator, ("tokens", "packed_seq_params"))
            return packed if packed is not None else next(data_iterator)

        def forward_step(data_iterator, model):
            batch = get_batch(data_iterator)
            return batch[0]
        """,
    )
    original = module.get_batch
    use_packed_batches(module.forward_step)
    assert module.get_batch is original
    assert module.forward_step(rows(), None).tolist() == EXPECTED["tokens"][1]


@pytest.mark.parametrize(
    ("unpacked", "message"),
    [
        ("tokens, labels, loss_mask, attention_mask, position_ids", "lacks packed_seq_params"),
        (
            "tokens, labels, loss_mask, position_ids, cu_seqlens",
            r"lacks packed_seq_params \(or cu_seqlens and cu_seqlens_padded\).*up to 0.17.*0.18",
        ),
        ("tokens, loss_mask, position_ids, packed_seq_params", "lacks labels;"),
        ("tokens, labels, loss_mask, position_ids, packed_seq_params, images", "has images;"),
        ("batch", r"does not unpack get_batch\(\.\.\.\) into names"),
    ],
)
def test_batches_into_which_no_row_fits_are_refused(
    tmp_path: Path, unpacked: str, message: str
) -> None:
    module = script(
        tmp_path,
        f"""
        def forward_step(data_iterator, model):
            {unpacked} = get_batch(data_iterator)
        """,
    )
    original = module.get_batch
    with pytest.raises(DynamicBatchArgumentError, match=message):
        use_packed_batches(module.forward_step)
    assert module.get_batch is original


def test_scripts_whose_get_batch_cannot_be_read_are_refused() -> None:
    with pytest.raises(DynamicBatchArgumentError, match="module: name the function that reads"):
        use_packed_batches(pytest.importorskip)
    scope: dict[str, Any] = {}
    exec(GET_BATCH + "def forward_step(data_iterator): ...", scope)
    with pytest.raises(DynamicBatchArgumentError, match=r"cannot read the source .*next_batch"):
        use_packed_batches(scope["forward_step"])


@pytest.mark.parametrize("names", [SIX_FIELDS, SEVEN_FIELDS, TEN_FIELDS], ids=["6", "7", "10"])
@pytest.mark.parametrize("by", ["number", "names", "names backwards"])
def test_fields_come_in_the_order_of_the_script(names: tuple[str, ...], by: str) -> None:
    """With parameters, or offsets of which scripts make them."""
    if by == "names backwards":
        names = names[::-1]
    values = next_batch(rows(), len(names) if by == "number" else names)
    assert values is not None
    for name, value in zip(names, values, strict=True):
        if name == "packed_seq_params":
            assert value.qkv_format == "thd"
            assert value.cu_seqlens_q.tolist() == value.cu_seqlens_kv.tolist() == [0, 4, 8]
            assert value.max_seqlen_q == value.max_seqlen_kv == 4
        else:
            found = (value.dtype, value.tolist()) if torch.is_tensor(value) else None
            assert found == EXPECTED.get(name), name


@pytest.mark.parametrize(
    ("counts_flops", "is_placeholder", "lengths"),
    [(True, False, [3, 2]), (True, True, [0]), (False, False, []), (False, True, [])],
)
def test_statistics_of_lengths_count_real_samples_of_training_alone(
    counts_flops: bool, is_placeholder: bool, lengths: list[int]
) -> None:
    """Stock code takes lengths from ``cu_seqlens``; with fewer than two offsets it counts none."""
    (offsets,) = rows(counts_flops, is_placeholder).next_fields(["cu_seqlens"])
    assert offsets.dtype == torch.int32
    assert offsets.shape == (1, len(lengths) + 1)
    assert offsets[0].diff().tolist() == lengths


@given(st.integers(1, 4), st.integers(1, 8))
def test_a_row_counts_as_often_as_the_model_has_context_parallel_ranks(
    model_size: int, row_size: int
) -> None:
    """Stock code divides by their number, also what rows on more or fewer ranks add up to. It adds
    up over all ranks in a step in which it was given any lengths: with fewer than two offsets a
    rank would stay away from that sum, and the others wait for it."""
    groups = SimpleNamespace(get_context_parallel_world_size=lambda: model_size)
    counted = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(script_batches, "row_group", lambda size: object())
        patched.setattr(script_batches, "parallel_state", groups)
        for rank in range(row_size):
            of_rank = rows(context_parallel_size=row_size, context_parallel_rank=rank)
            (offsets,) = of_rank.next_fields(["cu_seqlens"])
            counted.append(offsets[0].diff().tolist())
    times = [lengths.count(3) for lengths in counted]
    assert counted == [[3, 2] * count or [0, 0] for count in times]
    assert sum(times) == model_size
    assert times[0] == max(times) == -(-model_size // row_size)


@pytest.mark.parametrize("number", [0, 5, 8])
def test_numbers_of_fields_that_no_release_has_ask_for_names(number: int) -> None:
    with pytest.raises(DynamicBatchArgumentError, match=rf"{number}: give their names, as next"):
        next_batch(rows(), number)
    assert next_batch(iter([1]), 6) is None  # ordinary iterators are left to the script
    assert next_batch(None, 10) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collect_non_loss_data": True}, "process_non_loss_data_func runs the model on one rank"),
        ({"adjust_tensor_shapes_fn": print}, "adjust_tensor_shapes_fn"),
    ],
)
def test_refused_calls(options: dict[str, Any], message: str) -> None:
    args: Any = SimpleNamespace()
    call = dict.fromkeys(
        ("forward_step_func", "data_iterator", "model", "num_microbatches", "micro_batch_size")
    )
    with pytest.raises(DynamicBatchArgumentError, match=message):
        forward_backward.run_packed(print, args, StockSteps(args), **call | options)


def test_rows_that_routers_losses_are_means_over() -> None:
    """Of each replica: a row on several ranks is one."""
    plan = SimpleNamespace(
        dims=ParallelDims(data_parallel=2, context_parallel=2),
        context_parallel=[[4, 2], [4, 2], [4, 1], [4, 1]],
    )
    schedule: Any = SimpleNamespace(steps=[[(), ()]], step_plan=lambda step: (plan, []))
    for most, expected in ((None, 2), (4, (1 + 3) / 2)):
        schedule.config = SimpleNamespace(max_context_parallel=most)
        assert forward_backward._rows_of_replica(schedule) == expected


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((torch.ones(()), {}), "got a tuple of 2"),
        (torch.ones(()), "got Tensor"),
        (
            (torch.ones(()), torch.ones(()), {"accuracy": torch.ones(1)}),
            r"must report accuracy as \[sum, number of tokens\]",
        ),
        ((torch.tensor(0), torch.ones(()), {}), r"one value, got .* and type torch.int64"),
        ((torch.ones(2), torch.ones(()), {}), r"tensor of one value, got a Tensor of shape \[2\]"),
        ((0.0, torch.ones(()), {}), r"a float tensor of one value, got 0.0"),
        ((torch.ones(()), torch.ones(()), None), "as a dict .*, got NoneType"),
    ],
)
def test_refused_losses(result: Any, message: str) -> None:
    check_loss((torch.ones(()), torch.ones(()), {"lm loss": torch.ones(2)}))
    with pytest.raises(DynamicBatchArgumentError, match=message):
        check_loss(result)


@pytest.mark.parametrize(
    ("value", "count", "requires_grad", "failure"),
    [
        (2.0, 3, True, "the loss is detached from the logits"),
        (0.0, 3, True, None),  # what a loss function leaves out
        (2.0, 0, True, None),  # of no trained tokens
        (2.0, 3, False, None),  # evaluation
    ],
)
def test_a_detached_loss_trains_nothing(
    value: float, count: int, requires_grad: bool, failure: str | None
) -> None:
    """Stages before waited for a gradient, or momentum alone moved the weights."""
    output = torch.ones(2, requires_grad=requires_grad)
    failed: list[Exception] = []
    job: Any = SimpleNamespace(defer=lambda failed, error, row: failed.append(error))
    given = torch.tensor(value), torch.tensor(count), {}
    step = forward_backward.with_deferred_errors(
        lambda *_: (output, lambda tensor: given), failed, job, nothing_later
    )
    _, loss = step(rows(), Chunk(None))
    share, _, _ = loss(output)
    assert [str(error).partition(",")[0] for error in failed] == ([failure] if failure else [])
    assert share.requires_grad == requires_grad
    assert failed or float(share) == value


def nothing_later(row: PackedMicroBatch) -> None: ...


class Chunk(torch.nn.Module):
    """Returns what it is given."""

    def __init__(self, num_moe_experts: int | None) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            num_moe_experts=num_moe_experts,
            sequence_parallel=False,
            apply_rope_fusion=False,
            mtp_num_layers=None,
        )

    def forward(self, **inputs: Any) -> dict[str, Any]:
        return inputs


def test_a_model_gets_the_rows_own_parameters_in_place_of_the_scripts() -> None:
    """Of padding routers learn by a mask; in a placeholder all is padding."""
    experts, dense, iterator = Chunk(4), Chunk(None), rows()
    scripts = {"packed_seq_params": "the script's", "labels": 1}
    with row_given(iterator, experts, nothing_later):
        assert experts(**scripts) == scripts  # before the row is drawn
        next(iterator)
        given = experts(**scripts)
    params = given["packed_seq_params"]
    assert params.host_cu_seqlens == (0, 4, 8)
    mask = [[False] * 3 + [True] + [False] * 2 + [True] * 2]
    assert params.own_padding_mask.tolist() == mask
    assert given["labels"] == 1
    with row_given(iterator, dense, nothing_later):
        assert not hasattr(dense()["packed_seq_params"], "own_padding_mask")
    with pytest.raises(TypeError), row_given(iterator, dense, nothing_later):
        dense("takes keywords alone")
    assert dense() == {}
    placeholder = rows(is_placeholder=True)
    with row_given(placeholder, experts, nothing_later):
        next(placeholder)
        assert experts()["packed_seq_params"].own_padding_mask.all()


def test_losses_are_joined_by_the_last_steps_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_backward, "_last_step", {})
    losses, lengths = {"lm loss": torch.tensor([2.0])}, [9, 6, 4, 2]
    assert with_batching_statistics(losses) == losses
    plan = plan_step(lengths, ParallelDims(data_parallel=2), PlannerConfig(max_tokens_per_gpu=8))
    schedule: Any = SimpleNamespace(step_plan=lambda step: (plan, lengths))
    made = step_statistics(plan, lengths)
    values = {"fill": made.fill, "padding": made.padding, "plan seconds": 0.5}
    values |= {
        "micro-batches a rank": made.num_microbatches,
        "time over floor": made.time_over_floor,
    }
    # Rows of fine-tuning alone can be truncated; the last step's are not this one's.
    for truncated, more in ((3, {"truncated": 3}), (None, {})):
        forward_backward.record_step(schedule, plan_seconds=0.5, truncated=truncated)
        expected = {f"batching/{name}": value for name, value in (values | more).items()}
        logged = with_batching_statistics(losses)
        assert {name: float(each) for name, each in logged.items()} == pytest.approx(
            expected | {"lm loss": 2.0}
        )
    assert list(losses) == ["lm loss"]
    assert with_batching_statistics({}) == {}  # ranks without losses
