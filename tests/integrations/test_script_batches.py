"""A stock script's batches: its ``get_batch``, read from its forward step and replaced, and packed
rows in the order in which it unpacks them."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packed_row_cases import EXPECTED, SAMPLES, prepared, rows

from mcore_batching.integrations.megatron_lm import next_batch, script_batches
from mcore_batching.integrations.megatron_lm.script_batches import (
    SEVEN_FIELDS,
    SIX_FIELDS,
    TEN_FIELDS,
    PackedRows,
    fields_unpacked_by,
    installation,
    use_packed_batches,
)
from mcore_batching.megatron import DynamicBatchArgumentError


def script(tmp_path: Path, text: str) -> types.ModuleType:
    """A module of its own, with its source on disk, as scripts are."""
    path = tmp_path / "script.py"
    path.write_text(GET_BATCH + textwrap.dedent(text) + DECORATED)
    module = types.ModuleType("script")
    module.__file__ = str(path)
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    return module


GET_BATCH = """
import functools

def get_batch(data_iterator, vp_stage=None):
    return [f"{name}{vp_stage or ''}" for name in next(data_iterator)]
"""
DECORATED = """

@functools.wraps(forward_step)
def decorated(*arguments):
    return forward_step(*arguments)
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


@pytest.mark.parametrize(
    ("model_size", "times"),
    [
        (1, [1]),
        (1, [1, 0]),
        (1, [1, 0, 0, 0]),
        (2, [2]),
        (2, [1, 1]),
        (2, [1, 0, 1, 0]),
        (3, [2, 1]),
    ],
)
def test_a_row_counts_as_often_as_the_model_has_context_parallel_ranks(
    monkeypatch: pytest.MonkeyPatch, model_size: int, times: list[int]
) -> None:
    """Stock code divides by their number, also what rows on more or fewer ranks add up to. It adds
    up over all ranks in a step in which it was given any lengths: with fewer than two offsets a
    rank would stay away from that sum, and the others wait for it."""
    monkeypatch.setattr(script_batches, "row_group", lambda size: object())
    groups = SimpleNamespace(get_context_parallel_world_size=lambda: model_size)
    monkeypatch.setattr(script_batches, "parallel_state", groups)
    usual = prepared(SAMPLES)
    for rank, count in enumerate(times):
        shared = {"context_parallel_size": len(times), "context_parallel_rank": rank}
        row = dataclasses.replace(usual, **shared)
        (offsets,) = PackedRows(iter([row]), counts_flops=True).next_fields(["cu_seqlens"])
        assert offsets.dtype == torch.int32
        assert offsets[0].diff().tolist() == ([3, 2] * count or [0, 0])


@pytest.mark.parametrize("number", [0, 5, 8])
def test_numbers_of_fields_that_no_release_has_ask_for_names(number: int) -> None:
    with pytest.raises(DynamicBatchArgumentError, match=rf"{number}: give their names, as next"):
        next_batch(rows(), number)
    assert next_batch(iter([1]), 6) is None  # ordinary iterators are left to the script
    assert next_batch(None, 10) is None
