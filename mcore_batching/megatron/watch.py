"""The end of every rank within seconds of an exception that leaves others in a collective.

An exception in a layer, in Megatron's schedule, in the optimizer or where samples and outputs are
exchanged leaves the other ranks waiting in a collective, by default for 10 minutes and more. Here
the rank on which it happened reports it in the job's key-value store; a thread on each other rank
reads that and releases its main thread:

    rank 2: OutOfMemoryError in a layer -> writes it into the store, raises PipelineFailedError
    rank 0: its thread reads the store  -> aborts the process groups, so that the collective raises
            and the main thread raises PipelineFailedError, with rank 2's text

NCCL's communicators can be aborted. Nothing wakes a thread that waits in gloo: such a process
prints the error and ends with `EXIT_CODE` after `GRACE_SECONDS`. In both cases the job has to be
started again. An exception in the loss function leaves the pipeline only where not all ranks that
share the micro-batch raise within `ALIKE_SECONDS`: the others may wait for it inside the loss.

Without torchrun's agent (srun, mpirun) rank 0 hosts the store. Once it has failed, or has read of a
failure, it stays for up to `LINGER_SECONDS`, until every rank has read the cause. A rank that
loses a connection does not report itself: it waits `PEER_SECONDS` for the cause on another rank.

The main thread pays for two events per call; the thread polls the store every
`POLL_SECONDS`, and only while the main thread is inside one of the engine's calls.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import itertools
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from mcore_batching.batch.errors import CollectiveError, described, readable
from mcore_batching.megatron.errors import PipelineFailedError

POLL_SECONDS = 0.5
"""Between two looks into the job's store: halved, it has twice the load; doubled, ranks find a
failure half a second later."""
GRACE_SECONDS = 4.0
"""Time that a released main thread has to raise before its process is ended. A rank under load may
need one or two; doubled, a rank that waits in gloo ends that much later."""
ALIKE_SECONDS = 3.0
"""Most time between the exceptions of ranks that share a micro-batch; beyond it, they are taken for
different ones, and the pipeline is left."""
LINGER_SECONDS = 6.0
"""Most time that rank 0 keeps the store that it hosts for ranks that have not read the cause. They
read it within `POLL_SECONDS` while they wait for others; one that is elsewhere may miss it."""
PEER_SECONDS = 3.0
"""Time for another rank's report after a lost connection. The connection may be lost before the
report is there; a rank that was killed reports nothing, and costs this time once."""
EXIT_CODE = 86
"""Any that neither Python, a signal nor torchrun uses."""

_FAILURE = "failure"
_NUM_READERS = "readers of the failure"
_LOST_CONNECTION = re.compile(
    r"gloo/transport|connection (was )?(closed|reset)|broken pipe|NCCL.*remote", re.IGNORECASE
)


class FailureWatch:
    """Polls the job's store for failures of other ranks, and frees the main thread from waiting.

    Args:
        store: the job's, through a client that nothing else uses: a client is locked while it
            waits. None: there is no watch; ranks that wait for a failed one time out.
        rank: this rank.
        num_ranks: of the job; beyond a thousand, each polls the store less often.
        hosted: the store's server, if it ends with this process or when nothing refers to it.
    """

    def __init__(
        self, store: Any, rank: int = 0, num_ranks: int = 1, *, hosted: Any = None
    ) -> None:
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._hosted = hosted
        self._reading = threading.Lock()  # each rank counts once as a reader
        # The store serves some 2,000 reads a second in all.
        self._poll_seconds = POLL_SECONDS * max(1.0, num_ranks / 1024)
        self._failure: dict[int, str] | None = None
        self._num_pipelines = 0
        self._times: collections.Counter[str] = collections.Counter()
        # Set while the main thread is inside one of the engine's calls; outside of them it never
        # waits for other ranks, and the thread does not poll.
        self._inside = threading.Event()
        self._ending = threading.Event()
        self._aborting = threading.Lock()
        self._releasing = threading.Thread(target=self._abort, name="abort", daemon=True)
        self._thread = threading.Thread(target=self._watch, name="failure watch", daemon=True)
        if store is not None:
            self._thread.start()
            # A thread that comes back from C++ into an interpreter that is going down aborts it.
            atexit.register(self.stop)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A part of the program in which this rank may wait for others; raises
        `PipelineFailedError` if a pipeline has failed on some rank."""
        self._raise_known()
        is_outermost = not self._inside.is_set()
        self._inside.set()
        try:
            yield
        except Exception as exception:
            # A rank that ends closes its connections: what this one sees is not the first cause.
            if _is_lost_connection(exception):
                self._is_explained()
            self.raise_reported(exception)
            raise
        finally:
            if is_outermost:
                self._inside.clear()
        self._raise_known()

    @contextlib.contextmanager
    def reporting(self, operation: str) -> Iterator[None]:
        """Report exceptions of this part of the program to the other ranks; raises
        `PipelineFailedError` in place of any `Exception`, or for one on another rank. Ranks that
        share rows enter as many of them (`is_joined`)."""
        # Names of points (`is_joined`) must not meet those of the pipeline before.
        self._num_pipelines += 1
        self._times.clear()
        with self.waiting():
            try:
                yield
            except BaseException as exception:
                # SystemExit and KeyboardInterrupt as well: the others may wait for this rank.
                self.report(operation, exception)
                if not isinstance(exception, Exception):  # else `waiting` lingers
                    self._linger()
                raise

    def is_joined(self, what: str, how_many: int) -> bool:
        """True as soon as so many ranks have come to the same point of the same pipeline; False if
        they have not come in time. They come to it equally often, and each time counts."""
        if self._store is None:
            return True
        self._times[what] += 1
        key = f"{self._num_pipelines}/{what} {self._times[what]}"
        given_up = time.monotonic() + ALIKE_SECONDS
        try:
            self._store.add(key, 1)  # a store adds atomically, and adding 0 reads
            while self._store.add(key, 0) < how_many:
                if time.monotonic() > given_up:
                    return False
                time.sleep(0.02)
        except RuntimeError:  # the store is gone: the failure here is the cause
            return False
        return True

    def report(self, operation: str, exception: BaseException) -> None:
        """Report a failure on this rank to all ranks; any thread may."""
        if self._store is None or (_is_lost_connection(exception) and self._is_explained()):
            return
        try:
            text = readable("".join(traceback.format_exception_only(exception)).strip())
        except Exception:  # its own attributes are no texts
            text = described(exception)
        frame = traceback.extract_tb(exception.__traceback__)[-1]
        text = f"{operation}: {text} ({frame.filename}:{frame.lineno}, in {frame.name})"
        note = json.dumps({"rank": self._rank, "text": text})
        try:
            # The first one stays: others that fail after it most likely fail for it.
            self._store.compare_set(_FAILURE, "", note)
        except RuntimeError as error:
            # The others see this rank close its connections instead.
            refused = f"; the job's store took no note of it: {described(error)}"
            self._failure = {self._rank: text + refused}

    def raise_reported(self, cause: Exception | None = None) -> None:
        """Raise `PipelineFailedError` if a rank has failed, as far as is known now."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._read()
        self._raise_known(cause)

    def _is_explained(self) -> bool:
        """True once another rank has reported why this one lost a connection."""
        given_up = time.monotonic() + PEER_SECONDS
        while not self._failure and time.monotonic() < given_up:
            try:
                self._read()
            except RuntimeError:
                # Where rank 0 hosts the store, it ended without a report, or before this rank came.
                text = "its process has ended, and the job's store with it: see its own output"
                self._failure = {0: text} if not _has_agent() else None
                break
            time.sleep(0.05)
        return self._failure is not None

    def _read(self) -> None:
        if self._store is None:
            return
        with self._reading:
            if not self._failure and self._store.check([_FAILURE]):
                note = json.loads(self._store.get(_FAILURE))
                self._failure = {note["rank"]: note["text"]}
                self._store.add(_NUM_READERS, 1)

    def _linger(self) -> None:
        """Keep the store that this process hosts until all ranks have read the cause."""
        if self._hosted is None:
            return
        given_up = time.monotonic() + LINGER_SECONDS
        with contextlib.suppress(RuntimeError):
            self._read()
            while time.monotonic() < given_up:
                if self._store.add(_NUM_READERS, 0) >= self._num_ranks:
                    break
                time.sleep(0.02)
        self._hosted = None  # once

    def _raise_known(self, cause: Exception | None = None) -> None:
        if self._failure is not None:
            self._abort()
            self._linger()
            # contextlib would raise the StopIteration that caused an error, not the error.
            hidden = isinstance(cause, StopIteration)
            raise PipelineFailedError(self._failure) from (None if hidden else cause)

    def _watch(self) -> None:
        try:
            while not self._failure:
                self._inside.wait()
                if self._ending.wait(self._poll_seconds):
                    return
                if self._inside.is_set():
                    self._read()
        except RuntimeError:  # the store is gone, and the job with it
            return
        # In a thread of its own: an abort may itself wait, for a kernel that never ends.
        self._releasing.start()
        given_up = time.monotonic() + GRACE_SECONDS
        if self._hosted is not None:
            given_up += LINGER_SECONDS
        while self._inside.is_set():
            if time.monotonic() > given_up:
                self._end()
            if self._ending.wait(0.05):
                return

    def _abort(self) -> None:
        """Abort all process groups, once: collectives that wait or are to come raise."""
        if self._aborting.acquire(blocking=False):
            # Whatever it raises, the error that is raised or printed next is the cause.
            with contextlib.suppress(Exception):
                dist.distributed_c10d._abort_process_group()

    def _end(self) -> None:
        error = PipelineFailedError(self._failure or {})
        try:
            print(
                f"{type(error).__name__}: {error}\nrank {self._rank} waited for it and cannot be "
                f"released: its process ends with exit code {EXIT_CODE}",
                file=sys.stderr,
            )
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # Whatever a full disk refuses to print. Not sys.exit, which would only end this thread:
            # the main one waits in C++.
            os._exit(EXIT_CODE)

    def stop(self) -> None:
        """End the thread, and with it the connection to the store."""
        if self._store is None:
            return
        atexit.unregister(self.stop)
        self._ending.set()
        self._inside.set()
        self._thread.join(timeout=1.0)
        if self._releasing.is_alive():
            self._releasing.join(timeout=GRACE_SECONDS)


NO_WATCH = FailureWatch(None)
_watches = itertools.count()


def watch_of_world() -> FailureWatch:
    """A new watch over the default process group; made by all its ranks, equally often.

    `NO_WATCH` where there is one process alone, and where the store cannot be cloned (before
    PyTorch 2.8).
    """
    number = next(_watches)
    if dist.group.WORLD is None or dist.get_world_size() == 1:
        return NO_WATCH
    store = dist.distributed_c10d._get_default_store()
    if not hasattr(store, "clone"):
        return NO_WATCH
    # A job that makes its groups anew in the same processes must not read the former failure.
    own = dist.distributed_c10d.PrefixStore(f"mcore_batching/failure_watch/{number}", store.clone())
    # The server itself, too: an abort drops Megatron's references to it.
    hosted = store if dist.get_rank() == 0 and not _has_agent() else None
    return FailureWatch(own, dist.get_rank(), dist.get_world_size(), hosted=hosted)


def _has_agent() -> bool:
    """True if a process of torchrun, which outlives the ranks, hosts the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _is_lost_connection(exception: BaseException) -> bool:
    """True if another rank ended, as far as this rank's exception shows."""
    if isinstance(exception, CollectiveError) or not isinstance(exception, RuntimeError):
        return False
    is_of_store = isinstance(exception, dist.DistNetworkError)
    return is_of_store or bool(_LOST_CONNECTION.search(described(exception)))
