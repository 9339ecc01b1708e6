"""Collectives by our own C++, over memory that the ranks of one host share."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_serve.parallel.shm.library import load
from moe_serve.parallel.shm.segment import Segment, SegmentAddress
from moe_serve.parallel.torch_collectives import sum_in_order

MOST_RANKS = 64
# Of each rank there are two. Waiting for the others once a slot costs a few percent at this size.
SLOT_BYTES = 1024 * 1024
MOST_BYTES = 64 * 1024 * 1024

# As sum.h numbers them.
_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int32: 3, torch.uint8: 4}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_OPERATIONS = ("all_gather", "gather", "all_to_all", "reduce_scatter", "all_reduce")
# waiting.h's Problem.
_LATE, _GONE, _MISMATCH, _FORKED = 1, 2, 3, 4


class ShmError(Exception):
    """Why there is no such group here, in one line."""


class ShmCollectives:
    """See `Collectives`. Tensors are on the CPU.

    Each rank goes through `create` or `find`, all of them before the first call of any. `ranks`:
    what errors name the group's members by; `pids`: their processes, once known. After a failure
    each later call fails at once. A child of fork cannot use it.
    """

    name = "shm"

    def __init__(self, segment: Segment, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.address = segment.address
        self.pid = os.getpid()
        self.ranks: Sequence[int] = range(size)
        self.pids: Sequence[int] = ()
        self._timeout = timeout
        self._library = load()
        self._functions = {
            name: getattr(self._library, f"moe_serve_shm_{name}") for name in _OPERATIONS
        }
        self._array = ctypes.c_uint64 * size
        fault = ctypes.create_string_buffer(128)
        self._group: int | None = self._library.moe_serve_shm_open(
            segment.file, rank, size, _slot_bytes(size), segment.address.token,
            int(timeout * 1e9), fault,
        )  # fmt: skip
        if self._group is None:
            raise ShmError(fault.value.decode())
        self._release = weakref.finalize(self, _release, self._library, self._group, segment)

    @classmethod
    def create(cls, size: int, timeout: float) -> ShmCollectives:
        """Rank 0's. Raises `ShmError`, or `BuildError` where nothing can be compiled."""
        num_bytes = load().moe_serve_shm_bytes(size, _slot_bytes(size))
        try:
            segment = Segment.create(num_bytes)
        except OSError as error:
            raise ShmError(
                f"no {num_bytes >> 20} MiB of memory to share: {error.strerror}"
            ) from error
        return cls._hold(segment, 0, size, timeout)

    @classmethod
    def find(cls, address: SegmentAddress, rank: int, size: int, timeout: float) -> ShmCollectives:
        """Another rank's. Raises `ShmError` where it does not reach rank 0's, or `BuildError`."""
        try:
            segment = Segment.find(address)
        except OSError as error:
            raise ShmError(
                f"process {os.getpid()} cannot open the memory of process {address.pid}: "
                f"{error.strerror}"
            ) from error
        return cls._hold(segment, rank, size, timeout)

    @classmethod
    def _hold(cls, segment: Segment, rank: int, size: int, timeout: float) -> ShmCollectives:
        try:
            segment.hold(rank)
            return cls(segment, rank, size, timeout)
        except BaseException as error:
            segment.close()
            if isinstance(error, OSError):
                raise ShmError(f"its memory cannot be locked: {error.strerror}") from error
            raise

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        assert out.nbytes == self.size * x.nbytes
        self._call("all_gather", _pointer(out), _pointer(x), x.nbytes)

    def all_to_all(
        self, out: Tensor, x: Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> None:
        row_bytes = _row_bytes(x)
        assert row_bytes == _row_bytes(out)
        assert receive_counts[self.rank] == send_counts[self.rank]
        assert (sum(receive_counts), sum(send_counts)) == (out.shape[0], x.shape[0])
        received = self._words([count * row_bytes for count in receive_counts])
        sent = self._words([count * row_bytes for count in send_counts])
        self._call("all_to_all", _pointer(out), _pointer(x), received, sent)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        assert x.nbytes == self.size * out.nbytes
        if x.dtype in _FLOATS:
            self._call("reduce_scatter", _NUMBERS[x.dtype], _pointer(out), _pointer(x), out.nbytes)
        else:
            out.copy_(sum_in_order(self._exchange(x)))

    def all_reduce(self, x: Tensor) -> None:
        if x.dtype in _FLOATS:
            self._call("all_reduce", _NUMBERS[x.dtype], _pointer(x), x.nbytes)
        else:
            parts = x.new_empty((self.size, *x.shape))
            self.all_gather(parts, x)
            x.copy_(sum_in_order(parts))

    def sum_bits(self, out: Tensor, x: Tensor) -> None:
        assert x.nbytes == self.size * out.nbytes
        if x.dtype in (torch.int32, torch.uint8):
            self._call("reduce_scatter", _NUMBERS[x.dtype], _pointer(out), _pointer(x), out.nbytes)
        else:
            torch.sum(self._exchange(x), 0, dtype=x.dtype, out=out)

    def gather(self, parts: list[Tensor] | None, x: Tensor) -> None:
        assert (parts is not None) == (self.rank == 0)
        outs = None if parts is None else self._words([_pointer(part) for part in parts])
        self._call("gather", outs, _pointer(x), x.nbytes)

    def close(self) -> None:
        self._release()
        self._group = None

    def _exchange(self, x: Tensor) -> Tensor:
        """[S * n, ...] -> [S, n, ...]: each rank's part for this one, in order of rank."""
        parts = torch.empty_like(x)
        counts = [x.shape[0] // self.size] * self.size
        self.all_to_all(parts, x, counts, counts)
        return parts.view(self.size, -1, *x.shape[1:])

    def _words(self, values: list[int]) -> Any:
        return self._array(*values)

    def _call(self, operation: str, *args: Any) -> None:
        if self._group is None:
            raise RuntimeError(f"shm {operation}: the group is closed")
        if self._functions[operation](self._group, *args):
            raise RuntimeError(f"shm {operation}: {self._failure()}")

    def _failure(self) -> str:
        words = (ctypes.c_uint64 * 6)()
        self._library.moe_serve_shm_failure(self._group, words)
        problem, finder, culprit, operation, _, num_bytes = words
        by, about = self._named(finder), self._named(culprit)
        if problem == _FORKED:
            return f"process {os.getpid()} is a child of rank {by}, and no rank itself"
        if problem == _GONE:
            return f"rank {about} is gone"
        if problem == _LATE:
            return f"rank {about} did not come within {self._timeout:g} s"
        assert problem == _MISMATCH
        text = f"rank {about} did not call the same as rank {by}"
        if finder == self.rank:
            text += f", but {_OPERATIONS[operation]} of {num_bytes} bytes"
        return text

    def _named(self, place: int) -> str:
        pid = f" (process {self.pids[place]})" if self.pids else ""
        return f"{self.ranks[place]}{pid}"


def _release(library: ctypes.CDLL, group: int, segment: Segment) -> None:
    library.moe_serve_shm_close(group)
    segment.close()


def _slot_bytes(size: int) -> int:
    return min(SLOT_BYTES, MOST_BYTES // (2 * size) // 4096 * 4096)


def _row_bytes(x: Tensor) -> int:
    return x.element_size() * x.shape[1:].numel()


def _pointer(x: Tensor) -> int:
    assert x.is_contiguous() and x.device.type == "cpu"
    return x.data_ptr()
