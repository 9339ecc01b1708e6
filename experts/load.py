"""How many tokens each expert got."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from moe_serve.experts.recording import PHASES, Ints

# Shapes: L MoE layers, C phases, E logical experts, R ranks.


class LoadCounts(NamedTuple):
    """`counts_LCE` and `rows_LR` (see `LoadRecording`) of one rank, or of several together."""

    counts_LCE: Ints
    rows_LR: Ints

    @property
    def counts_LE(self) -> Ints:
        """All phases together."""
        total: Ints = self.counts_LCE.sum(1)
        return total

    def to_bytes(self) -> bytes:
        return self.counts_LCE.tobytes() + self.rows_LR.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, shape: tuple[int, ...]) -> LoadCounts:
        """Of one rank; `shape` is that of `counts_LCE`."""
        values = np.frombuffer(data, dtype=np.int64)
        num_counts = math.prod(shape)
        return cls(values[:num_counts].reshape(shape), values[num_counts:, None])

    @classmethod
    def join(cls, ranks: Sequence[LoadCounts]) -> LoadCounts:
        """Of all ranks, from those of each, in order."""
        counts_LCE = sum(part.counts_LCE for part in ranks)
        assert not isinstance(counts_LCE, int)
        return cls(counts_LCE, np.concatenate([part.rows_LR for part in ranks], axis=1))


class ExpertLoad:
    """What one rank has counted since the start, int64 on the model's device.

    - `counts_LCE`: choices by its router, of the tokens whose home it is. Every routed token is
      counted once: over all ranks, each layer and phase sums to tokens x top_k.
    - `rows_L`: rows that its experts computed, for tokens of any rank. Over all ranks they sum to
      the same. Where whole experts are not spread over ranks it stays 0.
    """

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        shape = (num_layers, len(PHASES), num_experts)
        self.counts_LCE = torch.zeros(shape, dtype=torch.int64, device=device)
        self.rows_L = torch.zeros(num_layers, dtype=torch.int64, device=device)

    def clear(self) -> None:
        self.counts_LCE.zero_()
        self.rows_L.zero_()

    @contextlib.contextmanager
    def or_nothing(self) -> Iterator[None]:
        """What is counted inside counts only if that comes to its end. Waits for no device."""
        before = self.counts_LCE.clone(), self.rows_L.clone()
        try:
            yield
        except BaseException:
            self.counts_LCE.copy_(before[0])
            self.rows_L.copy_(before[1])
            raise

    def read(self) -> LoadCounts:
        """What was counted so far, on the host, by one copy."""
        together = torch.cat((self.counts_LCE.flatten(), self.rows_L))
        # sync: once every few steps, or when a person asks.
        values = together.cpu().numpy()
        num_counts = self.counts_LCE.numel()
        return LoadCounts(
            values[:num_counts].reshape(self.counts_LCE.shape), values[num_counts:, None]
        )
