"""What DeepSpeed's launcher would set for ranks of this machine."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def launched(size: int) -> Iterator[list[dict[str, str]]]:
    """The environment of each rank.

    The files of its all-reduce in shared memory, which DeepSpeed leaves behind, are removed at the
    end.
    """
    if size == 1:
        yield [{"DS_ACCELERATOR": "cpu"}]
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "DS_ACCELERATOR": "cpu", "WORLD_SIZE": str(size), "LOCAL_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    try:
        yield [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    finally:
        for file in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            file.unlink()
