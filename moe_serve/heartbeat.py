"""ZMQ sockets that notice when the other end dies or stops."""

from __future__ import annotations

from typing import Any

import zmq

# Closed: the very first connection failed.
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


def beating(socket: zmq.Socket[Any], timeout: float) -> zmq.Socket[Any]:
    """Let the socket drop a peer that is silent for three quarters of `timeout` seconds.

    ZMQ's own thread asks and answers, so a busy peer is alive and a stopped one is not. What such
    a socket sends is never held back, since a full queue would silence the heartbeat too.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(timeout * 1000 / 4))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(timeout * 1000 / 2))
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    # A peer that was dropped has missed messages: there is no coming back.
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    return socket


def loss_monitor(socket: Any) -> Any:
    """A socket that gets one message when the connection of `socket` is lost."""
    return socket.get_monitor_socket(_LOST)
