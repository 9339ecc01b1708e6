"""What a group's collectives moved, and how long that took."""

from __future__ import annotations

import dataclasses
from typing import Literal

Operation = Literal[
    "all_gather", "all_to_all", "reduce_scatter", "all_reduce", "sum_disjoint", "gather"
]
# Of these a message is one rank's share of what the operation is about; of the others, all of it.
_SHARES = ("all_gather", "gather")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommRow:
    """Calls of one operation with messages of about one size: at least `least_bytes`, a power of
    two or 0, and below the next one.

    - `message_bytes`: what this rank brought, all calls together.
    - `bytes_sent`: what of it left for others.
    - `seconds`, and `longest_seconds` of a single call: as the caller waits, for late ranks too.
      None on a GPU, where a call returns before it is done.
    """

    operation: Operation
    least_bytes: int
    calls: int
    message_bytes: int
    bytes_sent: int
    seconds: float | None
    longest_seconds: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupCommunication:
    """Of one rank in one group. `backend`: see `Collectives.name`; `size`: ranks of the group."""

    group: str
    backend: str
    size: int
    rows: list[CommRow]


class CommLog:
    """Counts since it was made or cleared. It may not cost what is noticed: collectives take 30 us
    and more.
    """

    __slots__ = ("_cells",)

    def __init__(self) -> None:
        # (operation, bits of the message's length, is timed) ->
        # [calls, message bytes, bytes sent, seconds, longest]
        self._cells: dict[tuple[Operation, int, bool], list[float]] = {}

    def note(
        self, operation: Operation, message_bytes: int, bytes_sent: int, seconds: float | None
    ) -> None:
        key = (operation, message_bytes.bit_length(), seconds is not None)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = [0, 0, 0, 0.0, 0.0]
        cell[0] += 1
        cell[1] += message_bytes
        cell[2] += bytes_sent
        if seconds is not None:
            cell[3] += seconds
            if seconds > cell[4]:
                cell[4] = seconds

    @property
    def bytes_sent(self) -> int:
        return int(sum(cell[2] for cell in self._cells.values()))

    def rows(self) -> list[CommRow]:
        """Operations by name, small messages first."""
        return [_row(*key, *cell) for key, cell in sorted(self._cells.items())]

    def clear(self) -> None:
        self._cells.clear()


def _row(
    operation: Operation,
    bits: int,
    is_timed: bool,
    calls: float,
    message_bytes: float,
    bytes_sent: float,
    seconds: float,
    longest: float,
) -> CommRow:
    return CommRow(
        operation=operation,
        least_bytes=1 << (bits - 1) if bits else 0,
        calls=int(calls),
        message_bytes=int(message_bytes),
        bytes_sent=int(bytes_sent),
        seconds=seconds if is_timed else None,
        longest_seconds=longest if is_timed else None,
    )


def algorithm_bandwidth(row: CommRow, size: int) -> float | None:
    """Bytes a second: S / t, S being all the operation is about: what all ranks together gather,
    what each has to sum or to hand out. None without times.

    As nccl-tests defines it, doc/PERFORMANCE.md there; `gather` as in its src/gather.cu.
    """
    if not row.seconds:
        return None
    return row.message_bytes * (size if row.operation in _SHARES else 1) / row.seconds


def bus_bandwidth(row: CommRow, size: int) -> float | None:
    """Bytes a second that each rank's way to the others carries, to compare with what it can, at
    any number of ranks: the algorithm's times (n - 1) / n, and twice that to all-reduce.

    From the same text: what the best algorithm would move. Ours for `all_reduce` gathers, and sends
    n / 2 times as much.
    """
    bandwidth = algorithm_bandwidth(row, size)
    if bandwidth is None:
        return None
    return bandwidth * (2 if row.operation == "all_reduce" else 1) * (size - 1) / size
