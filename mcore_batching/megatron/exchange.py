"""The origins of samples, the ranks that run them, and the way of their values there and back.

Samples of all data-parallel ranks are numbered through. One in a shared row runs on several:

    rank 0 held samples 0 1 2, rank 1 held 3 4          first    [0, 3, 5]
    1 is cut over both ranks, 4 runs on rank 0          runs_on  [[1, 2, 4], [0, 1, 3]]
    fields    4 to rank 0, 0 and 1 to rank 1; 1, 2 and 3 run where they are, too
    outputs   of 1 from rank 0 alone, the first that runs it; of 4 back to rank 1

Under dynamic CP beside ``--context-parallel-size``, the context-parallel ranks of a data-parallel
rank all bring its samples, and each runs rows of its own: fields come from the ranks at the same
place, outputs go back to all.

Any value travels as a pickle without its tensors, and the bytes of these end to end:

    serialize({"tokens": [tensor([5, 6])], "total_lengths": [2]})
    header    the value pickled, "tensor of int64, [2], at byte 0" in place of the tensor
    body      5 6, as 16 bytes

What the tensors hold is copied once on the way in, between devices in one piece, and once on the
way out. Those that were on the host arrive there. Tensors that have no bytes of their own in a row
(sparse, nested, quantised, those of wrapping classes) are pickled, as PyTorch does it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import itertools
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mcore_batching.batch import OrderError, SchemaError
from mcore_batching.batch.columns import Columns, sent
from mcore_batching.batch.errors import described
from mcore_batching.megatron.job import Job

Packed = tuple[bytes, Tensor]
"""A value's header and body, the latter uint8 ``[bytes]``."""


@dataclasses.dataclass(frozen=True)
class SampleMoves:
    """The samples of a batch over all data-parallel ranks. The same on every rank but for `own`.

    Ranks with rows of their own are the data-parallel, under dynamic CP the data- and
    context-parallel ones.
    """

    own: int  # this one of the ranks with rows of their own
    first: Sequence[int]  # of each data-parallel rank's samples, and the number of all samples
    runs_on: Sequence[Sequence[int]]  # samples of each rank with rows of its own
    sharing: int = 1  # ranks with rows of their own that brought the same samples

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

    def origin(self, number: int) -> tuple[int, int]:
        """The data-parallel rank that brought a sample, and the sample's index there."""
        rank = next(rank for rank, end in enumerate(self.first[1:]) if number < end)
        return rank, number - self.first[rank]

    def origins(self, places: Sequence[int]) -> dict[int, list[int]]:
        """Data-parallel ranks that brought samples which run here, and these samples' indices
        there."""
        brought: dict[int, list[int]] = {}
        for rank, index in map(self.origin, sorted(self.held[place] for place in places)):
            brought.setdefault(rank, []).append(index)
        return brought

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
        rank, and of each sample that runs here one tensor that `copied_output` returned.
        """
        if self.stay:
            return {name: [*values] for name, values in columns.items()}
        # Ranks may name them in different orders, and bodies carry no names.
        names, place = sorted(columns), self.places
        device = torch.device(torch.cuda.current_device())
        group = parallel_state.get_data_parallel_group(with_context_parallel=self.sharing > 1)
        ranks = range(len(self.runs_on))
        # Types and shapes are the function's own and differ by sample, so they travel as well.
        outgoing = [
            [columns[name][place[i]] for i in self._sent(self.own, rank) for name in names]
            for rank in ranks
        ]
        arrived = exchanged([serialize(values, device) for values in outgoing], group)
        # Which samples came is not sent: every rank has the plan, and so the sender of each.
        found: dict[tuple[int, str], Tensor] = {}
        for rank, packed in zip(ranks, arrived, strict=True):
            keys = [(number, name) for number in self._sent(rank, self.own) for name in names]
            found |= zip(keys, deserialize(packed), strict=True)
        # Copies: one value must not keep those of all samples in memory.
        return {name: [found[n, name].clone() for n in self.brought] for name in names}

    @functools.cached_property
    def _first_runner(self) -> dict[int, int]:
        # Backwards, so that of the ranks that share a row the first stands.
        backwards = reversed(list(enumerate(self.runs_on)))
        return {number: rank for rank, runs in backwards for number in runs}

    def _sent(self, source: int, target: int) -> list[int]:
        """The samples of `target` with outputs that come from `source`."""
        brought, runner = self._brought_by(target), self._first_runner
        return [n for n in self.runs_on[source] if n in brought and runner[n] == source]


def leaving(moves: SampleMoves, columns: Columns) -> tuple[Columns, list[Packed]]:
    """The samples brought here that stay, and those for each data-parallel rank, serialized."""
    if moves.stay:
        return columns, []
    parts, own = moves.outgoing(columns), moves.own // moves.sharing
    return parts[own], [
        serialize(None if rank == own else part.alone()) for rank, part in enumerate(parts)
    ]


def receive_columns(
    job: Job, moves: SampleMoves, staying: Columns, leaving: Sequence[Packed], operation: str
) -> Columns:
    """The samples that run here, from what stays here and what each other rank hands over. A
    collective among the ranks at the same place in their replicas, so that all ranks of a replica
    receive the same."""
    if moves.stay:
        return staying
    with job.watch.reporting(operation):
        arrived = exchanged(leaving, job.consensus.counterpart_group)
    with job.agreement(f"{operation}, received"):
        parts = [*map(deserialize, arrived)]
        parts[moves.own // moves.sharing] = staying
        made, schema = moves.arranged(parts), staying.schema
        # Fields that were added by other ranks alone.
        for name in made.keys() - schema.keys():
            schema = schema.with_field(made.schema[name])
        made.schema = schema
        return made


def handed(
    job: Job, value: Any, sources: Mapping[int, int], *, to_all: bool = False
) -> Callable[[], Any]:
    """The value of the global rank that is this rank's source, which may be itself; its own where
    it has none. A collective over all ranks; sources are of the same replica unless `to_all`.

    Returns:
        gives the value; to be called in an agreement, since it may not be readable here.
    """
    consensus, header, body = job.consensus, b"", torch.empty(0, dtype=torch.uint8)
    source = sources.get(consensus.rank)
    with job.agreement("sharing data") as agree:
        if source == consensus.rank:
            header, body = serialize(value)
        sizes = agree.max("bytes", [len(header), body.numel()])
    # A pickle marks its end: headers may be of one length.
    end, size = sizes.value[0], sum(sizes.value)
    data = torch.cat([_tensor_of(header.ljust(end)), body])
    arrived = consensus.broadcast("sharing data", data, size, source, to_all=to_all)
    if source in (None, consensus.rank):
        return lambda: value
    return lambda: deserialize((arrived[:end].numpy().tobytes(), arrived[end:]))


def copied_output(name: str, value: Any) -> Tensor:
    """A copy of an output, without its gradient: a slice of the logits would keep them all.

    Raises:
        OrderError: it cannot travel.
    """
    # Now, while an error still reaches all ranks: the exchange of outputs is no agreement.
    if isinstance(value, Tensor) and has_bytes(value):
        return value.detach().clone()
    kind = type(value).__name__
    if isinstance(value, Tensor):
        nested = "nested " if value.is_nested else ""
        kind = f"{nested}{kind} of {value.dtype}, {value.layout}, {value.device}"
    raise OrderError(
        f"f returned a {kind} for a sample's {name!r}, which cannot go back to the sample's rank; "
        "return a dense tensor for each sample, as torch.tensor(...)"
    )


def serialize(value: Any, device: torch.device | None = None) -> Packed:
    """The value as a header and a body on a device, by default the host.

    Raises:
        TypeError: something in it that is no tensor cannot be pickled.
    """
    text = io.BytesIO()
    pickler = _Pickler(text)
    try:
        pickler.dump(value)
    # Any of them: a function in a function is the second to pickle, a generator the third.
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"values cannot be pickled: {described(error)}; give others, or leave their field out"
        ) from error
    target, parts = device or torch.device("cpu"), pickler.parts
    # One copy between devices in place of one for each tensor.
    if len({part.device for part in parts}) == 1:
        return text.getvalue(), torch.cat(parts).to(target)
    # Of no tensors `cat` makes none.
    empty = torch.empty(0, dtype=torch.uint8, device=target)
    return text.getvalue(), torch.cat([empty, *(part.to(target) for part in parts)])


def deserialize(packed: Packed) -> Any:
    """The value. Inverse of `serialize`; its tensors are where the body is, but on the host if they
    were there."""
    header, body = packed
    return _Unpickler(io.BytesIO(header), body).load()


def _tensor_of(text: bytes) -> Tensor:
    # PyTorch makes no tensor of an empty buffer.
    return torch.frombuffer(bytearray(text or b"\0"), dtype=torch.uint8)[: len(text)]


def has_bytes(tensor: Tensor) -> bool:
    """True if a tensor is fully described by its type, its shape and its bytes."""
    wraps_others = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    elsewhere = tensor.is_nested or tensor.is_quantized or tensor.is_meta
    return tensor.layout == torch.strided and not elsewhere and not wraps_others


def exchanged(leaving: Sequence[Packed], group: dist.ProcessGroup | None) -> list[Packed]:
    """Send a value to each rank of a group, and return the one that each had for this rank. Bodies
    are on a device that the group communicates for. A collective over the ranks."""
    headers, bodies = zip(*leaving, strict=True)
    device = bodies[0].device
    # Sizes first: who receives must have the room before the bytes come.
    sizes = torch.tensor([[*map(len, headers)], [body.numel() for body in bodies]], device="cpu")
    going = sent(sizes.T.contiguous(), device)
    arriving = torch.empty_like(going)
    dist.all_to_all_single(arriving, going, group=group)
    coming = arriving.T.tolist()  # waits for the device, as the headers below: twice in all
    outgoing = sent(_tensor_of(b"".join(headers)), device), torch.cat(bodies)
    arrived = []
    for data, counts, own in zip(outgoing, coming, sizes.tolist(), strict=True):
        arrived.append(data.new_empty(sum(counts)))
        dist.all_to_all_single(arrived[-1], data, counts, own, group=group)
    texts, parts = torch.split(arrived[0].cpu(), coming[0]), torch.split(arrived[1], coming[1])
    return [(text.numpy().tobytes(), part) for text, part in zip(texts, parts, strict=True)]


def digest_of(value: Any) -> str:
    """A short digest of numbers and texts in lists, the same on every rank."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.parts: list[Tensor] = []
        self._end = 0

    def persistent_id(self, value: Any) -> Any:
        # In place of a tensor, or of a list of tensors of one type: the type, shapes, and where
        # their bytes begin among all parts.
        if isinstance(value, Tensor):
            return self._note(value, tuple(value.shape)) if has_bytes(value) else None
        is_of_tensors = type(value) is list and {*map(type, value)} == {Tensor}
        if not is_of_tensors or len({(each.dtype, each.device) for each in value}) > 1:
            return None
        if not all(map(has_bytes, value)):
            return None
        shapes = [tuple(each.shape) for each in value]
        return self._note(torch.cat([each.detach().reshape(-1) for each in value]), shapes)

    def _note(self, value: Tensor, shape: Any) -> tuple[Any, ...]:
        start, held = self._end, value.detach().resolve_conj().resolve_neg().contiguous()
        # A tensor of one value is contiguous at any stride, but has bytes at a stride of 1 alone.
        self.parts.append(held.as_strided((held.numel(),), (1,)).view(torch.uint8))
        self._end += held.nbytes
        return value.dtype, shape, start, value.is_cpu


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, data: Tensor) -> None:
        super().__init__(file)
        self._data = data

    def persistent_load(self, found: Any) -> Any:
        dtype, shape, start, was_on_host = found
        shapes = shape if isinstance(shape, list) else [shape]
        sizes = [torch.Size(each).numel() for each in shapes]
        # Cloned, since bytes in the middle of others need not be aligned.
        joined = self._data[start : start + dtype.itemsize * sum(sizes)].clone().view(dtype)
        joined = joined.cpu() if was_on_host else joined
        if not isinstance(shape, list):
            return joined.reshape(shape)
        # unsafe_: views without a shared version counter.
        parts = torch.unsafe_split_with_sizes(joined, sizes)
        return [part.view(each) for part, each in zip(parts, shapes, strict=True)]
