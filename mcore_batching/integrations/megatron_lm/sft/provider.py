"""The datasets provider of ``--dynamic-batch-data``, and its flags.

Without ``--dynamic-batch-data`` a script keeps its own datasets. With it, the ranks that read data
in stock scripts, and no others, read and tokenize all files once at the start: for the lengths.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.datasets.utils import Split

from mcore_batching.integrations.megatron_lm.sft.dataset import SftDataset, TokenizedLines
from mcore_batching.integrations.megatron_lm.sft.errors import SftDataError, TokenizationError
from mcore_batching.integrations.megatron_lm.sft.jsonl import JsonLines
from mcore_batching.integrations.megatron_lm.sft.split import (
    is_first_process,
    split_records,
    without_too_long,
)
from mcore_batching.integrations.megatron_lm.sft.tokenization import (
    SampleTokenizer,
    byte_level_tokenizer,
)
from mcore_batching.megatron.job.arguments import PREFIX

Datasets = tuple[SftDataset | None, SftDataset | None, SftDataset | None]
"""For training, validation and test."""


def add_sft_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of the data, as an ``extra_args_provider``.

    Flags that the parser has already are left alone.
    """
    group = parser.add_argument_group("supervised fine-tuning data (mcore_batching)")

    def add(flag: str, **options: Any) -> None:
        if flag not in parser._option_string_actions:
            group.add_argument(flag, **options)

    add(
        f"{PREFIX}data",
        nargs="+",
        default=None,
        metavar="FILE",
        help="JSON-lines files to train on, instead of the script's own data: each line "
        '{"messages": [...]}, {"prompt": ..., "completion": ...} or '
        '{"question": ..., "answer": ...}; --split holds out a part of every file',
    )
    add(
        f"{PREFIX}on-too-long",
        choices=["error", "drop"],
        default="error",
        help="a sample longer than --seq-length ends the job, or is left out and counted",
    )
    add(
        f"{PREFIX}tokenizer",
        choices=["megatron", "bytes"],
        default="megatron",
        help="tokenizer of --dynamic-batch-data: the job's, or megatron-core's byte-level one, "
        "for which --tokenizer-type has no name "
        "(set --tokenizer-type NullTokenizer --vocab-size 258 with it)",
    )
    return parser


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
        training, validation and test dataset; None for one of which no sample is to be drawn, or
        whose share of ``--split`` is 0; three times None on ranks that read no data.

    Raises:
        SftDataError: a file, a line or a share of the files that cannot be used.
    """
    if not args.dynamic_batch_data:
        raise SftDataError(f"no file to train on: set {PREFIX}data to JSON-lines files")
    if not _reads_data(args, vp_stage):
        return None, None, None
    if pad is None:
        pad = not getattr(args, "use_dynamic_batch_size", False)
    numbers = _numbers_to_draw(args, *train_valid_test_num_samples)
    lines = JsonLines(args.dynamic_batch_data)
    samples = TokenizedLines(lines, _sample_tokenizer(args, tokenizer))
    shares = split_records(lines, args.split)
    wanted = [
        share if number is None or number > 0 else None
        for share, number in zip(shares, numbers, strict=True)
    ]
    fitting = without_too_long(samples, wanted, args.seq_length, args.dynamic_batch_on_too_long)
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


# With this mark stock code calls it on every rank, not on tensor-parallel rank 0 alone.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def datasets_provider_for(args: Any, provider: Callable[..., Any]) -> Callable[..., Any]:
    """The provider to give to stock code in place of a script's own.

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


def _numbers_to_draw(
    args: Any, train: int | None, valid: int | None, test: int | None
) -> tuple[int | None, int | None, int | None]:
    """Samples to draw of each, with some more for a job that has consumed all of its own.

    Stock code refuses a dataset that is consumed, which would end the relaunch of a finished job in
    an assertion. With one sample more it trains no further step, and evaluates as after the last.
    """
    consumed = getattr(args, "consumed_train_samples", 0)
    if train and consumed >= train and not getattr(args, "skip_train", False):
        if is_first_process():
            print(
                f"nothing left to do: {consumed} of {train} training samples are consumed; raise "
                "--train-iters or --train-samples to train further",
                flush=True,
            )
        train = consumed + 1
    evaluated = getattr(args, "consumed_valid_samples", 0)
    if valid and evaluated >= valid:
        valid = evaluated + (test or 1)  # stock code evaluates as many of each in the end
    return train, valid, test


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
    try:
        return SampleTokenizer(tokenizer)
    except TokenizationError as error:
        raise SftDataError(str(error)) from error
