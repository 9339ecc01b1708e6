"""What moves tensors between the ranks of a group, and adds them up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

# Shapes: n rows of one rank, S ranks of the group. Tensors are contiguous and never overlap.


class Collectives(Protocol):
    """One way to do it: torch's process group, DeepSpeed's, or memory that the ranks share.

    All give the same bits. Every rank of the group makes the same calls in the same order. Each has
    a deadline; past it, or when a peer dies, it raises RuntimeError, and the rank is of no more
    use.
    """

    @property
    def name(self) -> str:
        """As `--comm-backend` has it, or "nccl"."""

    @property
    def rank(self) -> int:
        """This one's place among `size`."""

    @property
    def size(self) -> int: ...

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """x [n, ...] of each rank, n equal everywhere -> out [S * n, ...] in order of rank."""

    def all_to_all(
        self, out: Tensor, x: Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> None:
        """`send_counts[i]` rows of x go to rank i, `receive_counts[i]` rows of out come from it,
        both in order of rank; any of them may be 0.
        """

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        """Sum over ranks of x [S * n, ...] -> out, this rank's n rows of it.

        Added in fp32 in order of rank and rounded once to x's dtype, so that a row's bits do not
        depend on its place.
        """

    def all_reduce(self, x: Tensor) -> None:
        """Sum over ranks, in place at each of them, added as `reduce_scatter` does."""

    def sum_bits(self, out: Tensor, x: Tensor) -> None:
        """`reduce_scatter` of integers [S * n, c], whose order does not matter."""

    def gather(self, parts: list[Tensor] | None, x: Tensor) -> None:
        """Every rank's x into `parts`, at rank 0; the others give None."""

    def close(self) -> None:
        """Give up what it holds. Does not wait for the others."""
