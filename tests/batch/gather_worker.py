"""What each process of test_gather_response.py runs, and the same without slicing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from batch_cases import boundary_shapes, make_samples

from mcore_batching.batch import DEFAULT_SCHEMA, gather_response, make_placeholder, pack
from mcore_batching.batch.row_index import Slice


def shapes_of(case: str, size: int) -> list[tuple[int, int]]:
    """(total, response) lengths of the samples of a case."""
    if case == "boundaries":
        return boundary_shapes(size)
    if case == "empty responses":
        return [(5, 0), (0, 0), (2 * size, 0)]
    return [(11, 7), (3, 3), (0, 0), (30, 29), (1, 1), (6, 0)]


def row_of(case: str, size: int, rank: int) -> Any:
    """A rank's slice of the row of a case, with padding of the row itself."""
    is_placeholder = case == "placeholder"
    samples = make_samples(shapes_of(case, size))
    if is_placeholder:
        samples = make_placeholder(DEFAULT_SCHEMA, samples, samples)
    return pack(
        samples,
        schema=DEFAULT_SCHEMA,
        sample_indices=() if is_placeholder else range(len(samples["tokens"])),
        sample_alignment_tokens=2 * size,
        row_alignment_tokens=14 * size,
        context_parallel_size=size,
        context_parallel_rank=rank,
        is_placeholder=is_placeholder,
    )


def full_stream(num_tokens: int, trailing: tuple[int, ...]) -> torch.Tensor:
    """A value for every position of the full row."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num_tokens, *trailing, generator=generator, dtype=torch.float64)


def plain_responses(stream: torch.Tensor, row: Any) -> list[torch.Tensor]:
    """Token by token from the full stream, differentiable."""
    responses = []
    for start, total, response in zip(
        row.host_cu_seqlens_padded, row.total_lengths, row.response_lengths, strict=False
    ):
        first = total - response
        values = [
            stream[start + position - 1] if position else torch.zeros_like(stream[0])
            for position in range(first, total)
        ]
        responses.append(torch.stack(values) if values else stream[:0])
    return responses


def coupled(values: list[torch.Tensor], rank: int) -> Any:
    """A loss in which all positions of a sample interact, weighted differently on each rank."""
    terms = [value.sum() / max(value.numel(), 1) for value in values]
    return (rank + 1) * torch.stack(terms).exp().sum()


CASES = ("mixed", "boundaries", "empty responses", "placeholder")
TRAILING = ((), (2,))


def gather_all(rank: int, size: int) -> dict[Any, Any]:
    """What a rank of the group reports of all cases."""
    reduce, calls = dist.all_reduce, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return reduce(*args, **kwargs)

    dist.all_reduce = counted
    report = {}
    for case in CASES:
        row = row_of(case, size, rank)
        for trailing in TRAILING:
            offsets = row.host_cu_seqlens_padded
            full = full_stream(offsets[-1], trailing)
            local = full[Slice(offsets, size, rank).positions].requires_grad_()
            del calls[:]
            values = gather_response(local, row, group=dist.group.WORLD)
            forward_calls = len(calls)
            coupled(values, rank).backward()
            report[case, trailing] = {
                "values": [value.detach() for value in values],
                "gradient": local.grad,
                "collectives": (forward_calls, len(calls)),
            }
    return report
