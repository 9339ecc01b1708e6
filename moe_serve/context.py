"""The forward context: one step's batch as flat tensors, shared by every layer."""

from __future__ import annotations

import dataclasses

import torch

# Shapes: T tokens of the step, S sequences of the step, B blocks, s slots of a block,
# N kv heads, h head_dim.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """Sequences with one new token (decodes) come first; `num_decodes` of them.

    - `positions_T`: position of each token in its sequence, int64.
    - `slots_T`: where its K/V go: block id * block_size + offset in the block, int64.
    - `query_starts`: S + 1 offsets into T, plain ints (known on the host: no sync).
    - `context_lens`: S counts of positions that a sequence's last new token sees, itself included.
    - `block_tables_SB`: block ids in order, padded with 0; int64.
    - `num_valid_1`: one int32 on the device: rows of T from there on are padding, which a captured
      graph needs, and nothing may count them. None: there is no padding.
    """

    positions_T: torch.Tensor
    slots_T: torch.Tensor
    query_starts: list[int]
    context_lens: list[int]
    block_tables_SB: torch.Tensor
    num_decodes: int
    block_size: int
    num_valid_1: torch.Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        return self.query_starts[-1]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """Paged keys and values of one layer: two tensors [B, s, N, h]."""

    keys_BsNh: torch.Tensor
    values_BsNh: torch.Tensor
