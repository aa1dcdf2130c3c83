"""Packed rows in the order in which a script unpacks its batch, and how it is taught that."""

from __future__ import annotations

import functools
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_batching.batch import make_placeholder, owned_num_tokens, pack
from mcore_batching.integrations.megatron_lm import next_batch
from mcore_batching.integrations.megatron_lm.batch_fields import (
    SIX_FIELDS,
    TEN_FIELDS,
    PackedRows,
    fields_unpacked_by,
)
from mcore_batching.integrations.megatron_lm.samples import FIELDS, STOCK_SCHEMA
from mcore_batching.integrations.megatron_lm.script import (
    declare_batch_fields,
    restore_batches,
    use_packed_batches,
)
from mcore_batching.megatron import DynamicBatchArgumentError
from mcore_batching.megatron.prepared_step import PreparedRow

PAD = 9
SAMPLES: dict[str, list[Any]] = {
    "tokens": [torch.tensor([1, 2, 3]), torch.tensor([4, 5])],
    "labels": [torch.tensor([2, 3, 7]), torch.tensor([5, 8])],
    "loss_mask": [torch.tensor([0.0, 1.0, 1.0]), torch.tensor([1.0, 1.0])],
    "position_ids": [torch.arange(3), torch.arange(2)],
    "total_lengths": [3, 2],
    "response_lengths": [0, 0],
}


def prepared(samples: dict[str, list[Any]], *, is_placeholder: bool = False) -> PreparedRow:
    """The samples as one row, each padded to a multiple of 4."""
    row = pack(
        samples,
        schema=STOCK_SCHEMA,
        sample_alignment_tokens=4,
        pad_token_id=PAD,
        sample_indices=() if is_placeholder else range(len(samples["tokens"])),
        is_placeholder=is_placeholder,
    )
    return PreparedRow(row, owned_num_tokens(row))


def rows(counts_flops: bool = True, is_placeholder: bool = False) -> PackedRows:
    samples = SAMPLES
    if is_placeholder:
        samples = make_placeholder(STOCK_SCHEMA, list(SAMPLES), SAMPLES, pad_token_id=PAD)
    row = prepared(samples, is_placeholder=is_placeholder)
    return PackedRows(iter([row]), counts_flops=counts_flops)


EXPECTED = {
    "tokens": [[1, 2, 3, PAD, 4, 5, PAD, PAD]],
    "labels": [[2, 3, 7, 0, 5, 8, 0, 0]],
    "loss_mask": [[0, 1, 1, 0, 1, 1, 0, 0]],
    "position_ids": [[0, 1, 2, 0, 0, 1, 0, 0]],
}


def found(values: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))


@pytest.mark.parametrize("names", [SIX_FIELDS, TEN_FIELDS], ids=["6", "10"])
@pytest.mark.parametrize("by", ["number", "names", "names backwards"])
def test_fields_come_in_the_order_of_the_script(names: tuple[str, ...], by: str) -> None:
    if by == "names backwards":
        names = names[::-1]
    values = next_batch(rows(), len(names) if by == "number" else names)
    assert values is not None
    got = found(values, names)
    for name in FIELDS:
        assert torch.equal(got[name], torch.tensor(EXPECTED[name]).to(got[name].dtype)), name
    assert got["tokens"].dtype == got["labels"].dtype == torch.int64
    assert got["loss_mask"].dtype == torch.float32
    assert got["attention_mask"] is None


def test_rows_are_told_apart_by_packed_sequence_parameters() -> None:
    values = next_batch(rows(), 6)
    assert values is not None
    params = found(values, SIX_FIELDS)["packed_seq_params"]
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 4, 8]
    assert params.max_seqlen_q == params.max_seqlen_kv == 4


def test_rows_are_told_apart_by_offsets_where_scripts_make_the_parameters() -> None:
    values = next_batch(rows(), 10)
    assert values is not None
    got = found(values, TEN_FIELDS)
    assert got["cu_seqlens_padded"].tolist() == [[0, 4, 8]]
    assert got["cu_seqlens_padded"].dtype == torch.int32
    assert int(got["max_seqlen"]) == 4
    assert got["hybrid_cp_group"] is None
    assert got["local_cp_size"] is None


@pytest.mark.parametrize(
    ("counts_flops", "is_placeholder", "lengths"),
    [(True, False, [3, 2]), (True, True, [0]), (False, False, []), (False, True, [])],
)
def test_statistics_of_lengths_count_real_samples_of_training_alone(
    counts_flops: bool, is_placeholder: bool, lengths: list[int]
) -> None:
    """Stock code takes lengths from ``cu_seqlens``; with fewer than two offsets it counts none."""
    values = next_batch(rows(counts_flops, is_placeholder), TEN_FIELDS)
    assert values is not None
    offsets = found(values, TEN_FIELDS)["cu_seqlens"]
    assert offsets.dtype == torch.int32
    assert offsets.shape == (1, len(lengths) + 1)
    assert offsets[0].diff().tolist() == lengths


def test_placeholders_train_nothing() -> None:
    values = next_batch(rows(is_placeholder=True), SIX_FIELDS)
    assert values is not None
    got = found(values, SIX_FIELDS)
    assert got["loss_mask"].tolist() == [[0, 0, 0, 0]]
    assert got["tokens"].shape == got["labels"].shape == got["position_ids"].shape == (1, 4)


def test_each_call_draws_the_next_row() -> None:
    both = PackedRows(
        iter([prepared(SAMPLES), prepared({k: v[1:] for k, v in SAMPLES.items()})]),
        counts_flops=True,
    )
    assert both.current is None
    shapes = []
    for _ in range(2):
        values = next_batch(both, 6)
        assert values is not None
        assert both.current is not None
        assert both.current.tokens is values[0]
        shapes.append(tuple(values[0].shape))
    assert shapes == [(1, 8), (1, 4)]
    with pytest.raises(StopIteration):
        next_batch(both, 6)


@pytest.mark.parametrize("number", [0, 5, 7])
def test_other_numbers_of_fields_ask_for_names(number: int) -> None:
    with pytest.raises(DynamicBatchArgumentError, match=rf"got {number}: give their names"):
        next_batch(rows(), number)


def script(tmp_path: Path, text: str) -> types.ModuleType:
    """A module of its own, with its source on disk, as scripts are."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    module = types.ModuleType("script")
    module.__file__ = str(path)
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    return module


STOCK = """
    import functools

    def get_batch(data_iterator, vp_stage=None):
        return [f"{name}{vp_stage}" for name in next(data_iterator)]

    def forward_step(data_iterator, model):
        tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params = get_batch(
            data_iterator, model
        )
        return tokens, packed_seq_params

    @functools.wraps(forward_step)
    def decorated(*arguments):
        return forward_step(*arguments)
"""


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    restore_batches()
    declare_batch_fields(None)


def test_names_are_read_from_the_forward_step(tmp_path: Path) -> None:
    assert fields_unpacked_by(script(tmp_path, STOCK).forward_step) == SIX_FIELDS


def test_names_are_read_of_get_batch_alone(tmp_path: Path) -> None:
    module = script(
        tmp_path,
        """
        def forward_step(data_iterator, model):
            first, second = other(data_iterator)
            whole = get_batch
            (
                attention_mask, cu_seqlens, cu_seqlens_padded, hybrid_cp_group, labels,
                local_cp_size, loss_mask, max_seqlen, position_ids, tokens,
            ) = get_batch(data_iterator)
            a, b = timers("x"), 2
        """,
    )
    assert fields_unpacked_by(module.forward_step) == TEN_FIELDS


@pytest.mark.parametrize(
    "of",
    [
        lambda module: module.forward_step,
        lambda module: functools.partial(module.forward_step),
        lambda module: functools.partial(functools.partial(module.forward_step)),
        lambda module: module.decorated,
        lambda module: functools.partial(module.decorated),
    ],
    ids=["itself", "partial", "partial of a partial", "decorated", "partial of decorated"],
)
def test_get_batch_takes_packed_rows_and_ordinary_iterators(
    tmp_path: Path, of: Callable[[types.ModuleType], Any]
) -> None:
    module = script(tmp_path, STOCK)
    use_packed_batches(of(module))
    tokens, params = module.forward_step(rows(), None)
    assert tokens.tolist() == EXPECTED["tokens"]
    assert params.qkv_format == "thd"
    assert module.forward_step(iter(["abcdef"]), 1) == ("a1", "f1")


def test_a_script_is_taught_once_and_forgets(tmp_path: Path) -> None:
    module = script(tmp_path, STOCK)
    original = module.get_batch
    use_packed_batches(module.forward_step)
    taught = module.get_batch
    assert taught is not original
    use_packed_batches(module.decorated)
    assert module.get_batch is taught
    restore_batches()
    assert module.get_batch is original
    restore_batches()
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
    assert module.forward_step(rows(), None).tolist() == EXPECTED["tokens"]


UNREADABLE = """
    def get_batch(data_iterator):
        return next(data_iterator)

    def forward_step(data_iterator, model):
        batch = get_batch(data_iterator)
        return batch
"""


def test_declared_names_take_the_place_of_the_source(tmp_path: Path) -> None:
    module = script(tmp_path, UNREADABLE)
    names = ("packed_seq_params", *FIELDS)
    declare_batch_fields(names)
    use_packed_batches(module.forward_step)
    got = found(module.forward_step(rows(), None), names)
    assert got["tokens"].tolist() == EXPECTED["tokens"]
    with pytest.raises(DynamicBatchArgumentError, match=r"install\(batch_fields=.*has images"):
        declare_batch_fields([*names, "images"])


def test_source_that_cannot_be_had_asks_for_names() -> None:
    scope: dict[str, Any] = {}
    exec(textwrap.dedent(UNREADABLE), scope)
    with pytest.raises(
        DynamicBatchArgumentError, match=r"cannot read the source .*install\(batch_fields="
    ):
        use_packed_batches(scope["forward_step"])


def test_batches_without_offsets_of_samples_are_refused(tmp_path: Path) -> None:
    module = script(
        tmp_path,
        """
        def forward_step(data_iterator, model):
            tokens, labels, loss_mask, position_ids, cu_seqlens = get_batch(data_iterator)
        """,
    )
    with pytest.raises(
        DynamicBatchArgumentError,
        match=r"lacks packed_seq_params \(or cu_seqlens and cu_seqlens_padded\).*up to 0.17.*0.18",
    ):
        fields_unpacked_by(module.forward_step)
