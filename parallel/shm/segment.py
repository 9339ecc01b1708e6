"""The file that the ranks of a group map: made by the first, found by the others."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import secrets
from typing import Self


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SegmentAddress:
    """Where the ranks of this host find it. `token`: drawn for it, and written in it."""

    pid: int
    file: int
    token: int


class Segment:
    """An open file in memory, without a name: it ends with the last process that has it.

    Each rank holds a lock on the byte of its number, by which the others see that it is there: the
    kernel takes the lock back when the process ends, however it ends. It would do so too if this
    process closed any other descriptor of the same file, so there is only one.
    """

    def __init__(self, address: SegmentAddress, file: int) -> None:
        self.address = address
        self.file = file

    @classmethod
    def create(cls, num_bytes: int) -> Self:
        """All its pages are taken now: later a lack of memory would be a SIGBUS. Raises OSError."""
        file = os.memfd_create("moe_serve", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(file, 0, num_bytes)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except BaseException:
            os.close(file)
            raise
        token = secrets.randbits(64)
        return cls(SegmentAddress(pid=os.getpid(), file=file, token=token), file)

    @classmethod
    def find(cls, address: SegmentAddress) -> Self:
        """Raises OSError where this process may not, or does not see that one."""
        path = f"/proc/{address.pid}/fd/{address.file}"
        return cls(address, os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def hold(self, rank: int) -> None:
        """From now on the others see that this rank is there."""
        fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    def close(self) -> None:
        os.close(self.file)
