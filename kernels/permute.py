"""Sort (token, slot) pairs by expert, so that each expert's rows stand together."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_serve.kernels.jit import by_device, launch, tl, triton
from moe_serve.kernels.row_tiles import PermuteTiles, permute_tiles, power_of_two

# Shapes: T tokens, K top-k, E experts, R rows: the pairs that have an expert here; P all pairs,
# B blocks of them.


class Permutation(NamedTuple):
    """`order_R[r]` is the flat (token * K + slot) index that row r came from; `counts_E` sums to R.

    `inverse_R` is its inverse: flat index -> row. Pairs without an expert stand behind the R rows
    in both, which are then T * K long.
    """

    order_R: Tensor
    inverse_R: Tensor
    counts_E: Tensor


def permute_torch(ids_TK: Tensor, num_experts: int) -> Permutation:
    """Stable: rows of one expert keep the order of their tokens. An id of -1 is no expert.

    Example, K = 2, three experts, ids [[2, 0], [0, 1]]: flat experts are 2 0 0 1, so
    order is 1 2 3 0, inverse 3 0 1 2, counts 2 1 1.
    """
    flat_R = ids_TK.flatten().long()
    flat_R = flat_R.where(flat_R >= 0, num_experts)
    order_R = flat_R.argsort(stable=True)
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(order_R.numel(), device=order_R.device)
    return Permutation(order_R, inverse_R, count_ids(flat_R, num_experts + 1)[:num_experts])


def count_ids(ids_R: Tensor, num_ids: int) -> Tensor:
    """How often each of 0 .. num_ids - 1 occurs, int64. Unlike `bincount`, no sync on a GPU."""
    ids_R = ids_R.long()
    return ids_R.new_zeros(num_ids).scatter_add_(0, ids_R, torch.ones_like(ids_R))


def permute_triton(ids_TK: Tensor, num_experts: int) -> Permutation:
    ids_P = ids_TK.flatten()
    order_P = torch.empty_like(ids_P, dtype=torch.int64)
    out = Permutation(order_P, torch.empty_like(order_P), order_P.new_empty(num_experts))
    tiles = permute_tiles(ids_P.numel(), num_experts)
    if not ids_P.numel():
        return out._replace(counts_E=out.counts_E.zero_())
    if tiles.blocks == 1:
        _place_at_once(ids_P, out, tiles)
    else:
        _place_by_blocks(ids_P, out, tiles)
    return out


permute = by_device(permute_triton, permute_torch)


def _place_at_once(ids_P: Tensor, out: Permutation, tiles: PermuteTiles) -> None:
    """Every program compares its items, or its experts, with all items."""
    num_items, num_experts = ids_P.numel(), out.counts_E.numel()
    num_placing = triton.cdiv(num_items, tiles.items)
    launch(
        _place_at_once_kernel,
        (num_placing + triton.cdiv(num_experts, tiles.experts),),
        ids_P,
        *out,
        num_items,
        num_experts,
        num_placing,
        ITEMS=tiles.items,
        CHUNK=tiles.chunk,
        EXPERTS=tiles.experts,
        num_warps=4,
    )


def _place_by_blocks(ids_P: Tensor, out: Permutation, tiles: PermuteTiles) -> None:
    """Counting sort: count each block's items per expert, sum up over blocks, place."""
    num_items, num_experts = ids_P.numel(), out.counts_E.numel()
    # Items without an expert are those of one more.
    before_BE = ids_P.new_empty(tiles.blocks, num_experts + 1, dtype=torch.int32)
    expert_blocks = triton.cdiv(num_experts + 1, tiles.experts)
    launch(
        _count_kernel,
        (tiles.blocks, expert_blocks),
        ids_P,
        before_BE,
        num_items,
        num_experts,
        ITEMS=tiles.items,
        CHUNK=tiles.chunk,
        EXPERTS=tiles.experts,
        num_warps=4,
    )
    launch(
        _sum_before_kernel,
        (expert_blocks,),
        before_BE,
        out.counts_E,
        tiles.blocks,
        num_experts,
        CHUNK=tiles.chunk,
        EXPERTS=tiles.experts,
        num_warps=4,
    )
    launch(
        _place_kernel,
        (tiles.blocks,),
        ids_P,
        before_BE,
        *out,
        num_items,
        num_experts,
        ITEMS=tiles.items,
        CHUNK=tiles.chunk,
        COUNTS=power_of_two(num_experts),
        num_warps=8,
    )


@triton.jit
def _load_ids(ids_ptr, items, stop, num_experts):
    """int32; none becomes one more than the last expert, and what lies beyond `stop` two more."""
    ids = tl.load(ids_ptr + items, mask=items < stop, other=0).to(tl.int32)
    ids = tl.where((ids < 0) | (ids > num_experts), num_experts, ids)
    return tl.where(items < stop, ids, num_experts + 1)


@triton.jit
def _count_less(ids_ptr, ids, items, start, stop, num_experts, CHUNK: tl.constexpr):
    """How many of the items `start` .. `stop` come before each of `items`, by (id, item)."""
    less = tl.zeros(ids.shape, tl.int32)
    for first in range(start, stop, CHUNK):
        others = first + tl.arange(0, CHUNK)
        other_ids = _load_ids(ids_ptr, others, stop, num_experts)[None, :]
        is_less = other_ids < ids[:, None]
        is_less |= (other_ids == ids[:, None]) & (others[None, :] < items[:, None])
        less += tl.sum(is_less.to(tl.int32), axis=1)
    return less


@triton.jit
def _count_equal(ids_ptr, experts, start, stop, num_experts, CHUNK: tl.constexpr):
    """How many of the items `start` .. `stop` go to each of `experts`."""
    equal = tl.zeros(experts.shape, tl.int32)
    for first in range(start, stop, CHUNK):
        ids = _load_ids(ids_ptr, first + tl.arange(0, CHUNK), stop, num_experts)
        equal += tl.sum((ids[None, :] == experts[:, None]).to(tl.int32), axis=1)
    return equal


@triton.jit(do_not_specialize=["num_items", "num_placing"])
def _place_at_once_kernel(
    ids_ptr,
    order_ptr,
    inverse_ptr,
    counts_ptr,
    num_items,
    num_experts,
    num_placing,
    ITEMS: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    program = tl.program_id(0)
    if program < num_placing:
        items = program * ITEMS + tl.arange(0, ITEMS)
        is_item = items < num_items
        ids = _load_ids(ids_ptr, items, num_items, num_experts)
        place = _count_less(ids_ptr, ids, items, 0, num_items, num_experts, CHUNK)
        tl.store(inverse_ptr + items, place.to(tl.int64), mask=is_item)
        tl.store(order_ptr + place, items.to(tl.int64), mask=is_item)
    else:
        experts = (program - num_placing) * EXPERTS + tl.arange(0, EXPERTS)
        counts = _count_equal(ids_ptr, experts, 0, num_items, num_experts, CHUNK)
        tl.store(counts_ptr + experts, counts.to(tl.int64), mask=experts < num_experts)


@triton.jit(do_not_specialize=["num_items"])
def _count_kernel(
    ids_ptr,
    counts_ptr,
    num_items,
    num_experts,
    ITEMS: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    block = tl.program_id(0)
    experts = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    start = block * ITEMS
    stop = tl.minimum(start + ITEMS, num_items)
    counts = _count_equal(ids_ptr, experts, start, stop, num_experts, CHUNK)
    at = block.to(tl.int64) * (num_experts + 1) + experts
    tl.store(counts_ptr + at, counts, mask=experts <= num_experts)


@triton.jit(do_not_specialize=["num_blocks"])
def _sum_before_kernel(
    before_ptr,
    counts_ptr,
    num_blocks,
    num_experts,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """In place: what a block has of each expert becomes what the blocks before it have."""
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, num_blocks, CHUNK):
        blocks = first + tl.arange(0, CHUNK)
        mask = (blocks < num_blocks)[:, None] & (experts <= num_experts)[None, :]
        at = before_ptr + blocks.to(tl.int64)[:, None] * (num_experts + 1) + experts[None, :]
        counts = tl.load(at, mask=mask, other=0)
        up_to = tl.cumsum(counts, axis=0) + total[None, :]
        tl.store(at, up_to - counts, mask=mask)
        total += tl.sum(counts, axis=0)
    tl.store(counts_ptr + experts, total.to(tl.int64), mask=experts < num_experts)


@triton.jit(do_not_specialize=["num_items"])
def _place_kernel(
    ids_ptr,
    before_ptr,
    order_ptr,
    inverse_ptr,
    counts_ptr,
    num_items,
    num_experts,
    ITEMS: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTS: tl.constexpr,
):
    block = tl.program_id(0)
    items = block * ITEMS + tl.arange(0, ITEMS)
    is_item = items < num_items
    ids = _load_ids(ids_ptr, items, num_items, num_experts)
    place = tl.load(before_ptr + block.to(tl.int64) * (num_experts + 1) + ids, mask=is_item)
    stop = tl.minimum(block * ITEMS + ITEMS, num_items)
    # Of its own expert, before it in its block.
    for first in range(block * ITEMS, stop, CHUNK):
        others = first + tl.arange(0, CHUNK)
        other_ids = _load_ids(ids_ptr, others, stop, num_experts)
        is_before = (other_ids[None, :] == ids[:, None]) & (others[None, :] < items[:, None])
        place += tl.sum(is_before.to(tl.int32), axis=1)
    # Of the experts before its own.
    for first in range(0, COUNTS, CHUNK):
        experts = first + tl.arange(0, CHUNK)
        counts = tl.load(counts_ptr + experts, mask=experts < num_experts, other=0).to(tl.int32)
        place += tl.sum(tl.where(experts[None, :] < ids[:, None], counts[None, :], 0), axis=1)
    tl.store(inverse_ptr + items, place.to(tl.int64), mask=is_item)
    tl.store(order_ptr + place, items.to(tl.int64), mask=is_item)
