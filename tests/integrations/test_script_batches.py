"""A script's ``get_batch``, read from its forward step and replaced."""

from __future__ import annotations

import functools
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packed_row_cases import EXPECTED, rows

from mcore_batching.integrations.megatron_lm.script_batches import (
    SEVEN_FIELDS,
    SIX_FIELDS,
    TEN_FIELDS,
    fields_unpacked_by,
    installation,
    use_packed_batches,
)
from mcore_batching.megatron import DynamicBatchArgumentError


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
    installation.undo()


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


def test_of_a_batch_unpacked_in_branches_the_longest_that_fits_is_taken(tmp_path: Path) -> None:
    module = script(
        tmp_path,
        """
        def get_batch(data_iterator):
            return next(data_iterator)

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
                first, second = model
            return tokens, packed_seq_params
        """,
    )
    assert fields_unpacked_by(module.forward_step) == SEVEN_FIELDS
    use_packed_batches(module.forward_step)
    tokens, params = module.forward_step(rows(), (1, 2))
    assert tokens.tolist() == EXPECTED["tokens"]
    assert params.qkv_format == "thd"
    assert module.forward_step(iter(["abcdef"]), (1, 2)) == ("a", "f")


@pytest.mark.parametrize(
    "of",
    [
        lambda module: module.forward_step,
        lambda module: functools.partial(functools.partial(module.decorated)),
    ],
    ids=["itself", "partial of a partial of decorated"],
)
def test_get_batch_takes_packed_rows_and_ordinary_iterators(
    tmp_path: Path, of: Callable[[types.ModuleType], Any]
) -> None:
    module = script(tmp_path, STOCK)
    assert fields_unpacked_by(module.forward_step) == SIX_FIELDS
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
    installation.undo()
    assert module.get_batch is original
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
    assert module.forward_step(rows(), None).tolist() == EXPECTED["tokens"]


UNREADABLE = """
    def get_batch(data_iterator):
        return next(data_iterator)

    def forward_step(data_iterator, model):
        batch = get_batch(data_iterator)
        return batch
"""


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
        def get_batch(data_iterator):
            return next(data_iterator)

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
    exec(textwrap.dedent(UNREADABLE), scope)
    with pytest.raises(DynamicBatchArgumentError, match=r"cannot read the source .*next_batch"):
        use_packed_batches(scope["forward_step"])
