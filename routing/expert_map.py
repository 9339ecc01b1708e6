"""Where the experts are, as the dispatchers of one rank need it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_serve.kernels.permute import permute

# Shapes: T tokens, K top-k, E logical experts, C most replicas of one.

# Physical experts travel in two bytes.
_MOST_PHYSICAL = 2**15


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMap:
    """From logical experts to physical ones, numbered rank * `most_local` + index in its bank.

    - `replicas_EC`: an expert's physical ones in order of rank, filled up with the first; int64,
      as `num_replicas_E`.
    - `num_local`: experts in each rank's bank. Any placement will do: ranks may hold different
      numbers of experts, or none. `rank`: this one.
    - `is_in_order`: the index of each expert is its number.
    """

    replicas_EC: Tensor
    num_replicas_E: Tensor
    num_local: tuple[int, ...]
    rank: int
    is_in_order: bool

    @classmethod
    def make(
        cls, experts: Sequence[Sequence[int]], rank: int, device: torch.device | str = "cpu"
    ) -> ExpertMap:
        """`experts[rank]`: the logical experts of that rank's bank, in its order."""
        num_local = tuple(map(len, experts))
        most = max(num_local)
        assert most * len(experts) <= _MOST_PHYSICAL and rank < len(experts)
        replicas: dict[int, list[int]] = {}
        for other, own in enumerate(experts):
            for index, expert in enumerate(own):
                replicas.setdefault(expert, []).append(other * most + index)
        rows = [replicas[expert] for expert in range(len(replicas))]
        width = max(map(len, rows))
        padded = [row + row[:1] * (width - len(row)) for row in rows]
        return cls(
            replicas_EC=torch.tensor(padded, dtype=torch.int64, device=device),
            num_replicas_E=torch.tensor(list(map(len, rows)), dtype=torch.int64, device=device),
            num_local=num_local,
            rank=rank,
            is_in_order=[row[0] for row in rows] == list(range(len(rows))),
        )

    @property
    def most_local(self) -> int:
        """Experts of the rank that has most."""
        return max(self.num_local)

    def choose(self, ids_TK: Tensor, step: int) -> Tensor:
        """Logical experts of this rank's tokens -> a physical one for each, [T, K].

        Replicas take turns: the n-th time (from 0, by token and slot) that this rank's tokens name
        an expert in a step, replica (n + rank + step) % replicas computes it. So each gets as many
        to within one, also over steps of one token, and ranks do not all begin with the same.
        Which one it is changes no bit.
        """
        num_experts, most_replicas = self.replicas_EC.shape
        if most_replicas == 1:
            return self.replicas_EC.squeeze(1)[ids_TK]
        permutation = permute(ids_TK, num_experts)
        starts_E = permutation.counts_E.cumsum(0) - permutation.counts_E
        times_TK = permutation.inverse_R.view_as(ids_TK) - starts_E[ids_TK]
        turn_TK = (times_TK + (self.rank + step)) % self.num_replicas_E[ids_TK]
        return self.replicas_EC[ids_TK, turn_TK]

    def rank_of(self, physical_TK: Tensor) -> Tensor:
        return physical_TK // self.most_local

    def index_of(self, physical_TK: Tensor) -> Tensor:
        """In the bank of its rank."""
        return physical_TK % self.most_local


class ReplicaTurns:
    """Counts the steps of one layer, from 0 when its experts were placed, for `ExpertMap.choose`.

    Dispatchers that serve the layer by turns share one.
    """

    def __init__(self, experts: ExpertMap) -> None:
        self.experts = experts
        self._step = 0

    def choose(self, ids_TK: Tensor) -> Tensor:
        """To be called once a step."""
        physical_TK = self.experts.choose(ids_TK, self._step)
        self._step += 1
        return physical_TK
