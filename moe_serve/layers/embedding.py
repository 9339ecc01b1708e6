"""Token embeddings and the language-model head, split over the ranks of a lane by vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_serve.kernels.cpu.packed import PackedWeight
from moe_serve.kernels.linear import linear
from moe_serve.layers.projection import empty_parameter
from moe_serve.models.shard import ModelShard
from moe_serve.parallel.group import RankGroup
from moe_serve.parallel.shard import split
from moe_serve.parallel.slices import TokenSlices

# Shapes: T tokens of the lane, t rows of the token slice, R rows that need logits, V vocabulary,
# v its part on this rank, D model.


class Embedding(nn.Module):
    """A row of the table per token id, times `scale`, for the own token slice."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        shard: ModelShard,
        *,
        scale: float = 1.0,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.span = shard.vocab(vocab_size)
        self.weight_VD = empty_parameter(self.span.size, hidden_size, dtype=dtype, device=device)

    def forward(self, token_ids_T: Tensor, slices: TokenSlices) -> Tensor:
        if slices.group.size == 1:
            x_tD = F.embedding(token_ids_T, self.weight_VD)
        else:
            x_tD = slices.sum_disjoint(self._own_rows(token_ids_T))
        return x_tD if self.scale == 1.0 else x_tD * self.scale

    def _own_rows(self, token_ids_T: Tensor) -> Tensor:
        """Zero for the tokens whose rows other ranks hold -> [T, D]."""
        start, stop = self.span
        elsewhere_T = (token_ids_T < start) | (token_ids_T >= stop)
        rows_T = (token_ids_T - start).masked_fill(elsewhere_T, 0)
        return F.embedding(rows_T, self.weight_VD).masked_fill_(elsewhere_T[:, None], 0.0)


def gather_logits(
    hidden_RD: Tensor, weight_vD: Tensor | PackedWeight, vocab_size: int, group: RankGroup
) -> Tensor | None:
    """Scores of the whole vocabulary [R, V] at the lane's first rank; None at the others."""
    logits_Rv = linear(hidden_RD, weight_vD)
    if group.size == 1:
        return logits_Rv
    # Equal shapes for the collective: parts of the vocabulary differ by one row at most.
    most = -(-vocab_size // group.size)
    parts = group.gather(F.pad(logits_Rv, (0, most - logits_Rv.shape[1])))
    if parts is None:
        return None
    sizes = [split(vocab_size, rank, group.size).size for rank in range(group.size)]
    return torch.cat([part[:, :n] for part, n in zip(parts, sizes, strict=True)], dim=-1)
