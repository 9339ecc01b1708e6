"""Which of this host's addresses the other ranks can reach."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from moe_serve.errors import ConfigError

_SIOCGIFADDR = 0x8915


def address_towards(host: str) -> str:
    """The local IPv4 address of the route to `host`. Sends nothing.

    Raises `ConfigError` where there is none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((host, 9))
        except OSError as error:
            raise ConfigError(
                f"MASTER_ADDR {host!r}: this host finds no way to it over IPv4 ({error}); give "
                "torchrun a --master-addr that every node reaches"
            ) from error
        address: str = sock.getsockname()[0]
        return address


def interface_of(address: str) -> str | None:
    """The name of the interface that has this IPv4 address, None if none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
            except OSError:
                # An interface without an address.
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None


def choose_gloo_interface(master: str) -> None:
    """Let gloo listen on the way to the first rank, unless the user named an interface.

    By itself it takes what the host's own name resolves to, which is often the loopback.
    """
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        name = interface_of(address_towards(master))
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name
