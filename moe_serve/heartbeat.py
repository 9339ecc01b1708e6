"""ZMQ sockets that notice when the other end dies or stops."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

_POLL_MS = 100
# Closed: the very first connection failed.
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


def beating(socket: zmq.Socket[Any], timeout: float) -> zmq.Socket[Any]:
    """Let the socket drop a peer that is silent for three quarters of `timeout` seconds.

    ZMQ's own thread asks and answers, so a busy peer is alive and a stopped one is not. What such
    a socket sends is never held back, since a full queue would silence the heartbeat too.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(timeout * 1000 / 4))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(timeout * 1000 / 2))
    # For one that never gets as far as to answer.
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(timeout * 1000))
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    # A peer that was dropped has missed messages: there is no coming back.
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    return socket


def loss_monitor(socket: Any) -> Any:
    """A socket that gets one message when the connection of `socket` is lost."""
    return socket.get_monitor_socket(_LOST)


class PeerMonitor:
    """Tells the one peer of a bound socket from others who knock at its port and leave, such as a
    scanner: it is the first to speak ZMQ. `socket` has something to read when it is worth asking.
    """

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self.socket = socket.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        # File descriptors of connections.
        self._latest = self._peer = -1

    def is_lost(self) -> bool:
        """Whether the next event is the end of the peer's connection."""
        message = recv_monitor_message(self.socket)
        event, connection = message["event"], message["value"]
        if event == zmq.EVENT_ACCEPTED:
            self._latest = connection
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED and self._peer < 0:
            self._peer = self._latest
        return event == zmq.EVENT_DISCONNECTED and connection == self._peer


class LossWatch:
    """Calls `on_loss` in a thread of its own when the connection of `socket` is lost."""

    def __init__(self, socket: zmq.Socket[Any], on_loss: Callable[[], None]) -> None:
        self._socket = socket
        self._is_closing = False
        self._monitor = loss_monitor(socket)
        self._thread = threading.Thread(target=self._wait, args=(on_loss,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; the connection may end now."""
        self._is_closing = True
        self._thread.join()
        self._socket.disable_monitor()
        self._monitor.close()

    def _wait(self, on_loss: Callable[[], None]) -> None:
        while not self._is_closing:
            if self._monitor.poll(_POLL_MS) and not self._is_closing:
                return on_loss()
