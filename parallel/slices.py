"""Where a lane's tokens lie between its attention layers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_serve.parallel.group import RankGroup

# Shapes: T tokens of the lane, t rows of one rank's slice, C columns, c columns of one rank.


class TokenSlices:
    """One step's tokens of a lane, cut into equal runs: rank i holds tokens [i * t, (i + 1) * t).

    t = ceil(T / ranks); rows past T are padding, which is computed and never looked at.
    Attention needs all tokens and a part of each; everything else works on the slice.
    """

    def __init__(self, group: RankGroup, num_tokens: int) -> None:
        self.group = group
        self.num_tokens = num_tokens
        self.size = -(-num_tokens // group.size)

    @property
    def num_valid(self) -> int:
        """Tokens of this rank's slice, without the padding."""
        return min(self.size, max(0, self.num_tokens - self.group.rank * self.size))

    def own(self, x_TC: Tensor) -> Tensor:
        """This rank's rows of what every rank of the lane has, without padding."""
        start = self.group.rank * self.size
        return x_TC[start : start + self.num_valid]

    def gather(self, x_tC: Tensor) -> Tensor:
        """The slices of all ranks -> [T, C]."""
        if not self.num_tokens:
            return x_tC
        return self.group.all_gather(x_tC)[: self.num_tokens]

    def reduce_scatter(self, x_TC: Tensor) -> Tensor:
        """Each rank's part of a sum over ranks -> the slice of the sum, [t, C]."""
        return self.group.reduce_scatter(self._pad(x_TC))

    def sum_disjoint(self, x_TC: Tensor) -> Tensor:
        """The same where only one rank has something to add to a token."""
        if not self.num_tokens:
            return x_TC
        return self.group.sum_disjoint(self._pad(x_TC))

    def exchange(self, x_Tc: Tensor) -> Tensor:
        """Own columns of all tokens -> all columns, in order of rank, of the own slice: [t, C].

        Every rank has as many columns.
        """
        if self.group.size == 1:
            return x_Tc
        parts_Tc = self.group.all_to_all(self._pad(x_Tc))
        return torch.cat(parts_Tc.chunk(self.group.size), dim=-1)

    def _pad(self, x_TC: Tensor) -> Tensor:
        missing = self.size * self.group.size - x_TC.shape[0]
        return F.pad(x_TC, (0, 0, 0, missing)) if missing else x_TC
