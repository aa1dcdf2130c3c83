"""The datasets provider of ``--dynamic-batch-data``, and its flags.

Without ``--dynamic-batch-data`` a script keeps its own datasets. With it, the ranks that read data
in stock scripts read and tokenize all files once at the start, to know the lengths.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.utils import Split

from mcore_batching.flags import FINE_TUNING, PREFIX, add_flags
from mcore_batching.integrations.megatron_lm.sft.dataset import (
    Indices,
    SftDataset,
    TokenizedLines,
)
from mcore_batching.integrations.megatron_lm.sft.jsonl import JsonLines, SftDataError
from mcore_batching.integrations.megatron_lm.sft.tokenization import (
    SampleTokenizer,
    byte_level_tokenizer,
)

Datasets = tuple[SftDataset | None, SftDataset | None, SftDataset | None]
"""For training, validation and test."""
_DEFAULT_SPLIT = "969, 30, 1"
"""Megatron's own."""


def add_sft_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of the data, as an ``extra_args_provider``.

    Flags that the parser has already are left alone.
    """
    return add_flags(parser, [FINE_TUNING])


def build_sft_datasets(
    args: Any,
    train_valid_test_num_samples: Sequence[int | None],
    pad: bool | None = None,
    *,
    vp_stage: int | None = None,
    tokenizer: Any = None,
) -> Datasets:
    """The datasets of a job, from ``--dynamic-batch-data``.

    Args:
        args: Megatron's arguments.
        train_valid_test_num_samples: samples to draw of each; None: each sample once.
        pad: pad every sample to ``--seq-length``, as code without dynamic micro-batches needs it;
            None: unless ``--use-dynamic-batch-size`` is set.
        vp_stage: the model chunk, with virtual pipeline stages.
        tokenizer: writes the samples; None: as ``--dynamic-batch-tokenizer`` says.

    Returns:
        training, validation and test dataset; None for one of 0 samples or a share of 0, and all
        None on ranks that read no data.

    Raises:
        SftDataError: a file, a line or ``--split`` cannot be used.
    """
    if not args.dynamic_batch_data:
        raise SftDataError(f"no file to train on: set {PREFIX}data to JSON-lines files")
    if not _reads_data(args, vp_stage):
        return None, None, None
    if pad is None:
        pad = not getattr(args, "use_dynamic_batch_size", False)
    numbers = train_valid_test_num_samples
    lines = JsonLines(args.dynamic_batch_data)
    samples = TokenizedLines(lines, _sample_tokenizer(args, tokenizer))
    shares = _split_records(lines, args.split)
    wanted = [
        share if number is None or number > 0 else None
        for share, number in zip(shares, numbers, strict=True)
    ]
    fitting = _without_too_long(samples, wanted, args.seq_length, args.dynamic_batch_on_too_long)
    made = [
        None
        if members is None
        else SftDataset(
            samples,
            members,
            split=split,
            num_samples=number,
            seed=args.seed if split is Split.train else None,
            pad_to=args.seq_length if pad else None,
            attention_mask=pad and getattr(args, "create_attention_mask_in_dataloader", False),
        )
        for split, members, number in zip(Split, fitting, numbers, strict=True)
    ]
    return made[0], made[1], made[2]


def datasets_provider(
    train_valid_test_num_samples: Sequence[int | None], vp_stage: int | None = None
) -> Datasets:
    """`build_sft_datasets` of the job's arguments, for ``megatron.training.pretrain``."""
    from megatron.training import get_args

    return build_sft_datasets(get_args(), train_valid_test_num_samples, vp_stage=vp_stage)


# Megatron's mark for providers to be called on every rank, not only on tensor-parallel rank 0.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def datasets_provider_for(args: Any, provider: Callable[..., Any]) -> Callable[..., Any]:
    """The datasets provider to pass to stock code.

    Args:
        args: Megatron's arguments.
        provider: the script's, perhaps a ``functools.partial`` with its ``vp_stage``.

    Returns:
        `datasets_provider` for the same model chunk with ``--dynamic-batch-data``, else
        ``provider`` itself.
    """
    if not getattr(args, "dynamic_batch_data", None):
        return provider
    vp_stage = getattr(provider, "keywords", {}).get("vp_stage")
    replacement = functools.partial(datasets_provider, vp_stage=vp_stage)
    replacement.is_distributed = True  # type: ignore[attr-defined]
    return replacement


def _split_records(lines: JsonLines, split: str | None) -> list[Indices | None]:
    """Records for training, validation and test; None for a share of 0.

    Every file is cut at the same shares, in its own order, as Megatron cuts its files.

    Args:
        lines: the records.
        split: as ``--split`` spells it; None: `_DEFAULT_SPLIT`.

    Raises:
        SftDataError: ``split`` cannot be read.
    """
    split = split or _DEFAULT_SPLIT
    try:
        with np.errstate(invalid="ignore"):
            vector = parse_and_normalize_split(split)
        valid = bool(np.isfinite(vector).all())
    except (AssertionError, ValueError):
        valid = False
    if not valid:
        raise SftDataError(
            f"--split must be one to three shares of 0 or more, got {split!r}; set for instance "
            f"'{_DEFAULT_SPLIT}'"
        )
    return [
        None
        if share is None
        else np.concatenate([_cut(records, *share) for records in lines.files])
        for share in convert_split_vector_to_split_matrix(vector)
    ]


def _cut(records: range, start: float, end: float) -> Indices:
    first, last = (records.start + round(bound * len(records)) for bound in (start, end))
    return np.arange(first, last, dtype=np.int64)


def _without_too_long(
    samples: TokenizedLines, shares: Sequence[Indices | None], max_length: int, on_too_long: str
) -> list[Indices | None]:
    """The members of each share that are not too long.

    Args:
        samples: of all files.
        shares: as `_split_records` returns them; None stays None.
        max_length: of a sample in next-token prediction, one less than its tokens.
        on_too_long: ``"error"`` or ``"drop"``.

    Raises:
        SftDataError: a share has no member, or, unless they are to be dropped, some are too long.
    """
    fitting: list[Indices | None] = []
    too_long: list[tuple[int, int]] = []
    for split, share in zip(Split, shares, strict=True):
        if share is None:
            fitting.append(None)
            continue
        lengths = np.array([len(samples[int(index)].ids) - 1 for index in share], np.int64)
        too_long += zip(share[lengths > max_length], lengths[lengths > max_length], strict=True)
        short = share[lengths <= max_length]
        fitting.append(short)
        if not len(share):
            raise SftDataError(
                f"--split leaves no record of {', '.join(samples.lines.paths)} for the "
                f"{split.name} dataset: raise its share, or set it to 0"
            )
        if on_too_long == "drop" and not len(short):
            raise SftDataError(
                f"all {len(share)} samples of the {split.name} dataset are longer than "
                f"--seq-length {max_length} (the shortest: {min(lengths)}): raise --seq-length"
            )
    if too_long:
        index, length = max(too_long, key=lambda each: each[1])
        found = (
            f"{len(too_long)} of {sum(len(share) for share in shares if share is not None)} "
            f"samples are longer than --seq-length {max_length}; the longest, here, has length "
            f"{length}"
        )
        if on_too_long == "error":
            raise samples.lines.error(
                int(index),
                f"{found}: raise --seq-length, or leave such samples out with "
                f"{PREFIX}on-too-long drop",
            )
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"{samples.lines.error(int(index), found)}: left out", flush=True)
    return fitting


def _reads_data(args: Any, vp_stage: int | None = None) -> bool:
    """True if this rank reads data for a model chunk, by the rule of ``pretrain_gpt.py``.

    Tensor-parallel rank 0 of the first and last pipeline stage reads; with multi-token prediction,
    whose layers may be on any stage, that of every stage.
    """
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return False
    if getattr(args, "mtp_num_layers", None):
        return True
    chunk = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    return bool(
        parallel_state.is_pipeline_first_stage(**chunk)
        or parallel_state.is_pipeline_last_stage(**chunk)
    )


def _sample_tokenizer(args: Any, tokenizer: Any) -> SampleTokenizer:
    if tokenizer is None and args.dynamic_batch_tokenizer == "bytes":
        tokenizer = byte_level_tokenizer()
    elif tokenizer is None:
        from megatron.training import get_tokenizer

        tokenizer = get_tokenizer()
    vocabulary = getattr(args, "padded_vocab_size", None)
    if vocabulary is not None and tokenizer.vocab_size > vocabulary:
        raise SftDataError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model's embedding "
            f"{vocabulary} entries: set --vocab-size to {tokenizer.vocab_size} or more"
        )
    return SampleTokenizer(tokenizer)
