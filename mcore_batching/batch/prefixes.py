"""Samples whose tokens begin another sample: turns of a trajectory, each behind all before it.

    tokens     a b   |   a b c d   |   a b c d e f   |   a x
    hosts        2           2               2           3

A causal model computes the same for a token whatever comes after it, so one row of ``a b c d e f``
gives what all three need. Each sample stays what it is: its own response, mask, weight and outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcore_batching.batch.fields import Field, Kind
from mcore_batching.batch.schema import Schema

_AGREEING = (Kind.POSITION_IDS, Kind.PER_TOKEN, Kind.ROUTED_EXPERTS)


@dataclass(frozen=True)
class Hosts:
    """Which samples are computed in whose segments.

    Attributes:
        host: for each sample that in whose segment it is computed; its own index if in its own.
        alone: reason to the number of samples that begin another and yet are computed themselves.
        tokens: of all samples.
        computed: of the hosts alone.
    """

    host: tuple[int, ...]
    alone: Mapping[str, int]
    tokens: int
    computed: int


def find_hosts(
    columns: Mapping[str, Sequence[Any]],
    schema: Schema,
    response_lengths: Sequence[int],
    *,
    steps: Sequence[Sequence[int]] | None = None,
    is_padding: Sequence[Any] | None = None,
) -> Hosts:
    """For each sample the one in whose segment it is computed.

    Args:
        columns: field name to one value per sample.
        schema: the kind of every field.
        response_lengths: of each sample, in tokens.
        steps: sample indices of every optimizer step; None: all are one.
        is_padding: True for samples that are fabricated.
    """
    tokens = [torch.as_tensor(each).to("cpu", torch.int32) for each in columns["tokens"]]
    totals = [len(each) for each in tokens]
    prompts = [t - int(r) for t, r in zip(totals, response_lengths, strict=True)]
    padding = is_padding or [False] * len(tokens)
    names = [n for n in columns if schema[n].kind in _AGREEING]
    multimodal = [n for n in columns if schema[n].kind is Kind.MULTIMODAL]
    host = list(range(len(tokens)))
    alone: Counter[str] = Counter()
    for step in [range(len(tokens))] if steps is None else steps:
        # Big-endian bytes sort as tokens do, and what begins another stands right before it.
        keys = {i: tokens[i].numpy().astype(">i4").tobytes() for i in step}
        heads: list[int] = []  # the first turns, so far, of all chains; the least tokens last
        for i in sorted(step, key=lambda i: (keys[i], prompts[i]), reverse=True):
            if totals[i] == 0 or bool(padding[i]) or any(columns[n][i] for n in multimodal):
                continue
            for place in range(len(heads) - 1, -1, -1):
                head = heads[place]
                if not keys[head].startswith(keys[i]):
                    break  # nor do those before it
                if totals[i] > prompts[head]:
                    continue
                differs = [
                    n
                    for n in names
                    if not _agree(columns[n][i], columns[n][host[head]], schema[n], totals[i])
                ]
                if differs:
                    alone[f"field {differs[0]!r} differs"] += 1
                    break
                host[i] = host[head]
                del heads[place]  # two turns of one chain never train the same token
                break
            heads.append(i)
    computed = sum(total for i, total in enumerate(totals) if host[i] == i)
    return Hosts(tuple(host), dict(alone), sum(totals), computed)


def _agree(mine: Any, hosts: Any, field: Field, total: int) -> bool:
    mine, hosts = torch.as_tensor(mine), torch.as_tensor(hosts)
    if field.kind is Kind.POSITION_IDS:
        return torch.equal(mine, hosts[..., :total])
    return field.length_offset <= 0 and torch.equal(mine, hosts[: mine.shape[0]])
