"""How many tokens each expert got."""

from __future__ import annotations

import torch

# Shapes: L MoE layers, E logical experts.


class ExpertLoad:
    """Counts per MoE layer and logical expert since the start: `counts_LE`, int64.

    Every routed token is counted once, by the router of the rank that routes it: over all ranks,
    each row sums to tokens x top_k.
    """

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        self.counts_LE = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)

    def to_list(self) -> list[list[int]]:
        # sync: asked for by a person, not by a step.
        counts: list[list[int]] = self.counts_LE.tolist()
        return counts
