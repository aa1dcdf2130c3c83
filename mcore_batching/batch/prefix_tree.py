"""Samples whose tokens begin another's, and in whose segment of a row each is computed.

    sample    tokens                 host      responses in brackets
    0         a [b]                  2
    1         a b c [d]              2
    2         a b c d e [f]          2, itself
    3         a b c [d]              3: responses overlap, as 1 trains this d in the segment of 2

A causal model computes the same for a token whatever follows it, so the segment of ``a b c d e f``
gives what samples 0, 1 and 2 need. Each stays a sample with fields, weights and outputs of its own.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.columns import Columns
from mcore_batching.batch.errors import BatchError, SchemaError
from mcore_batching.batch.fields import Field, Kind
from mcore_batching.batch.row_index import predicted_within

_OF_ROWS = (Kind.TOKENS, Kind.PER_TOKEN, Kind.POSITION_IDS, Kind.ROUTED_EXPERTS)
"""Kinds of fields that rows are made of: one value a token, whichever samples share it."""


@dataclass(frozen=True)
class Hosts:
    """For each sample the one in whose segment it is computed.

    Attributes:
        host: [samples] index of that sample; its own if it is computed itself.
        alone: number of samples whose tokens begin another's but which are computed themselves all
            the same, by the reason; without padding samples and those of 0 tokens.
        tokens: of all samples.
        computed: tokens of the hosts.
    """

    host: tuple[int, ...]
    alone: Mapping[str, int]
    tokens: int
    computed: int


def find_hosts(columns: Columns, *, steps: Sequence[Sequence[int]] | None = None) -> Hosts:
    """The fewest hosts such that every other sample is computed in the segment of one.

    Samples with the same host are a chain: each one's tokens begin the next one's and end before
    the next one's response begins, so that no two of them train the same token. They are of one
    optimizer step (`steps` has the samples of each; None: all are of one), without multimodal
    inputs, and their fields with a value per token agree where they share tokens.
    """
    totals, schema = columns.total_lengths, columns.schema
    prompts = [total - own for total, own in zip(totals, columns.response_lengths, strict=True)]
    keys = _as_bytes(columns["tokens"])
    compared = [schema[name] for name in columns if name != "tokens" and _matters(schema[name])]
    fields = [(field, columns[field.name]) for field in compared]
    padding = columns.get("is_padding") or [False] * len(totals)
    host = list(range(len(totals)))
    alone: Counter[str] = Counter()
    step_of = {i: n for n, step in enumerate(steps or [range(len(totals))]) for i in step}
    # From the last to the first, so that what a sample begins stands right before it: of equal
    # ones those with the longer prompt, which may be without a response.
    order = [i for i in host if totals[i] and not padding[i]]
    # Two stable sorts: by tokens, then by prompt.
    order.sort(key=prompts.__getitem__, reverse=True)
    order.sort(key=keys.__getitem__, reverse=True)
    # Of every step the first samples of its chains so far, those that begin with the same tokens
    # together. Whichever of those that fit a sample takes, the others fit the next sample as well.
    open_chains: dict[int, list[tuple[bytes, list[_Head]]]] = {n: [] for n in step_of.values()}
    before = b""
    for i in order:
        stack = open_chains[step_of[i]]
        heads = _taken_off(stack, keys[i])
        host[i], reason, unfit = _joined(i, totals[i], heads, host, fields)
        if host[i] == i and before.startswith(keys[i]):
            alone[reason] += 1
        for head in (*unfit, (-prompts[i], i)):
            heapq.heappush(heads, head)
        stack.append((keys[i], heads))
        before = keys[i]
    computed = sum(total for i, total in enumerate(totals) if host[i] == i)
    return Hosts(tuple(host), dict(alone), sum(totals), computed)


def samples_of_hosts(hosts: Sequence[int]) -> dict[int, list[int]]:
    """The samples that are computed in each host's segment, itself among them, ascending."""
    members: dict[int, list[int]] = {}
    for sample, host in enumerate(hosts):
        members.setdefault(host, []).append(sample)
    return members


def require_hosts(hosts: Sequence[int], columns: Columns) -> None:
    """Refuse hosts in whose segments their samples cannot be computed.

    Raises:
        BatchError: they are not one per sample, places of samples that are their own hosts, or two
            samples train the same token of a host.
        SchemaError: a sample's values are not what its host's begin with.
    """
    count = len(columns.total_lengths)
    is_place = [host in range(len(hosts)) and hosts[host] == host for host in hosts]
    if len(hosts) != count or not all(is_place):
        raise BatchError(
            f"hosts must be {count} places of samples that are their own hosts, got {list(hosts)}"
        )
    # Values replaced since hosts were found would, silently, be taken for the host's.
    for i, host in enumerate(hosts):
        for name, values in columns.items() if host != i else ():
            if not agree(columns.schema[name], values[i], values[host]):
                raise SchemaError(
                    name,
                    sample_index=i,
                    expected=f"what its host, sample {host}, begins with",
                    found="other values; give them to get_data_iterator, or declare the field as "
                    "Kind.METADATA if no row is made of it",
                )
    # Gradients of tokens that are predicted at the same position would overwrite each other.
    tokens, responses = columns.token_span, columns.response_span
    own = torch.tensor(hosts, dtype=torch.int64, device="cpu")
    host_of = own.index_select(0, responses.samples)
    within = predicted_within(tokens, responses)
    places = (tokens.firsts.index_select(0, host_of) + within)[within >= 0]
    twice = (places.bincount(minlength=1) > 1).nonzero()
    if twice.numel():
        number = int(torch.searchsorted(tokens.firsts, twice[0], right=True)) - 1
        raise BatchError(
            f"two samples train the token behind token {int(twice[0] - tokens.firsts[number])} of "
            f"sample {number}; end a response before the next one of its host begins, or set hosts "
            "to None"
        )


_Head = tuple[int, int]
"""A chain's first sample: its prompt's tokens, negative, since heaps give the least; its index."""


def _joined(
    sample: int,
    total: int,
    heads: list[_Head],
    host: Sequence[int],
    fields: Sequence[tuple[Field, Sequence[Any]]],
) -> tuple[int, str, list[_Head]]:
    """The host of the first chain that a sample fits before; if none, itself, and why.

    The third result are the heads that it does not fit; that of the chain it joins is taken out.
    """
    reason = "responses overlap" if heads else "another optimizer step"
    unfit: list[_Head] = []
    # Only chains whose prompt holds all of the sample: no token is then trained twice.
    while heads and -heads[0][0] >= total:
        head = heapq.heappop(heads)
        found = host[head[1]]
        differs = next((f for f, own in fields if not agree(f, own[sample], own[found])), None)
        if differs is None:
            return found, reason, unfit
        is_multimodal = differs.kind is Kind.MULTIMODAL
        reason = "multimodal inputs" if is_multimodal else f"field {differs.name!r} differs"
        unfit.append(head)
    return sample, reason, unfit


def _taken_off(stack: list[tuple[bytes, list[_Head]]], tokens: bytes) -> list[_Head]:
    """The heads on the stack that begin with these tokens, in one heap."""
    heads: list[_Head] = []
    # The smaller heap goes into the larger one: each head is moved a logarithm of times at most.
    while stack and stack[-1][0].startswith(tokens):
        more = stack.pop()[1]
        heads, fewer = (more, heads) if len(more) > len(heads) else (heads, more)
        for head in fewer:
            heapq.heappush(heads, head)
    return heads


def _as_bytes(tokens: Sequence[Tensor]) -> list[bytes]:
    """Bytes of each sample: they begin another's where its tokens do."""
    # Of one type, as bytes of 4 and 8 a token would begin each other by chance.
    return [each.to(torch.int64).numpy().tobytes() for each in tokens]


def agree(field: Field, values: Any, hosts: Any) -> bool:
    """True if a sample that begins its host needs no other values than the host's."""
    if field.kind is Kind.MULTIMODAL:
        return not values and not hosts  # images fill places of the prompt that differ by sample
    if not _matters(field):
        return True
    # A sample may lack a value of its last token alone, where it predicts nothing: what stands in
    # for those of others is not what the host has.
    if field.length_offset >= -1:
        axis = -1 if field.kind is Kind.POSITION_IDS else 0
        hosts = hosts.narrow(axis, 0, min(values.shape[axis], hosts.shape[axis]))
    if not values.numel() and not hosts.numel():
        return True
    if values.shape != hosts.shape:
        return False
    if values.dtype == hosts.dtype and not values.is_floating_point():
        return torch.equal(values, hosts)  # up to the first difference: recorded experts are large
    return bool(((values == hosts) | (values != values) & (hosts != hosts)).all())  # NaN


def _matters(field: Field) -> bool:
    """True if samples that share a segment must agree on the field."""
    # Rows cannot be made of what has more values than tokens.
    is_of_rows = field.kind in _OF_ROWS and field.length_offset <= 0
    return is_of_rows or field.kind is Kind.MULTIMODAL
