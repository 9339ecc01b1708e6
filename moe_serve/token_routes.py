"""Which experts tokens chose, as it travels from the ranks to the client. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Shapes: T tokens, L MoE layers, K top-k.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenRoutes:
    """`ids`: of T tokens in order, the logical experts that each chose in each MoE layer, best
    first: little-endian int16 [T, L, K], which is `shape`.
    """

    shape: tuple[int, int, int]
    ids: bytes

    def __post_init__(self) -> None:
        num_tokens, num_layers, top_k = self.shape
        assert len(self.ids) == 2 * num_tokens * num_layers * top_k

    @classmethod
    def of(cls, ids_TLK: npt.NDArray[np.int16]) -> TokenRoutes:
        num_tokens, num_layers, top_k = ids_TLK.shape
        ids = ids_TLK.astype("<i2", copy=False).tobytes()
        return cls(shape=(num_tokens, num_layers, top_k), ids=ids)

    @classmethod
    def join(cls, parts: Sequence[TokenRoutes]) -> TokenRoutes:
        """Of one part at least, all of one model."""
        num_tokens = sum(part.num_tokens for part in parts)
        return cls(
            shape=(num_tokens, *parts[0].shape[1:]), ids=b"".join(part.ids for part in parts)
        )

    @property
    def num_tokens(self) -> int:
        return self.shape[0]

    @property
    def ids_TLK(self) -> npt.NDArray[np.int16]:
        return np.frombuffer(self.ids, dtype="<i2").reshape(self.shape)

    def between(self, start: int, stop: int) -> TokenRoutes:
        """Of tokens [start, stop), as far as they are there."""
        return self if (start, stop) == (0, self.num_tokens) else self.of(self.ids_TLK[start:stop])
