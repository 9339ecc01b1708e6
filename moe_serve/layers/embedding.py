"""Token embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_serve.layers.projection import empty_parameter

# Shapes: T tokens, V vocabulary, D model.


class Embedding(nn.Module):
    """A row of the table per token id, times `scale`."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        scale: float = 1.0,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.weight_VD = empty_parameter(vocab_size, hidden_size, dtype=dtype, device=device)

    def forward(self, token_ids_T: Tensor) -> Tensor:
        x_TD = F.embedding(token_ids_T, self.weight_VD)
        return x_TD if self.scale == 1.0 else x_TD * self.scale
