"""The connections between rank 0 and the other ranks, beside tensors: a star with heartbeats.

    rank 0   PUSH ----- one a rank ----->  PULL   rank 1..
             PULL <--------- all --------  PUSH

When rank 0 loses a rank, everything ends: it says why, and all others lose rank 0.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Container
from typing import Any, TypeVar

import zmq

from moe_serve import wire
from moe_serve.errors import ConfigError, EngineDeadError, EngineError, MoeServeError
from moe_serve.heartbeat import LossWatch, PeerMonitor, beating
from moe_serve.messages import Shutdown
from moe_serve.parallel.world import World, broadcast, own_address
from moe_serve.rank_messages import FromRank, LoadProgress, RankFailed, RankHello, ToRank

logger = logging.getLogger(__name__)

# What a rank said before it died may still be on its way when its death is noticed.
LAST_WORDS_SECONDS = 0.5
# What was sent last is the reason for an end: time for it to leave.
LINGER_MS = 1000
# A collective fails in the very moment in which a rank is lost; who was lost is the better reason.
CAUSE_SECONDS = 1.5
# For ranks to end in order, when all is well.
CLOSE_SECONDS = 2.0

M = TypeVar("M")


class RankLinks:
    """Rank 0's side. `on_failure` is called once, in a thread of ours, when a rank is lost or says
    that it failed; each `receive`, now and later, raises the same error.
    """

    def __init__(
        self,
        world: World,
        on_failure: Callable[[MoeServeError], None] = lambda error: None,
        on_progress: Callable[[int, LoadProgress], None] = lambda rank, progress: None,
    ) -> None:
        self._world = world
        self._on_failure = on_failure
        self._on_progress = on_progress
        self._failure: MoeServeError | None = None
        self._is_closing = False
        ranks = range(1, world.seat.world_size)
        self._queues: dict[int, queue.Queue[Any]] = {rank: queue.Queue() for rank in ranks}
        self._context = zmq.Context()
        self._inbox = self._listen(zmq.PULL)
        self._outboxes = {rank: self._listen(zmq.PUSH) for rank in ranks}
        self._monitors = {rank: PeerMonitor(socket) for rank, socket in self._outboxes.items()}
        self._reader = threading.Thread(target=self._read, daemon=True)
        # A thread that asks for the interpreter once that is gone ends the process by abort().
        atexit.register(self._stop_reading)
        try:
            self._meet()
        except BaseException:
            self.close()
            raise

    def _listen(self, kind: int) -> zmq.Socket[Any]:
        socket = beating(self._context.socket(kind), self._world.timeout)
        socket.bind(f"tcp://{own_address(self._world)}:*")
        return socket

    def _meet(self) -> None:
        sockets = [self._inbox, *self._outboxes.values()]
        broadcast(self._world, [socket.get_string(zmq.LAST_ENDPOINT) for socket in sockets])
        self._reader.start()
        # A rank that dies before it has connected would never be missed.
        for rank, socket in self._outboxes.items():
            self.receive(rank, RankHello, within=self._world.timeout)
            if not socket.poll(int(self._world.timeout * 1000), zmq.POLLOUT):
                raise self._failure or self._never_came(rank)

    def send(self, rank: int, message: ToRank) -> None:
        """Raises what ended the rank; nothing that is sent waits."""
        try:
            self._outboxes[rank].send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            # It is not connected any more, and the reader finds out why.
            lost = self.wait_failure(self._world.timeout)
            raise lost or EngineDeadError(f"rank {rank} is gone") from None

    def send_all(self, message: ToRank) -> None:
        for rank in self._outboxes:
            self.send(rank, message)

    def receive(self, rank: int, kind: type[M], within: float | None = None) -> M:
        """The rank's next message, which must be of that kind. Raises what ended a rank."""
        try:
            message = self._queues[rank].get(timeout=within)
        except queue.Empty:
            raise self._never_came(rank) from None
        if isinstance(message, MoeServeError):
            # For whoever asks next.
            self._queues[rank].put(message)
            raise message
        assert isinstance(message, kind), f"rank {rank} sent {message}, not {kind.__name__}"
        return message

    def receive_all(self, kind: type[M]) -> list[M]:
        """One message of that kind from each rank, in order of rank."""
        return [self.receive(rank, kind) for rank in self._queues]

    def wait_failure(self, seconds: float) -> MoeServeError | None:
        """What ended a rank; None if nothing did within that time."""
        deadline = time.monotonic() + seconds
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._failure

    def close(self) -> None:
        """Tell all ranks to end, and let go of them once they have let go."""
        atexit.unregister(self._stop_reading)
        self._stop_reading()
        if self._failure is None:
            self._see_off()
        for socket in self._outboxes.values():
            socket.disable_monitor()
        self._context.destroy(linger=LINGER_MS)

    def _stop_reading(self) -> None:
        self._is_closing = True
        if self._reader.ident is not None:
            self._reader.join()

    def _see_off(self) -> None:
        """A rank that saw rank 0 hang up first would take that for its death."""
        told = []
        for rank, socket in self._outboxes.items():
            # Again: that one is gone already.
            with contextlib.suppress(zmq.Again):
                socket.send(wire.encode(Shutdown()), zmq.NOBLOCK)
                told.append(rank)
        deadline = time.monotonic() + CLOSE_SECONDS
        for rank in told:
            monitor = self._monitors[rank]
            while (left := deadline - time.monotonic()) > 0:
                if monitor.socket.poll(int(left * 1000)) and monitor.is_lost():
                    break

    def _never_came(self, rank: int) -> EngineDeadError:
        return EngineDeadError(f"rank {rank} did not connect within {self._world.timeout:g} s")

    def _read(self) -> None:
        poller = zmq.Poller()
        for socket in (self._inbox, *(monitor.socket for monitor in self._monitors.values())):
            poller.register(socket, zmq.POLLIN)
        try:
            while not self._is_closing and self._failure is None:
                self._look(dict(poller.poll(100)))
        except Exception as error:
            # A fault of ours here must not look like silent ranks.
            logger.exception("reading from the ranks failed")
            self._fail(EngineError(f"reading from the ranks failed: {error!r}"))

    def _look(self, ready: Container[Any]) -> None:
        if self._inbox in ready:
            self._take()
        for rank, monitor in self._monitors.items():
            if monitor.socket in ready and monitor.is_lost() and not self._is_closing:
                self._lose(rank)

    def _take(self) -> None:
        rank, data = self._inbox.recv_multipart()
        sender = int.from_bytes(rank, "little")
        message = wire.decode(data)
        if isinstance(message, LoadProgress):
            self._on_progress(sender, message)
        elif isinstance(message, RankFailed):
            kind = ConfigError if message.is_config else EngineError
            self._fail(kind(f"rank {sender}: {message.message}"))
        else:
            self._queues[sender].put(message)

    def _lose(self, rank: int) -> None:
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while self._failure is None and (left := deadline - time.monotonic()) > 0:
            if self._inbox.poll(int(left * 1000)):
                self._take()
        peer = self._world.peers[rank]
        if self._world.is_beside(rank):
            # If it is only stopped, others must not wait for it in a collective.
            with contextlib.suppress(OSError):
                os.kill(peer.pid, signal.SIGKILL)
        self._fail(
            EngineDeadError(
                f"rank {rank} (process {peer.pid} on {peer.host}) ended, or did not answer within "
                f"--collective-timeout {self._world.timeout:g} s"
            )
        )

    def _fail(self, error: MoeServeError) -> None:
        if self._failure is not None or self._is_closing:
            return
        self._failure = error
        for waiting in self._queues.values():
            waiting.put(error)
        self._on_failure(error)


class LeaderLink:
    """Another rank's side. When rank 0 is lost, this process ends at once: nobody is left to tell.

    `ends_process` False: `receive` raises instead (a rank that a test drives).
    """

    def __init__(self, world: World, *, ends_process: bool = True) -> None:
        self._rank = world.seat.rank.to_bytes(4, "little")
        self._ends_process = ends_process
        self._is_lost = threading.Event()
        addresses: list[str] = broadcast(world, None)
        self._context = zmq.Context()
        self._outbox = beating(self._context.socket(zmq.PUSH), world.timeout)
        self._outbox.connect(addresses[0])
        self._inbox = beating(self._context.socket(zmq.PULL), world.timeout)
        self._watch = LossWatch(self._inbox, self._lose)
        self._inbox.connect(addresses[world.seat.rank])
        self.send(RankHello())

    def send(self, message: FromRank) -> None:
        self._outbox.send_multipart([self._rank, wire.encode(message)])

    def receive(self) -> ToRank:
        """The next message from rank 0, however long that takes."""
        while not self._inbox.poll(1000):
            if self._is_lost.is_set():
                raise EngineDeadError("rank 0 ended")
        message: ToRank = wire.decode(self._inbox.recv())
        return message

    def close(self) -> None:
        self._watch.close()
        self._context.destroy(linger=LINGER_MS)

    def _lose(self) -> None:
        self._is_lost.set()
        if self._ends_process:
            logger.error("rank 0 ended, or did not answer; so this rank ends")
            os._exit(1)
