"""The origins of samples, the ranks that run them, and the way of their values there and back.

Samples of all data-parallel ranks are numbered through. One in a shared row runs on several:

    rank 0 held samples 0 1 2, rank 1 held 3 4          first    [0, 3, 5]
    1 is cut over both ranks, 4 runs on rank 0          runs_on  [[1, 2, 4], [0, 1, 3]]
    fields    4 and 1 to rank 0 (its own), 0 and 1 to rank 1
    outputs   of 1 from rank 0 alone, the first that runs it; of 4 back to rank 1

Under dynamic CP beside ``--context-parallel-size``, the context-parallel ranks of a data-parallel
rank all bring its samples, and each runs rows of its own: fields come from the ranks at the same
place, outputs go back to all.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from mcore_batching.batch import OrderError, SchemaError
from mcore_batching.batch.columns import Columns, sent
from mcore_batching.megatron.job import Job
from mcore_batching.megatron.serialize import (
    deserialize,
    exchanged,
    has_bytes,
    put_together,
    serialize,
    taken_apart,
)


@dataclasses.dataclass(frozen=True)
class SampleMoves:
    """The samples of a batch over all data-parallel ranks. The same on every rank but for `own` and
    `lengths`.

    Ranks with rows of their own are the data-parallel, under dynamic CP the data- and
    context-parallel ones.
    """

    own: int  # this one of the ranks with rows of their own
    first: Sequence[int]  # of each data-parallel rank's samples, and the number of all samples
    runs_on: Sequence[Sequence[int]]  # samples of each rank with rows of its own
    lengths: tuple[list[int], list[int]] = ([], [])  # total and response, of those brought here
    sharing: int = 1  # ranks with rows of their own that brought the same samples
    before: SampleMoves | None = None  # the exchange that brought samples to where these came from

    @property
    def held(self) -> Sequence[int]:
        """The samples that this rank runs."""
        return self.runs_on[self.own]

    @functools.cached_property
    def places(self) -> dict[int, int]:
        """Place of each of these samples among them."""
        return {number: place for place, number in enumerate(self.held)}

    @functools.cached_property
    def stay(self) -> bool:
        """True if all samples run where they came from, in the order in which they came."""
        own = [[*range(*each)] for each in itertools.pairwise(self.first)]
        return [[*each] for each in self.runs_on] == own

    @property
    def brought(self) -> range:
        """The samples that came from this rank."""
        return self._brought_by(self.own)

    def _brought_by(self, rank: int) -> range:
        replica = rank // self.sharing
        return range(self.first[replica], self.first[replica + 1])

    def origins(self, places: Sequence[int]) -> dict[int, list[int]]:
        """Data-parallel ranks that brought samples which run here, and these samples' indices
        there."""
        brought: dict[int, list[int]] = {}
        for number in sorted(self._first_number(self.held[place]) for place in places):
            rank = self._first_moves._origin(number)
            brought.setdefault(rank, []).append(number - self._first_moves.first[rank])
        return brought

    @property
    def _first_moves(self) -> SampleMoves:
        return self if self.before is None else self.before._first_moves

    def _first_number(self, number: int) -> int:
        """A sample's number in the first of these exchanges."""
        if self.before is None:
            return number
        rank = self._origin(number)
        return self.before._first_number(self.before.runs_on[rank][number - self.first[rank]])

    def followed_by(self, later: SampleMoves) -> SampleMoves:
        """Those of both, of which each rank holds the samples one behind the other."""
        both = zip(self.runs_on, later.runs_on, strict=True)
        return dataclasses.replace(self, runs_on=[[*ours, *theirs] for ours, theirs in both])

    def outgoing(self, columns: Columns) -> list[Columns]:
        """The samples of this rank to hand to each data-parallel rank."""
        own = self.brought
        # Under dynamic CP the ranks that brought the same samples each serve one rank of every
        # replica, that at their own place: so each sample goes to a rank once.
        return [
            columns.taken([number - own.start for number in runs if number in own])
            for runs in self.runs_on[self.own % self.sharing :: self.sharing]
        ]

    def arranged(self, incoming: Sequence[Columns]) -> Columns:
        """The samples that this rank runs, in their order, of those that each data-parallel rank
        handed to it.

        Raises:
            SchemaError: some of them lack a field of others.
        """
        # A rank that left a field out sent samples without it.
        for name in dict.fromkeys(name for part in incoming for name in part):
            lacking = [part.total_lengths and name not in part for part in incoming]
            if any(lacking):
                ranks = [rank for rank, is_lacking in enumerate(lacking) if is_lacking]
                raise SchemaError(
                    name,
                    expected="values of all data-parallel ranks' samples",
                    found=f"none of ranks {ranks}: give the field on them too",
                )
        brought = [range(*each) for each in itertools.pairwise(self.first)]
        numbers = [number for own in brought for number in self.held if number in own]
        place = {number: at for at, number in enumerate(numbers)}
        return Columns.joined(incoming).taken([place[number] for number in self.held]).compact()

    def returned(self, columns: Mapping[str, Sequence[Tensor]]) -> dict[str, list[Tensor]]:
        """Outputs of the samples that came from this rank, in the order in which they came.

        A collective over the ranks with rows of their own. Fields have the same names on every
        rank, and of each sample that runs here one tensor that passed `check_output`.
        """
        if self.stay:
            outputs = {name: [*values] for name, values in columns.items()}
            return outputs if self.before is None else self.before.returned(outputs)
        # Ranks may name them in different orders, and bodies carry no names.
        names, place = sorted(columns), self.places
        device = torch.device(torch.cuda.current_device())
        group = parallel_state.get_data_parallel_group(with_context_parallel=self.sharing > 1)
        # Types and shapes are the function's own and differ by sample, so they travel as well.
        headers: list[bytes] = []
        bodies: list[Tensor] = []
        for rank in range(len(self.runs_on)):
            values = [columns[n][place[i]] for i in self._sent(self.own, rank) for n in names]
            header, parts = taken_apart(values)
            headers.append(header)
            # Some rank may be sent nothing, of which `cat` makes no tensor.
            empty = torch.empty(0, dtype=torch.uint8, device=device)
            bodies.append(torch.cat([empty, *(part.to(device) for part in parts)]))
        # One copy to the device and one back for those of all ranks: the host waits for each.
        joined = sent(torch.frombuffer(bytearray(b"".join(headers)), dtype=torch.uint8), device)
        parts = exchanged(torch.split(joined, [*map(len, headers)]), group)
        arriving = torch.split(torch.cat(parts).cpu(), [part.numel() for part in parts])
        arrived = [part.numpy().tobytes() for part in arriving]
        data = exchanged(bodies, group)
        # Which samples came is not sent: every rank has the plan, and so the sender of each.
        found: dict[tuple[int, str], Tensor] = {}
        for rank, (header, body) in enumerate(zip(arrived, data, strict=True)):
            keys = [(number, name) for number in self._sent(rank, self.own) for name in names]
            found |= zip(keys, put_together(header, body), strict=True)
        # Copies: one value must not keep those of all samples in memory.
        outputs = {name: [found[n, name].clone() for n in self.brought] for name in names}
        return outputs if self.before is None else self.before.returned(outputs)

    def _origin(self, number: int) -> int:
        return next(r for r, end in enumerate(self.first[1:]) if number < end)

    @functools.cached_property
    def _first_runner(self) -> dict[int, int]:
        # Backwards, so that of the ranks that share a row the first stands.
        backwards = reversed(list(enumerate(self.runs_on)))
        return {number: rank for rank, runs in backwards for number in runs}

    def _sent(self, source: int, target: int) -> list[int]:
        """The samples of `target` with outputs that come from `source`."""
        brought, runner = self._brought_by(target), self._first_runner
        return [n for n in self.runs_on[source] if n in brought and runner[n] == source]


def leaving(moves: SampleMoves, columns: Columns) -> tuple[Columns, list[Tensor]]:
    """The samples brought here that stay, and those for each data-parallel rank, serialized."""
    if moves.stay:
        return columns, []
    parts, own = moves.outgoing(columns), moves.own // moves.sharing
    return parts[own], [
        serialize(None if rank == own else part.alone()) for rank, part in enumerate(parts)
    ]


def receive_columns(
    job: Job, moves: SampleMoves, staying: Columns, leaving: Sequence[Tensor], stage: str
) -> Columns:
    """The samples that run here, from what stays here and what each other rank hands over. A
    collective among the ranks at the same place in their replicas, so that all ranks of a replica
    receive the same."""
    if moves.stay:
        return staying
    with job.watch.reporting(stage):
        arrived = exchanged(leaving, job.consensus.counterpart_group)
    with job.agreement(f"{stage}, received"):
        own, parts = moves.own // moves.sharing, []
        for rank, data in enumerate(arrived):
            parts.append(staying if rank == own else deserialize(data))
        made, schema = moves.arranged(parts), staying.schema
        # Fields that were added by other ranks alone.
        for name in made.keys() - schema.keys():
            schema = schema.with_field(made.schema[name])
        return Columns(schema, made.fields, made.total_lengths, made.response_lengths)


def check_output(name: str, value: Any) -> None:
    """Raise `OrderError` for an output that cannot travel."""
    if not isinstance(value, Tensor):
        kind = type(value).__name__
    elif has_bytes(value):
        return
    else:
        nested = "nested " if value.is_nested else ""
        kind = f"a {nested}{type(value).__name__} of {value.dtype}, {value.layout}, {value.device}"
    raise OrderError(
        f"f returned {kind} for {name!r}, which cannot go back to the rank of its sample; return "
        "dense tensors"
    )
