"""Point-to-point transfers that block where NCCL's do, on gloo.

gloo takes transfers as they come: each is on its own. NCCL runs them on streams, so that an order
of calls that gloo lets pass may be a deadlock on GPUs. Under `blocking_p2p`, as under NCCL:

- a transfer ends only when both of its ranks have begun it;
- transfers posted one by one between two ranks of a group begin one after the other;
- transfers of one `batch_isend_irecv` run together, batches of a group one after the other;
- the first batch of a group waits for all its ranks, the first transfer of a pair for the other;
- `torch.cuda.synchronize` waits for everything this rank has posted.

On a GPU `wait` holds up the stream and not the host, but also whatever is posted after it: for the
order of transfers that is the same as holding up the host, which is done here.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bootstrap import pipeline_config
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch.distributed import distributed_c10d

from kit.model import transformer_config
from kit.worker import abandon_groups
from mcore_batching.megatron import cpu_emulation
from mcore_batching.planning import ParallelDims

_isend, _irecv = dist.isend, dist.irecv
# Signals of single transfers, of batches and of start-up must not be taken for one another.
_SINGLE, _BATCH, _START, _BEGUN, _BEGINS = 0, 1, 2, 8, 16

Transfer = tuple[bool, torch.Tensor, int]
"""Whether it sends, the tensor, the other rank's global number."""


class _Stream:
    """Operations on one communicator, each begun when the one before it has ended."""

    def __init__(self, group: Any, peers: Sequence[int], tag: int, seconds: float) -> None:
        self._group, self._tag = group, tag
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # Has none of the stand-in's modes, which look functions up by name, and in a deadlock does
        # not keep the process from ending.
        threading.Thread(target=self._work, daemon=True).start()
        signals = [(sends, _signal(), peer) for peer in peers for sends in (True, False)]
        self._submit(signals, _START).result(seconds)

    def post(self, transfers: Sequence[Transfer]) -> concurrent.futures.Future[None]:
        """Queue an operation of transfers that run together."""
        return self._submit(transfers, self._tag)

    def close(self) -> None:
        """End the thread, once it has nothing to do."""
        self._queue.put(None)

    def _submit(self, transfers: Sequence[Transfer], tag: int) -> concurrent.futures.Future[None]:
        posted: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._queue.put((transfers, tag, posted))
        return posted

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            transfers, tag, posted = item
            try:
                posted.set_result(self._run(transfers, tag))
            except Exception as exception:
                posted.set_exception(exception)

    def _run(self, transfers: Sequence[Transfer], tag: int) -> None:
        works = []
        for sends, tensor, peer in transfers:
            # Each side signals to the other that it has begun.
            given, taken = (_BEGUN, _BEGINS) if sends else (_BEGINS, _BEGUN)
            works.append(_isend(_signal(), peer, group=self._group, tag=tag + given))
            works.append(_irecv(_signal(), peer, group=self._group, tag=tag + taken))
            move = _isend if sends else _irecv
            works.append(move(tensor, peer, group=self._group, tag=tag))
        for work in works:
            work.wait()


class _Request(NamedTuple):
    """What Megatron waits on."""

    posted: concurrent.futures.Future[None]
    seconds: float

    def wait(self) -> bool:
        self.posted.result(self.seconds)
        return True


class _Device:
    """The streams of this rank, and what was posted on them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._streams: dict[tuple[Any, int | None], _Stream] = {}
        self._posted: list[_Request] = []

    # NCCL has no tags: what has one travels between hosts, over gloo on a GPU too. Under one of the
    # stand-in's modes torch comes back here, with further arguments, before it sends.
    def isend(self, tensor: torch.Tensor, dst: int, group: Any = None, **others: Any) -> Any:
        if others.get("tag"):
            return _isend(tensor, dst, group=group, **others)
        return self._post(group, dst, [(True, tensor, dst)])

    def irecv(self, tensor: torch.Tensor, src: int, group: Any = None, **others: Any) -> Any:
        if others.get("tag"):
            return _irecv(tensor, src, group=group, **others)
        return self._post(group, src, [(False, tensor, src)])

    def batch_isend_irecv(self, operations: list[dist.P2POp]) -> list[_Request]:
        transfers = [(op.op == self.isend, op.tensor, op.peer) for op in operations]
        return [self._post(operations[0].group, None, transfers)]

    def synchronize(self, device: Any = None) -> None:
        del device
        while self._posted:
            self._posted.pop(0).wait()

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()

    def _post(self, group: Any, peer: int | None, transfers: list[Transfer]) -> _Request:
        group = group or dist.group.WORLD
        if (group, peer) not in self._streams:
            others = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
            of_pair = peer is not None
            self._streams[group, peer] = _Stream(
                group,
                [peer] if of_pair else sorted(others),
                _SINGLE if of_pair else _BATCH,
                self._seconds,
            )
        posted = self._streams[group, peer].post(transfers)
        self._posted.append(_Request(posted, self._seconds))
        return self._posted[-1]


@contextlib.contextmanager
def blocking_p2p(seconds: float = 20.0) -> Iterator[None]:
    """Let this process's point-to-point transfers block as NCCL's do. On the CPU stand-in alone.

    Megatron's `P2PCommunicator` and the stand-in's copies of what is sent go through it. A rank
    that is held up for longer than so many seconds raises a `TimeoutError`.
    """
    assert cpu_emulation.is_enabled()
    device = _Device(seconds)
    replaced: list[tuple[Any, str, Any]] = [
        (dist, "isend", device.isend),
        (dist, "irecv", device.irecv),
        (dist, "batch_isend_irecv", device.batch_isend_irecv),
        # `P2POp` takes no other functions than these.
        (distributed_c10d, "isend", device.isend),
        (distributed_c10d, "irecv", device.irecv),
        (torch.cuda, "synchronize", device.synchronize),
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(device.close)
        for each in replaced:
            stack.enter_context(mock.patch.object(*each))
        yield
        device.synchronize()


def neighbours_send_first(dims: ParallelDims) -> None:
    """Four stages in pairs, of which both post what they send before what they receive: a deadlock
    on GPUs, which passes on plain gloo.

    With fixed shapes and overlapped communication: for each pair of neighbours one stream, on which
    each of the two would first have to send.
    """
    settings = pipeline_config(dims)
    settings |= {"variable_seq_lengths": False, "batch_p2p_comm": False}
    config = transformer_config("dense", **settings)
    neighbours = P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), config)
    sent = torch.ones(2, 1, 4)
    shared: dict[str, Any] = {"tensor_shape": (2, 1, 4), "overlap_p2p_comm": True}
    send, receive = neighbours.send_forward_recv_forward, neighbours.send_backward_recv_backward
    if dist.get_rank() % 2:
        send, receive = receive, send

    def exchange() -> None:
        with blocking_p2p(seconds=2.0):
            _, sending = send(sent, False, **shared)
            _, receiving = receive(None, True, **shared)
            for request in [*receiving.values(), *sending.values()]:
                request.wait()

    with pytest.raises(TimeoutError):
        exchange()
    abandon_groups()


def _signal() -> torch.Tensor:
    return torch.zeros(1, device="cpu")
