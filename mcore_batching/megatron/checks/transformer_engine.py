"""Limits of Transformer Engine on packed rows: of its attention by version, of FP8 and FP4.

Read in its sources from 2.9 to 2.18. It asserts these in its forward pass, on the ranks of one
stage, while the other stages wait: so they are refused at the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch

from mcore_batching.flags import PREFIX
from mcore_batching.planning import ParallelDims, PlannerConfig, row_multiple_tokens

# Ways to exchange keys and values of packed rows between context-parallel ranks, to the first
# version that has them.
_SINCE = {"p2p": (0, 0), "a2a": (2, 10), "all_gather": (2, 18)}
_SOFTMAX_SINCE = (2, 12)  # first version with softmax_type for packed rows
_CUDNN_OF_SOFTMAX = (9, 18)  # and of cuDNN, where context-parallel ranks share them
_LATENT_A2A_SINCE = (2, 15)  # first version with multi-latent attention but by p2p
_WHOLE_ROWS = (None, (-1, -1), (-1, 0))  # windows (before, after) that leave nothing out


class Versions(NamedTuple):
    """Major and minor versions of Transformer Engine and of cuDNN."""

    transformer_engine: tuple[int, int]
    cudnn: tuple[int, int]

    def __str__(self) -> str:
        return "Transformer Engine " + ".".join(map(str, self.transformer_engine))


def installed_versions() -> Versions:
    """Those of this process, which has imported Transformer Engine."""
    from megatron.core.utils import get_te_version

    major, minor = (*get_te_version().release, 0)[:2]  # a version may be "2"
    cudnn = cast(Any, torch.backends.cudnn).version() or 0
    return Versions((major, minor), (cudnn // 10000, cudnn // 100 % 100))


def attention_problems(config: Any, dims: ParallelDims, versions: Versions) -> Iterator[str]:
    """Settings under which packed rows fail inside the attention, each with what to set instead.

    Args:
        config: the model's `TransformerConfig`.
        dims: the job's parallel dims.
        versions: of the libraries.
    """
    if dims.context_parallel > 1:
        for way in _ways(config):
            yield from _exchange_problems(config, way, versions)
    if config.softmax_type != "vanilla":
        yield from _softmax_problems(config, dims, versions)


def _ways(config: Any) -> list[str]:
    asked = config.cp_comm_type or "p2p"
    return [asked] if isinstance(asked, str) else list(dict.fromkeys(asked))


def _exchange_problems(config: Any, way: str, versions: Versions) -> Iterator[str]:
    if way not in _SINCE:
        yield (
            f"{versions} has no cp_comm_type {way} for packed rows, nor has any later version "
            "known: set --cp-comm-type p2p"
        )
        return
    if versions.transformer_engine < _SINCE[way]:
        since = ".".join(map(str, _SINCE[way]))
        yield (
            f"{versions} has cp_comm_type {way} for packed rows from {since} on: set "
            "--cp-comm-type p2p, or install that version"
        )
        return
    if config.window_size not in _WHOLE_ROWS and way == "p2p":
        others = [f"{each} (from {'.'.join(map(str, _SINCE[each]))})" for each in _SINCE][1:]
        yield (
            "sliding windows under context parallelism do not work with cp_comm_type p2p: set "
            f"--cp-comm-type {' or '.join(others)}, --context-parallel-size 1, or no --window-size"
        )
    latent = config.multi_latent_attention and way != "p2p"
    if latent and versions.transformer_engine < _LATENT_A2A_SINCE:
        yield (
            f"{versions} has multi-latent attention under context parallelism with cp_comm_type "
            f"p2p alone, not {way}: set --cp-comm-type p2p"
        )


def _softmax_problems(config: Any, dims: ParallelDims, versions: Versions) -> Iterator[str]:
    name = f"softmax_type {config.softmax_type}"
    if versions.transformer_engine < _SOFTMAX_SINCE:
        yield (
            f"{versions} has no attention for packed rows with {name}: install 2.12 or later, or "
            "set softmax_type to vanilla"
        )
        return
    if dims.context_parallel == 1:
        return
    if _ways(config) != ["a2a"]:
        yield f"{name} under context parallelism needs cp_comm_type a2a: set --cp-comm-type a2a"
    if versions.cudnn < _CUDNN_OF_SOFTMAX:
        found = ".".join(map(str, versions.cudnn))
        yield (
            f"{name} under context parallelism needs cuDNN 9.18 or later for packed rows, found "
            f"{found}: install it, or set --context-parallel-size 1"
        )


def low_precision_problems(
    config: Any, dims: ParallelDims, planner: PlannerConfig
) -> Iterator[str]:
    """Rows that FP8 or FP4 kernels cannot take, by the padding of rows."""
    # Scales are of blocks of tokens, which each rank's part of a row must fill.
    if config.fp4:
        name, tokens = "FP4", 32
    elif config.fp8:
        name, tokens = "FP8", _fp8_tokens(config, dims)
    else:
        return
    shards = dims.context_parallel * (dims.tensor_parallel if dims.sequence_parallel else 1)
    wanted, row = tokens * shards, row_multiple_tokens(dims, planner)
    if row % wanted:
        yield (
            f"{name} needs rows whose tokens divide by {tokens} on each rank, so by {wanted} in "
            f"all, and rows are padded to a multiple of {row}: set {PREFIX}pad-total-to {wanted} "
            "(or a multiple)"
        )


def _fp8_tokens(config: Any, dims: ParallelDims) -> int:
    """Tokens on a rank that its FP8 kernels take multiples of."""
    if config.fp8_recipe == "blockwise" and dims.sequence_parallel:
        return 128  # activations are quantized in such blocks before they are gathered
    return 32 if config.fp8_recipe == "mxfp8" else 16
