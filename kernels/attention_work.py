"""Which rows and keys each program of paged attention works on: planned once a step, on the host.

The tokens of a sequence are cut into query blocks. A block with few keys is one item, which walks
all splits of its keys in order. The blocks with the most keys become one item a split instead, so
that a few long sequences fill a GPU too; their parts meet in a workspace and are merged in the
same order. Both ways give a row the same bits, so the plan may choose between them freely.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Shapes: S sequences, Q query blocks, I items of one split, M merged tokens. All int32.

# Rows of the workspace: one for each token and split of the blocks that are split. With 64 heads
# of 128 columns it takes 68 MB.
MAX_PARTS = 2048
# A block is split where it holds more than this share of all keys to read.
_FAIR_SHARE = 256


class Cut(NamedTuple):
    """`query_tokens`: the most tokens of a block. `split`: keys of a split."""

    query_tokens: int
    split: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWork:
    """One step's plan for one `Cut`. Captured graphs own one of the greatest size: `of_limits`.

    - `counts_4`: how many rows of the next three count, after the number of blocks that are split.
    - `blocks_Q4`: (sequence, first row of T, tokens, position of the first); most keys first, so
      those that are split come first. Q <= max_tokens // query_tokens + max_sequences.
    - `parts_I6`: a block's four numbers, split, row of the workspace; I <= MAX_PARTS.
    - `merges_M4`: (row of T, position, workspace row of split 0, workspace rows from one split to
      the next) of each token of a block that is split; M <= MAX_PARTS // 2.
    """

    counts_4: Tensor
    blocks_Q4: Tensor
    parts_I6: Tensor
    merges_M4: Tensor

    @classmethod
    def of_limits(
        cls, cut: Cut, max_sequences: int, max_tokens: int, device: torch.device
    ) -> AttentionWork:
        """Room for every step within the limits, planned for none."""
        num_blocks = max_tokens // cut.query_tokens + max_sequences
        sizes = [(num_blocks, 4), (MAX_PARTS // 2, 4), (MAX_PARTS, 6)]
        length = 4 + sum(rows * columns for rows, columns in sizes)
        return _unpack(torch.zeros(length, dtype=torch.int32, device=device), sizes)

    def copy_(self, other: AttentionWork) -> None:
        """Take over a plan of the same cut."""
        for own, new in zip(self._tensors(), other._tensors(), strict=True):
            own[: len(new)].copy_(new, non_blocking=True)

    def to(self, device: torch.device) -> AttentionWork:
        """On the device by one copy, without waiting for it."""
        sizes = [(len(tensor), tensor.shape[1]) for tensor in self._tensors()[1:]]
        packed = torch.cat([tensor.flatten() for tensor in self._tensors()])
        if device.type == "cuda":
            packed = packed.pin_memory()
        return _unpack(packed.to(device, non_blocking=True), sizes)

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows of 24 bytes last: each begins at a multiple of 16, or kernels would be compiled anew
        for a plan that does not.
        """
        return self.counts_4, self.blocks_Q4, self.merges_M4, self.parts_I6


def _unpack(packed: Tensor, sizes: list[tuple[int, int]]) -> AttentionWork:
    lengths = [4, *(rows * columns for rows, columns in sizes)]
    counts_4, *rest = packed.split(lengths)
    blocks, merges, parts = (x.view(size) for x, size in zip(rest, sizes, strict=True))
    return AttentionWork(counts_4=counts_4, blocks_Q4=blocks, parts_I6=parts, merges_M4=merges)


def plan_attention(
    query_starts: Sequence[int], context_lens: Sequence[int], cut: Cut
) -> AttentionWork:
    """The plan on the CPU, each tensor as long as it must be. Sequences of context 0 are padding.

    Example: `plan_attention([0, 1, 4], [9, 3], Cut(query_tokens=2, split=4))`, a decode at position
    8 and a prompt of 3, gives blocks (0, 0, 1, 8), (1, 3, 1, 2) and (1, 1, 2, 0), of which the
    first is split into 3 parts, which are merged for row 0.
    """
    blocks_Q4 = _blocks(_array(query_starts), _array(context_lens), cut.query_tokens)
    keys_Q = blocks_Q4[:, 3] + blocks_Q4[:, 2]
    order_Q = (-keys_Q).argsort(kind="stable")
    blocks_Q4, keys_Q = blocks_Q4[order_Q], keys_Q[order_Q]
    splits_Q = (keys_Q + cut.split - 1) // cut.split
    ends_Q = (splits_Q * blocks_Q4[:, 2]).cumsum()
    wanted_Q = (splits_Q > 1) & (keys_Q * _FAIR_SHARE > keys_Q.sum()) & (ends_Q <= MAX_PARTS)
    # A prefix of the blocks: a later one of fewer tokens might fit where an earlier one did not.
    num_split = int(wanted_Q.cumprod().sum())
    parts_I6, merges_M4 = _parts(blocks_Q4[:num_split], splits_Q[:num_split])
    counts = [num_split, len(blocks_Q4), len(parts_I6), len(merges_M4)]
    return AttentionWork(
        counts_4=torch.tensor(counts, dtype=torch.int32),
        blocks_Q4=torch.from_numpy(blocks_Q4).int(),
        parts_I6=torch.from_numpy(parts_I6).int(),
        merges_M4=torch.from_numpy(merges_M4).int(),
    )


# Those of NumPy, which torch hands out: many small steps take them half the time.
_Array = Any


def _array(values: Sequence[int]) -> _Array:
    return torch.tensor(values, dtype=torch.int64).numpy()


def _table(num_rows: int, columns: Sequence[_Array]) -> _Array:
    table = torch.empty(num_rows, len(columns), dtype=torch.int64).numpy()
    for number, column in enumerate(columns):
        table[:, number] = column
    return table


def _blocks(starts_S1: _Array, lens_S: _Array, query_tokens: int) -> _Array:
    """[Q, 4], in the order of T."""
    tokens_S = starts_S1[1:] - starts_S1[:-1]
    counts_S = (tokens_S + query_tokens - 1) // query_tokens * (lens_S > 0)
    sequence_Q, first_Q = _counted(counts_S)
    first_Q = first_Q * query_tokens
    tokens_Q = (tokens_S[sequence_Q] - first_Q).clip(max=query_tokens)
    position_Q = (lens_S - tokens_S)[sequence_Q] + first_Q
    columns = (sequence_Q, starts_S1[sequence_Q] + first_Q, tokens_Q, position_Q)
    return _table(len(sequence_Q), columns)


def _parts(blocks_Q4: _Array, splits_Q: _Array) -> tuple[_Array, _Array]:
    """`parts_I6` and `merges_M4` of the blocks that are split."""
    tokens_Q = blocks_Q4[:, 2]
    rows_Q = splits_Q * tokens_Q
    slots_Q = rows_Q.cumsum() - rows_Q
    block_I, split_I = _counted(splits_Q)
    slot_I = slots_Q[block_I] + split_I * tokens_Q[block_I]
    parts_I6 = _table(len(block_I), (*blocks_Q4[block_I].T, split_I, slot_I))
    block_M, token_M = _counted(tokens_Q)
    _, row_M, stride_M, position_M = blocks_Q4[block_M].T
    columns = (row_M + token_M, position_M + token_M, slots_Q[block_M] + token_M, stride_M)
    return parts_I6, _table(len(block_M), columns)


def _counted(counts: _Array) -> tuple[_Array, _Array]:
    """Counts (2, 0, 3) -> whose (0, 0, 2, 2, 2), and which (0, 1, 0, 1, 2)."""
    owner = torch.arange(len(counts)).numpy().repeat(counts)
    return owner, torch.arange(len(owner)).numpy() - (counts.cumsum() - counts)[owner]
