"""The datasets provider of ``--dynamic-batch-data``, and its flags.

Without ``--dynamic-batch-data`` a script keeps its own datasets. With it, the ranks that read data
in stock scripts read and tokenize all files at the start, and keep the tokens in memory: 5 bytes
each, about as much as the text takes.
"""

from __future__ import annotations

import argparse
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

from mcore_batching.batch.consensus import Consensus
from mcore_batching.flags import FINE_TUNING, PREFIX, add_flags
from mcore_batching.integrations.megatron_lm.sft.dataset import SftDataset, read_samples
from mcore_batching.integrations.megatron_lm.sft.records import SftDataError
from mcore_batching.integrations.megatron_lm.sft.tokenization import (
    SampleTokenizer,
    SampleTokens,
    byte_level_tokenizer,
)
from mcore_batching.megatron.job import say

_DEFAULT_SPLIT = "969, 30, 1"  # Megatron's own


def add_sft_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of the data that the parser lacks, as an ``extra_args_provider``."""
    return add_flags(parser, [FINE_TUNING])


def build_sft_datasets(
    args: Any,
    train_valid_test_num_samples: Sequence[int | None],
    *,
    vp_stage: int | None = None,
) -> tuple[SftDataset | None, ...]:
    """The datasets of a job, from ``--dynamic-batch-data``.

    Every file is cut at the shares of ``--split``, in its own order, as Megatron cuts its files.
    Samples are padded to ``--seq-length``, unless ``--use-dynamic-batch-size`` is set.

    Args:
        args: Megatron's arguments.
        train_valid_test_num_samples: samples to draw of each; None: each sample once.
        vp_stage: the model chunk, with virtual pipeline stages.

    Returns:
        training, validation and test dataset; None for one of 0 samples and for tests of a share of
        0, and all None on ranks that read no data.

    Raises:
        SftDataError: a file, a line or ``--split`` cannot be used, or leaves nothing of what is
            asked for.
    """
    if not args.dynamic_batch_data:
        raise SftDataError(f"no file to train on: set {PREFIX}data to JSON-lines files")
    if not _reads_data(args, vp_stage):
        return None, None, None
    if args.dynamic_batch_tokenizer == "bytes":
        tokenizer = SampleTokenizer(byte_level_tokenizer())
    else:
        from megatron.training import get_tokenizer

        tokenizer = SampleTokenizer(get_tokenizer())
    files = [_fitting_samples(path, tokenizer, args) for path in args.dynamic_batch_data]
    wanted = zip(Split, _shares(files, args.split), train_valid_test_num_samples, strict=True)
    return tuple(_dataset(args, *each) for each in wanted)


def _dataset(
    args: Any, split: Split, samples: list[SampleTokens] | None, number: int | None
) -> SftDataset | None:
    # Megatron evaluates by --eval-iters, or --full-validation (where `number` is None), whether or
    # not there is a validation set: a share of 0 would end the job at its first evaluation.
    if number == 0 or (samples is None and split is not Split.valid):
        return None
    if not samples:
        mends = {Split.valid: ", or set --eval-iters 0", Split.test: ", or set it to 0"}
        if getattr(args, "full_validation", False):
            mends[Split.valid] += " and unset --full-validation"
        raise SftDataError(
            f"no sample is left for the {split.name} dataset: raise its share of --split"
            f"{mends.get(split, '')}"
        )
    pad = not getattr(args, "use_dynamic_batch_size", False)
    return SftDataset(
        samples,
        split=split,
        num_samples=number,
        seed=args.seed if split is Split.train else None,
        pad_to=args.seq_length if pad else None,
        attention_mask=pad and getattr(args, "create_attention_mask_in_dataloader", False),
    )


def datasets_provider_for(args: Any, provider: Callable[..., Any]) -> Callable[..., Any]:
    """The datasets provider to pass to stock code: `build_sft_datasets` for ``provider``'s chunk.

    Without ``--dynamic-batch-data`` it is ``provider`` itself. With it, all ranks call it together,
    and each raises a `RankFailedError` where some read data that cannot be used.
    """
    if not getattr(args, "dynamic_batch_data", None):
        return provider
    vp_stage = getattr(provider, "keywords", {}).get("vp_stage")  # of a functools.partial

    def build_on_all(num_samples: Sequence[int | None]) -> tuple[SftDataset | None, ...]:
        # Ranks that read nothing would wait in stock code for one that raised. Over Megatron's own
        # group, whose time-out is set to how long reading takes.
        with Consensus(dist.group.WORLD).agreement(f"reading {PREFIX}data"):
            return build_sft_datasets(args, num_samples, vp_stage=vp_stage)

    # Megatron's mark for providers to be called on every rank, not only on tensor-parallel rank 0.
    build_on_all.is_distributed = True  # type: ignore[attr-defined]
    return build_on_all


def _fitting_samples(path: str, tokenizer: SampleTokenizer, args: Any) -> list[SampleTokens]:
    """A file's samples; longer ones than ``--seq-length`` end the job, or are left out."""
    samples = read_samples(path, tokenizer)
    too_long = [line for line in samples if samples[line].length > args.seq_length]
    if too_long:
        longest = max(too_long, key=lambda line: samples[line].length)
        problem = (
            f"{len(too_long)} of {len(samples)} samples are longer than --seq-length "
            f"{args.seq_length}, this one {samples[longest].length}"
        )
        if args.dynamic_batch_on_too_long == "error":
            mend = f"raise it, or leave them out with {PREFIX}on-too-long drop"
            raise SftDataError(f"{problem}: {mend}", path, longest)
        if not dist.is_initialized() or dist.get_rank() == 0:
            say(f"{path}:{longest}: {problem}: left out")
    return [each for each in samples.values() if each.length <= args.seq_length]


def _shares(
    files: Sequence[list[SampleTokens]], split: str | None
) -> list[list[SampleTokens] | None]:
    """Samples for training, validation and test by ``--split``; None for a share of 0."""
    # By Megatron's own functions, so that the same --split gives the same shares.
    try:
        with np.errstate(invalid="ignore"):  # shares that add up to 0
            vector = parse_and_normalize_split(split or _DEFAULT_SPLIT)
        return [
            None if share is None else [sample for file in files for sample in _cut(file, *share)]
            for share in convert_split_vector_to_split_matrix(vector)
        ]
    except (AssertionError, ValueError):
        raise SftDataError(
            f"--split must be one to three shares, got {split!r}: set it to '{_DEFAULT_SPLIT}', say"
        ) from None


def _cut(samples: list[SampleTokens], start: float, end: float) -> list[SampleTokens]:
    return samples[round(start * len(samples)) : round(end * len(samples))]


def _reads_data(args: Any, vp_stage: int | None) -> bool:
    """True if this rank reads data for a model chunk, by the rule of ``pretrain_gpt.py``."""
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return False
    # Layers of multi-token prediction, which read labels, may be on any stage.
    if getattr(args, "mtp_num_layers", None):
        return True
    chunk = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    return bool(
        parallel_state.is_pipeline_first_stage(**chunk)
        or parallel_state.is_pipeline_last_stage(**chunk)
    )
