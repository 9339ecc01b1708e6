"""Causal attention over paged keys and values in plain PyTorch: decode and prefill.

The online-softmax scheme of FlashAttention (Dao et al., 2022) over key tiles at fixed positions:
tile j holds positions [j * tile, (j + 1) * tile) of a sequence, whatever the chunk or the batch.
Every product has one of a few numbers of rows, all of which give a row the same bits (checked once
per shape, see `_row_counts`). A tile that a row may not see leaves its state untouched. So a row's
result depends on its query, its position and its keys alone: not on its company, on chunk borders,
on the lengths of others, or on how many heads share this rank. All of it in fp32.
"""

from __future__ import annotations

import bisect
import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_serve.context import LayerKV, StepContext

# Shapes: T tokens, S sequences, H heads, N kv heads, G = H / N query heads of one kv head,
# h head_dim, B blocks, s slots of a block, K keys of one tile, M query rows of one product.

KEY_TILE = 128
# Rows of the largest product: query tokens times the heads that share a kv head.
QUERY_ROWS = 256
_ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 64, 96, 128)
# Finite, so that a row without visible keys so far never computes inf - inf.
_NO_KEY_YET = -1e30


class _Rules(NamedTuple):
    """How scores become weights. `sinks_NG`: fp32."""

    scale: float
    window: int | None
    soft_cap: float | None
    sinks_NG: Tensor | None


def paged_attention_torch(
    q_THh: Tensor,
    kv: LayerKV,
    context: StepContext,
    *,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v over each token's own past -> [T, H, h] in q's dtype.

    The step's keys and values are in the pool already. `window`: a token sees itself and the
    `window` - 1 positions before it. `sinks_H`: a logit per head that joins the softmax's sum and
    has no value (gpt-oss). `soft_cap`: scores become cap * tanh(score / cap) (Gemma 2).
    """
    sinks_NG = None if sinks_H is None else sinks_H.float().view(kv.keys_BsNh.shape[2], -1)
    rules = _Rules(scale * kv.key_scale, window, soft_cap, sinks_NG)
    out_THh = torch.empty_like(q_THh)
    decodes = context.num_decodes
    if decodes:
        out_THh[:decodes] = _decode(q_THh[:decodes], kv, context, rules)
    for sequence in range(decodes, context.num_sequences):
        start, stop = context.query_starts[sequence], context.query_starts[sequence + 1]
        out_THh[start:stop] = _prefill(q_THh[start:stop], kv, context, sequence, rules)
    return out_THh


class _State(NamedTuple):
    """Running softmax of [b, M] rows: maximum, sum, and the weighted values [b, M, h]."""

    maximum: Tensor
    total: Tensor
    values: Tensor

    @classmethod
    def fresh(cls, q_bMh: Tensor, sinks_bM: Tensor | None) -> _State:
        """A sink is what the rows have seen before any key."""
        if sinks_bM is None:
            maximum = q_bMh.new_full(q_bMh.shape[:2], _NO_KEY_YET)
            return cls(maximum, torch.zeros_like(maximum), torch.zeros_like(q_bMh))
        maximum = F.pad(sinks_bM, (0, q_bMh.shape[1] - sinks_bM.shape[1]))
        return cls(maximum, torch.ones_like(maximum), torch.zeros_like(q_bMh))

    def first(self, count: int) -> _State:
        return _State(self.maximum[:count], self.total[:count], self.values[:count])

    def add_tile(
        self,
        q_bMh: Tensor,
        k_bKh: Tensor,
        v_bKh: Tensor,
        seen: Tensor | None,
        soft_cap: float | None,
    ) -> None:
        """Take in one key tile. `seen` [b or 1, M or 1, K] bool: what each row may look at."""
        scores = torch.bmm(q_bMh, k_bKh.transpose(1, 2))
        if soft_cap is not None:
            scores.div_(soft_cap).tanh_().mul_(soft_cap)
        if seen is not None:
            scores.masked_fill_(~seen, float("-inf"))
        maximum = torch.maximum(self.maximum, scores.amax(-1))
        keep = torch.exp(self.maximum - maximum)
        weights = scores.sub_(maximum[..., None]).exp_()
        self.total.mul_(keep).add_(weights.sum(-1))
        self.values.mul_(keep[..., None]).add_(torch.bmm(weights, v_bKh))
        self.maximum.copy_(maximum)

    def result(self, value_scale: float) -> Tensor:
        """Zero where a row saw no key; any other row's sum is at least 1, its largest weight."""
        return self.values / self.total.clamp(min=1.0)[..., None] * value_scale


def _decode(q_SHh: Tensor, kv: LayerKV, context: StepContext, rules: _Rules) -> Tensor:
    """One query a sequence, all sequences at once, longest first so that the short drop out."""
    _, num_heads, head_dim = q_SHh.shape
    num_kv_heads = kv.keys_BsNh.shape[2]
    group, tile = num_heads // num_kv_heads, _key_tile(context.block_size)
    rows = _rows_for(group, head_dim, tile)
    order_S, lens, lens_S, tables_SB = context.decodes
    window, sinks_NG = rules.window, rules.sinks_NG

    q_bMh = (q_SHh[order_S].float() * rules.scale).view(-1, group, head_dim)
    q_bMh = F.pad(q_bMh, (0, 0, 0, rows - group))
    state = _State.fresh(q_bMh, None if sinks_NG is None else sinks_NG.repeat(len(lens), 1))
    first = 0 if window is None else max(0, lens[-1] - window) // tile * tile
    for start in range(first, lens[0], tile):
        active = bisect.bisect_left(lens, -start, key=lambda n: -n)
        seen_SK = _seen(lens_S[:active] - 1, start, tile, window)
        k_SNKh, v_SNKh = _gather(kv, tables_SB[:active], start, tile)
        # An unwritten slot may hold anything, even NaN, which a weight of 0 would not silence.
        v_SNKh.masked_fill_(~seen_SK[:, None, :, None], 0.0)
        batch = active * num_kv_heads
        state.first(batch).add_tile(
            q_bMh[:batch],
            k_SNKh.flatten(0, 1),
            v_SNKh.flatten(0, 1),
            seen_SK.repeat_interleave(num_kv_heads, 0)[:, None],
            rules.soft_cap,
        )
    out = torch.empty_like(q_SHh)
    result = state.result(kv.value_scale)[:, :group]
    out[order_S] = result.reshape(q_SHh.shape).to(q_SHh.dtype)
    return out


def _prefill(
    q_THh: Tensor, kv: LayerKV, context: StepContext, sequence: int, rules: _Rules
) -> Tensor:
    """The chunk of one sequence, in tiles of up to QUERY_ROWS rows; T is its length here."""
    num_tokens, num_heads, head_dim = q_THh.shape
    num_kv_heads = kv.keys_BsNh.shape[2]
    group, tile = num_heads // num_kv_heads, _key_tile(context.block_size)
    length = context.context_lens[sequence]
    table_SB = context.block_tables_SB[sequence : sequence + 1]
    span = -(-length // tile) * tile
    k_NKh, v_NKh = (x[0] for x in _gather(kv, table_SB, 0, span))
    v_NKh[:, length:] = 0.0
    out = torch.empty_like(q_THh)
    assert group <= QUERY_ROWS
    step, window = QUERY_ROWS // group, rules.window
    for row in range(0, num_tokens, step):
        q = q_THh[row : row + step].float() * rules.scale
        count = q.shape[0]
        rows = _rows_for(count * group, head_dim, tile)
        q_NMh = q.unflatten(1, (num_kv_heads, group)).transpose(0, 1).flatten(1, 2)
        q_NMh = F.pad(q_NMh, (0, 0, 0, rows - count * group))
        sinks_NG = rules.sinks_NG
        state = _State.fresh(q_NMh, None if sinks_NG is None else sinks_NG.repeat(1, count))
        position = length - num_tokens + row
        # Padding rows take the positions that would come next.
        positions_M = position + torch.arange(rows, device=q.device) // group
        first = 0 if window is None else max(0, position - window + 1) // tile * tile
        for start in range(first, position + count, tile):
            inside = start + tile <= position + 1 and window is None
            seen = None if inside else _seen(positions_M, start, tile, window)
            keys = slice(start, start + tile)
            state.add_tile(q_NMh, k_NKh[:, keys], v_NKh[:, keys], seen, rules.soft_cap)
        result = state.result(kv.value_scale)[:, : count * group].unflatten(1, (count, group))
        out[row : row + count] = result.transpose(0, 1).flatten(1, 2).to(q_THh.dtype)
    return out


def _seen(positions: Tensor, start: int, tile: int, window: int | None) -> Tensor:
    """[rows, K] bool: may the query at `positions` look at key positions start .. start + tile."""
    keys_K = torch.arange(start, start + tile, device=positions.device)
    seen = keys_K <= positions[:, None]
    if window is not None:
        seen &= keys_K > positions[:, None] - window
    return seen


def _gather(kv: LayerKV, tables_SB: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values of positions start .. start + length as fp32 [S, N, length, h], contiguous.

    Positions past a table's end repeat block 0: the caller masks them.
    """
    block_size = kv.keys_BsNh.shape[1]
    first, last = start // block_size, (start + length) // block_size
    blocks_SB = tables_SB[:, first:last]
    blocks_SB = F.pad(blocks_SB, (0, last - first - blocks_SB.shape[1]))
    num_sequences, num_blocks = blocks_SB.shape
    gathered = []
    for pool in (kv.keys_BsNh, kv.values_BsNh):
        rows = pool.index_select(0, blocks_SB.flatten())
        rows = rows.view(num_sequences, num_blocks * block_size, *pool.shape[2:]).transpose(1, 2)
        out = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
        gathered.append(out.copy_(rows))
    return gathered[0], gathered[1]


def _key_tile(block_size: int) -> int:
    """Whole blocks, at least KEY_TILE keys where blocks are smaller than that."""
    return block_size * max(1, KEY_TILE // block_size)


def _rows_for(num_rows: int, head_dim: int, tile: int) -> int:
    """The least row count of a product that takes the rows."""
    return next(
        rows for rows in _row_counts(head_dim, tile, torch.get_num_threads()) if rows >= num_rows
    )


@functools.cache
def _row_counts(head_dim: int, tile: int, threads: int) -> tuple[int, ...]:
    """Row counts that give a row the bits that QUERY_ROWS rows would, ascending; the last is that.

    BLAS may sum in another order for few rows. Found by trying, on random data, alone and in
    company.
    """
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(3, QUERY_ROWS, head_dim, generator=rng)
    k = torch.randn(3, tile, head_dim, generator=rng)
    v = torch.randn(3, tile, head_dim, generator=rng)
    weights = torch.rand(3, QUERY_ROWS, tile, generator=rng)
    scores, values = torch.bmm(q, k.transpose(1, 2)), torch.bmm(weights, v)

    def agrees(rows: int) -> bool:
        return all(
            torch.equal(torch.bmm(q[:b, :rows].contiguous(), k[:b].mT), scores[:b, :rows])
            and torch.equal(torch.bmm(weights[:b, :rows].contiguous(), v[:b]), values[:b, :rows])
            for b in (1, 3)
        )

    return (*(rows for rows in _ROW_COUNTS if agrees(rows)), QUERY_ROWS)
