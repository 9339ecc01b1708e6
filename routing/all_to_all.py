"""The dispatcher that moves only what is needed."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from moe_serve.kernels.combine import weigh_rows
from moe_serve.kernels.permute import count_ids, permute
from moe_serve.kernels.take_rows import take_rows
from moe_serve.parallel.group import RankGroup
from moe_serve.routing.dispatch import Dispatched
from moe_serve.routing.expert_map import ReplicaTurns
from moe_serve.routing.packing import pack, unpack
from moe_serve.routing.router import Routing

# Shapes: T own tokens, D model, K top-k, e most experts of a rank, S ranks,
# N tokens sent or received (one for each rank that a token needs), R rows computed here.


class _Table(NamedTuple):
    """Host integers, by the other rank: tokens, and (token, slot) rows per expert of the computer.

    Both sides can tell from it how many rows go each way, there and back.
    """

    tokens_S: list[int]
    rows_Se: list[list[int]]

    @property
    def rows_S(self) -> list[int]:
        return [sum(rows) for rows in self.rows_Se]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllToAllDispatched(Dispatched):
    """`return_order_R`: rows as they go back, by (home rank, token, slot).

    `computed_S` rows go back to each rank and `awaited_S` come from it; those come by (computing
    rank, token, slot), and `inverse` finds them: its index is token * K + slot.
    """

    return_order_R: Tensor
    computed_S: list[int]
    awaited_S: list[int]
    inverse: Tensor
    weights_TK: Tensor


class AllToAllDispatcher:
    """A token goes once to each rank that has at least one of its experts.

        counts   -> one small exchange, then the one host sync
        tokens   -> row and local expert ids as bytes: one exchange
        results  <- one row for each (token, slot), in the model's dtype: one exchange

    The home rank weighs and adds, as `LocalDispatcher` does: equal to it bit for bit.
    """

    def __init__(self, group: RankGroup, turns: ReplicaTurns) -> None:
        self.group = group
        self.turns = turns
        self.experts = turns.experts
        # A row of counts for each rank: tokens first, then its experts.
        self._width = 1 + self.experts.most_local

    def dispatch(self, x_TD: Tensor, routing: Routing, capacity: int) -> AllToAllDispatched:
        ids_TK = routing.ids_TK
        physical_TK = self.turns.choose(ids_TK)
        ranks_TK = self.experts.rank_of(physical_TK)
        needed_ST = self._needed(ranks_TK)
        sent, received, counts_Se = self._exchange_counts(physical_TK + ranks_TK + 1, needed_ST)

        to_N, token_N = torch.nonzero_static(needed_ST, size=sum(sent.tokens_S)).unbind(1)
        index_NK = self.experts.index_of(physical_TK[token_N])
        index_NK = index_NK.where(ranks_TK[token_N] == to_N[:, None], -1).to(torch.int16)
        arrived = self.group.all_to_all(
            pack(x_TD.index_select(0, token_N), index_NK), sent.tokens_S, received.tokens_S
        )
        top_k = ids_TK.shape[1]
        x_ND, index_NK = unpack(arrived, (x_TD.shape[1], x_TD.dtype), (top_k, torch.int16))

        num_local = self.experts.num_local[self.group.rank]
        order_R = permute(index_NK, num_local).order_R[: sum(received.rows_S)]
        return AllToAllDispatched(
            rows_RD=take_rows(x_ND, order_R, top_k),
            counts_E=counts_Se.sum(0)[:num_local],
            return_order_R=order_R.argsort(),
            computed_S=received.rows_S,
            awaited_S=sent.rows_S,
            inverse=permute(ranks_TK, self.group.size).inverse_R,
            weights_TK=routing.weights_TK,
        )

    def combine(self, rows_RD: Tensor, dispatched: AllToAllDispatched) -> Tensor:
        results = self.group.all_to_all(
            rows_RD.index_select(0, dispatched.return_order_R),
            dispatched.computed_S,
            dispatched.awaited_S,
        )
        return weigh_rows(results, dispatched.inverse, dispatched.weights_TK)

    def _needed(self, ranks_TK: Tensor) -> Tensor:
        """Whether a rank has an expert of a token, [S, T]."""
        shape = (self.group.size, ranks_TK.shape[0])
        needed_ST = torch.zeros(shape, dtype=torch.bool, device=ranks_TK.device)
        return needed_ST.scatter_(0, ranks_TK.T, True)

    def _exchange_counts(
        self, cells_TK: Tensor, needed_ST: Tensor
    ) -> tuple[_Table, _Table, Tensor]:
        """What this rank sends to each, what it gets from each, and the latter's rows, [S, e].

        `cells_TK`: where a (token, slot) is counted, in the table of all ranks.
        """
        size = (self.group.size, self._width)
        sent = count_ids(cells_TK.flatten(), size[0] * size[1]).view(size)
        sent[:, 0] = needed_ST.sum(1)
        received = self.group.all_to_all(sent)
        # sync: the exchange needs its row counts on the host.
        sides = torch.stack((sent, received)).tolist()
        ours, theirs = [_Table([r[0] for r in side], [r[1:] for r in side]) for side in sides]
        return ours, theirs, received[:, 1:]
