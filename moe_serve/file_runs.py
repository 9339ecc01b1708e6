"""Runs of bytes from files straight into tensors, several at once.

A copy out of a mapped file would pay a fault for every few pages of it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from moe_serve.errors import CheckpointError

# Small enough to share the largest tensor among threads.
PIECE_BYTES = 2**24


class FileRun(NamedTuple):
    """Bytes [start, start + size of `target`) of a file, and the memory that they fill:
    `target` is contiguous, on the CPU, with at least one element."""

    file: Path
    start: int
    target: torch.Tensor


class _Piece(NamedTuple):
    file: Path
    start: int
    memory: memoryview


def read_runs(runs: Sequence[FileRun], num_threads: int) -> Iterator[int]:
    """Fill all targets, in the order of the files; yields the sizes in bytes of what is done.

    Raises `CheckpointError` where a file ends too soon or cannot be read.
    """
    pieces = [piece for run in sorted(runs, key=lambda run: run[:2]) for piece in _pieces(run)]
    with contextlib.ExitStack() as stack:
        files: dict[Path, int] = {}
        for file in dict.fromkeys(piece.file for piece in pieces):
            files[file] = os.open(file, os.O_RDONLY)
            stack.callback(os.close, files[file])
        pool = ThreadPoolExecutor(num_threads, thread_name_prefix="read")
        # Entered last: files close when no thread reads them any more.
        stack.callback(pool.shutdown, cancel_futures=True)
        # Reading releases the interpreter's lock.
        yield from pool.map(lambda piece: _read(files[piece.file], piece), pieces)


def _pieces(run: FileRun) -> Iterator[_Piece]:
    memory = run.target.detach().view(-1).view(torch.uint8).numpy().data
    for start in range(0, len(memory), PIECE_BYTES):
        yield _Piece(run.file, run.start + start, memory[start : start + PIECE_BYTES])


def _read(descriptor: int, piece: _Piece) -> int:
    size, num_read = len(piece.memory), 0
    while num_read < size:
        try:
            more = os.preadv(descriptor, [piece.memory[num_read:]], piece.start + num_read)
        except OSError as error:
            raise CheckpointError(f"{piece.file}: cannot be read: {error}") from error
        if not more:
            raise CheckpointError(f"{piece.file}: became shorter while it was read")
        num_read += more
    return size
