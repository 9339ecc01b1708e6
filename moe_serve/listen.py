"""The listening socket, taken before anything slow, so that a busy port is known at once."""

from __future__ import annotations

import socket

from moe_serve.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A bound socket on `host`:`port` (0: any free port). Raises `ConfigError` if that fails."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host!r} is not an address: {error.strerror}") from error
    sock = socket.socket(family, kind, proto)
    # A port in TIME_WAIT after a restart may be taken; one that another server holds may not.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"--port {port} on {host} cannot be used: {error.strerror}; choose another port"
        ) from error
    sock.set_inheritable(False)
    return sock


def url(sock: socket.socket) -> str:
    """Where to reach it: a wildcard address is shown as localhost."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
