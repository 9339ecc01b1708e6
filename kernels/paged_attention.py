"""Causal attention over paged keys and values on a GPU, one kernel family for decode and prefill.

The online softmax of FlashAttention (Dao et al., 2022), with keys cut at fixed positions as in its
"flash-decoding": split i of a sequence holds positions [i * split, (i + 1) * split), whatever the
batch. Each split starts afresh, and the splits of a row are merged in ascending order by one
formula, either by the program that walks them all or by a kernel of their own; the plan of the step
says which (attention_work.py). Every product has the same number of rows: query tokens times the
heads that share a kv head, and padding. So a row's bits depend on its query, its position and its
keys alone.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_serve.context import LayerKV, StepContext
from moe_serve.kernels.attention_tiles import AttentionTiles, attention_tiles
from moe_serve.kernels.attention_work import MAX_PARTS, AttentionWork
from moe_serve.kernels.cpu.attention import paged_attention_cpu
from moe_serve.kernels.jit import by_device, launch, target_of, tl, triton
from moe_serve.kernels.kv_store import as_bytes
from moe_serve.kernels.online_softmax import (
    add_keys,
    attended,
    merge,
    no_keys,
    nothing_but_sinks,
)
from moe_serve.kernels.paged_addresses import load_block, load_tile, place_rows
from moe_serve.kernels.paged_attention_twin import paged_attention_torch
from moe_serve.kernels.row_tiles import power_of_two

# Shapes: T tokens, H heads, N kv heads, h head_dim, B blocks, s slots of a block, P rows of the
# workspace.

_LOG2_E = math.log2(math.e)
# Heads that one program merges.
_MERGED_HEADS = 4


def paged_attention_triton(
    q_THh: Tensor,
    kv: LayerKV,
    context: StepContext,
    *,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    num_tokens, num_heads, head_dim = q_THh.shape
    num_kv_heads = kv.keys_BsNh.shape[2]
    assert num_heads % num_kv_heads == 0 and q_THh.stride(2) == 1
    assert kv.keys_BsNh.stride() == kv.values_BsNh.stride() and kv.keys_BsNh.stride(3) == 1
    # Rows of padded sequences have no work and hold anything: no row that counts looks at them.
    out_THh = torch.empty(q_THh.shape, dtype=q_THh.dtype, device=q_THh.device)
    if num_tokens == 0:
        return out_THh
    tiles = attention_tiles(target_of(q_THh), head_dim, q_THh.element_size())
    work = context.work(tiles.cut(num_heads // num_kv_heads))
    call = _Call.of(q_THh, kv, context.block_tables_SB, tiles, window)
    ends = (None if sinks_H is None else sinks_H.contiguous(), kv.value_scale)
    scales = _scales(scale * kv.key_scale, soft_cap)
    # Little of a short window would be left to share.
    is_split = window is None or window > 2 * tiles.split
    if is_split:
        _attend_by_splits(call, work, scales, out_THh, ends)
    call.launch(_whole_kernel, work.blocks_Q4, work, scales, out_THh, *ends, SKIPS_SPLIT=is_split)
    return out_THh


paged_attention = by_device(paged_attention_triton, paged_attention_torch, paged_attention_cpu)


class _Scales(NamedTuple):
    """What scores are multiplied by: before tanh, 0 without a soft cap; and to powers of two."""

    first: float
    second: float


def _scales(scale: float, soft_cap: float | None) -> _Scales:
    if soft_cap is None:
        return _Scales(0.0, scale * _LOG2_E)
    return _Scales(2.0 * scale * _LOG2_E / soft_cap, soft_cap * _LOG2_E)


class _Call(NamedTuple):
    """What both kernels that attend are given."""

    inputs: tuple[Tensor, ...]
    strides: tuple[int, ...]
    num_programs: int
    # Kv heads times the parts of a group that has more heads than a product has rows.
    num_heads: int
    constants: dict[str, int]

    @classmethod
    def of(
        cls,
        q_THh: Tensor,
        kv: LayerKV,
        tables_SB: Tensor,
        tiles: AttentionTiles,
        window: int | None,
    ) -> _Call:
        _, num_heads, head_dim = q_THh.shape
        _, block_size, num_kv_heads, _ = kv.keys_BsNh.shape
        target, group = target_of(q_THh), num_heads // num_kv_heads
        pools = [kv.keys_BsNh, kv.values_BsNh]
        if not target.has_fp8:
            pools = [as_bytes(pool) for pool in pools]
        return cls(
            inputs=(q_THh, *pools, tables_SB),
            strides=(*q_THh.stride()[:2], *pools[0].stride()[:3], tables_SB.stride(0)),
            num_programs=target.num_processors * tiles.programs,
            num_heads=num_kv_heads * triton.cdiv(group, tiles.rows),
            constants={
                "GROUP": group,
                "NUM_HEADS": num_heads,
                "HEAD_DIM": head_dim,
                "COLUMNS": max(16, power_of_two(head_dim)),
                "BLOCK_SIZE": block_size,
                "WINDOW": window or 0,
                "ROWS": tiles.rows,
                "KEYS": tiles.keys,
                "SPLIT": tiles.split,
                "STAGES": tiles.num_stages,
                "num_warps": tiles.num_warps,
            },
        )

    def launch(
        self,
        kernel: Any,
        items: Tensor,
        work: AttentionWork,
        scales: _Scales,
        *rest: Any,
        **more: Any,
    ) -> None:
        """As many programs as fit on the GPU, that share `items` for each head."""
        num_items = items.shape[0] * self.num_heads
        launch(
            kernel,
            (min(self.num_programs, num_items),),
            *self.inputs,
            *self.strides,
            work.counts_4,
            items,
            *scales,
            *rest,
            **self.constants,
            HAS_CAP=scales.first != 0.0,
            **more,
        )


def _attend_by_splits(
    call: _Call,
    work: AttentionWork,
    scales: _Scales,
    out_THh: Tensor,
    ends: tuple[Tensor | None, float],
) -> None:
    """The blocks that the plan splits: a program a split, then one that merges a token's splits."""
    _, num_heads, head_dim = out_THh.shape
    if not len(work.parts_I6):
        return
    states_2PH = out_THh.new_empty(2, MAX_PARTS, num_heads, dtype=torch.float32)
    values_PHh = out_THh.new_empty(MAX_PARTS, num_heads, head_dim, dtype=torch.float32)
    call.launch(_split_kernel, work.parts_I6, work, scales, states_2PH, values_PHh, PARTS=MAX_PARTS)
    num_items = work.merges_M4.shape[0] * triton.cdiv(num_heads, _MERGED_HEADS)
    names = ("NUM_HEADS", "HEAD_DIM", "COLUMNS", "WINDOW", "SPLIT")
    launch(
        _merge_kernel,
        (min(call.num_programs * 4, num_items),),
        states_2PH,
        values_PHh,
        work.counts_4,
        work.merges_M4,
        out_THh,
        *ends,
        **{name: call.constants[name] for name in names},
        PARTS=MAX_PARTS,
        HEADS=_MERGED_HEADS,
        num_warps=4,
    )


@triton.jit
def _add_tile(
    maximum, total, values, q, start, low, high, position, count, tokens,
    table_ptr, k_ptr, v_ptr, block_stride, slot_stride, first_scale, scale,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """The state of a block's rows after the keys of one more tile: the same for both kernels."""
    k, v = load_tile(
        start, low, high, table_ptr, k_ptr, v_ptr, block_stride, slot_stride,
        HEAD_DIM, COLUMNS, BLOCK_SIZE, KEYS,
    )  # fmt: skip
    is_edge = start + KEYS > position + 1
    if WINDOW > 0:
        is_edge |= start < position + count - WINDOW
    return add_keys(
        maximum, total, values, q, k, v, first_scale, scale,
        position + tokens, start, is_edge, WINDOW, HAS_CAP,
    )  # fmt: skip


# The width of the tables changes from step to step.
@triton.jit(do_not_specialize=["table_stride"])
def _split_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr,
    q_stride, q_head_stride, block_stride, slot_stride, head_stride, table_stride,
    counts_ptr, items_ptr, first_scale, scale, states_ptr, values_ptr,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A block's state after one split alone, into its rows of the workspace."""
    CHUNKS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    NUM_UNITS: tl.constexpr = NUM_HEADS // GROUP * CHUNKS
    columns = tl.arange(0, COLUMNS)
    inside_head = columns < HEAD_DIM
    num_units = tl.load(counts_ptr + 2) * NUM_UNITS
    for unit in tl.range(tl.program_id(0), num_units, tl.num_programs(0)):
        item_ptr = items_ptr + unit // NUM_UNITS * 6
        sequence, row, count, position = load_block(item_ptr)
        split = tl.load(item_ptr + 4)
        slot = tl.load(item_ptr + 5)
        tokens, heads, valid = place_rows(unit % NUM_UNITS, count, GROUP, ROWS, CHUNKS)
        mask = valid[:, None] & inside_head[None, :]
        q_rows = (row + tokens).to(tl.int64) * q_stride + heads * q_head_stride
        q = tl.load(q_ptr + q_rows[:, None] + columns[None, :], mask=mask, other=0.0)
        kv_head = unit % NUM_UNITS // CHUNKS * head_stride
        table = table_ptr + sequence.to(tl.int64) * table_stride

        low = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else 0
        high = tl.minimum(position + count, split * SPLIT + SPLIT)
        maximum, total, values = no_keys(ROWS, COLUMNS)
        first_tile = tl.maximum(split * SPLIT, low // KEYS * KEYS)
        for start in tl.range(first_tile, high, KEYS, num_stages=STAGES, disable_licm=True):
            maximum, total, values = _add_tile(
                maximum, total, values, q, start, low, high, position, count, tokens,
                table, k_ptr + kv_head, v_ptr + kv_head, block_stride, slot_stride,
                first_scale, scale, HEAD_DIM, COLUMNS, BLOCK_SIZE, KEYS, WINDOW, HAS_CAP,
            )  # fmt: skip

        parts = (slot + tokens) * NUM_HEADS + heads
        tl.store(states_ptr + parts, maximum, mask=valid)
        tl.store(states_ptr + PARTS * NUM_HEADS + parts, total, mask=valid)
        offsets = parts.to(tl.int64)[:, None] * HEAD_DIM + columns[None, :]
        tl.store(values_ptr + offsets, values, mask=mask)


@triton.jit(do_not_specialize=["table_stride"])
def _whole_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr,
    q_stride, q_head_stride, block_stride, slot_stride, head_stride, table_stride,
    counts_ptr, items_ptr, first_scale, scale, out_ptr, sinks_ptr, value_scale,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, SKIPS_SPLIT: tl.constexpr,
):  # fmt: skip
    """All splits of a block, one after the other."""
    CHUNKS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    NUM_UNITS: tl.constexpr = NUM_HEADS // GROUP * CHUNKS
    columns = tl.arange(0, COLUMNS)
    inside_head = columns < HEAD_DIM
    first_unit = tl.load(counts_ptr) * NUM_UNITS if SKIPS_SPLIT else 0
    num_units = tl.load(counts_ptr + 1) * NUM_UNITS
    for unit in tl.range(first_unit + tl.program_id(0), num_units, tl.num_programs(0)):
        sequence, row, count, position = load_block(items_ptr + unit // NUM_UNITS * 4)
        tokens, heads, valid = place_rows(unit % NUM_UNITS, count, GROUP, ROWS, CHUNKS)
        mask = valid[:, None] & inside_head[None, :]
        q_rows = (row + tokens).to(tl.int64) * q_stride + heads * q_head_stride
        q = tl.load(q_ptr + q_rows[:, None] + columns[None, :], mask=mask, other=0.0)
        kv_head = unit % NUM_UNITS // CHUNKS * head_stride
        table = table_ptr + sequence.to(tl.int64) * table_stride

        low = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else 0
        high = position + count
        all_maximum, all_total, all_values = nothing_but_sinks(
            sinks_ptr, heads, valid, ROWS, COLUMNS
        )
        maximum, total, values = no_keys(ROWS, COLUMNS)
        for start in tl.range(low // KEYS * KEYS, high, KEYS, num_stages=STAGES, disable_licm=True):
            maximum, total, values = _add_tile(
                maximum, total, values, q, start, low, high, position, count, tokens,
                table, k_ptr + kv_head, v_ptr + kv_head, block_stride, slot_stride,
                first_scale, scale, HEAD_DIM, COLUMNS, BLOCK_SIZE, KEYS, WINDOW, HAS_CAP,
            )  # fmt: skip
            if (start + KEYS) % SPLIT == 0:
                all_maximum, all_total, all_values = merge(
                    all_maximum, all_total, all_values, maximum, total, values
                )
                maximum, total, values = no_keys(ROWS, COLUMNS)
        all_maximum, all_total, all_values = merge(
            all_maximum, all_total, all_values, maximum, total, values
        )

        # The same numbers, from memory once more: else they are kept in registers all the while.
        unit += tl.load(counts_ptr + 1) * NUM_UNITS - num_units
        sequence, row, count, position = load_block(items_ptr + unit // NUM_UNITS * 4)
        tokens, heads, valid = place_rows(unit % NUM_UNITS, count, GROUP, ROWS, CHUNKS)
        mask = valid[:, None] & inside_head[None, :]
        rows = (row + tokens).to(tl.int64) * NUM_HEADS + heads
        out = attended(all_total, all_values, value_scale).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + rows[:, None] * HEAD_DIM + columns[None, :], out, mask=mask)


@triton.jit
def _merge_kernel(
    states_ptr, values_ptr, counts_ptr, items_ptr, out_ptr, sinks_ptr, value_scale,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, WINDOW: tl.constexpr,
    SPLIT: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The splits of a token, in ascending order."""
    NUM_UNITS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    columns = tl.arange(0, COLUMNS)
    num_units = tl.load(counts_ptr + 3) * NUM_UNITS
    for unit in tl.range(tl.program_id(0), num_units, tl.num_programs(0)):
        row, position, slot, stride = load_block(items_ptr + unit // NUM_UNITS * 4)
        heads = unit % NUM_UNITS * HEADS + tl.arange(0, HEADS)
        valid = heads < NUM_HEADS
        mask = valid[:, None] & (columns < HEAD_DIM)[None, :]
        maximum, total, values = nothing_but_sinks(sinks_ptr, heads, valid, HEADS, COLUMNS)
        first = tl.maximum(position - WINDOW + 1, 0) // SPLIT if WINDOW > 0 else 0
        for split in tl.range(first, position // SPLIT + 1, num_stages=3):
            parts = (slot + split * stride) * NUM_HEADS + heads
            offsets = parts.to(tl.int64)[:, None] * HEAD_DIM + columns[None, :]
            maximum, total, values = merge(
                maximum,
                total,
                values,
                tl.load(states_ptr + parts, mask=valid, other=0.0),
                tl.load(states_ptr + PARTS * NUM_HEADS + parts, mask=valid, other=1.0),
                tl.load(values_ptr + offsets, mask=mask, other=0.0),
            )
        rows = row.to(tl.int64) * NUM_HEADS + heads
        out = attended(total, values, value_scale).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + rows[:, None] * HEAD_DIM + columns[None, :], out, mask=mask)
