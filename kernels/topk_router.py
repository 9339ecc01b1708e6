"""Router scores to the top-k experts of each token, in fp32 throughout."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_serve.kernels.cpu.router import topk_router_cpu
from moe_serve.kernels.elementwise import sigmoid
from moe_serve.kernels.jit import by_device, launch, tl, triton
from moe_serve.kernels.ordered_bits import ordered_bits
from moe_serve.kernels.row_tiles import power_of_two, router_tiles

# Shapes: T tokens, E experts, K top-k, G groups, C phases.

SCORES = ("softmax", "sigmoid")
# Below the key of any number.
NO_KEY = tl.constexpr(-(2**62))


def topk_router_torch(
    logits_TE: Tensor,
    top_k: int,
    *,
    score: str,
    renormalize: bool,
    scale: float = 1.0,
    correction_bias_E: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    load_CE: Tensor | None = None,
    phases_T: Tensor | None = None,
    num_valid_1: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """-> ids [T, K] int64 (best first), weights [T, K] fp32. T = 0 is fine.

    `score` "softmax" or "sigmoid" over all experts. The correction bias selects and never weighs
    (DeepSeek-V3). With groups, only experts of the `top_groups` best groups may be chosen; a group
    is worth the sum of its two best biased scores (its best one, without a bias).
    `renormalize` divides the chosen weights by their sum; `scale` multiplies them at the end.
    Softmax over the chosen logits alone (gpt-oss) is softmax, renormalised. Equal scores, and
    groups of equal worth, rank by lower id. Rows with NaN get some K different experts.

    `load_CE` int64 grows by one for each token and slot, in the token's row: `phases_T` int32,
    0 without it. `num_valid_1`: rows from there on are padding: their ids are -1, their weights 0,
    and nothing counts them.
    """
    _check(score, logits_TE.shape[1], num_groups)
    scores_TE = logits_TE.float().softmax(-1) if score == "softmax" else sigmoid(logits_TE)
    choice_TE = scores_TE if correction_bias_E is None else scores_TE + correction_bias_E.float()
    if top_groups < num_groups:
        best = 1 if correction_bias_E is None else 2
        choice_TE = _mask_groups(choice_TE, num_groups, top_groups, best)
    ids_TK = _topk_lowest_id_first(choice_TE, top_k)
    weights_TK = scores_TE.gather(1, ids_TK)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    if scale != 1.0:
        weights_TK = weights_TK * scale
    chosen_TK, times_TK = ids_TK, torch.ones_like(ids_TK)
    if num_valid_1 is not None:
        is_valid_T1 = torch.arange(len(ids_TK), device=ids_TK.device)[:, None] < num_valid_1
        times_TK = times_TK * is_valid_T1
        ids_TK, weights_TK = ids_TK.where(is_valid_T1, -1), weights_TK.where(is_valid_T1, 0.0)
    if load_CE is not None:
        if phases_T is not None:
            chosen_TK = chosen_TK + phases_T[:, None] * load_CE.shape[1]
        load_CE.view(-1).scatter_add_(0, chosen_TK.flatten(), times_TK.flatten())
    return ids_TK, weights_TK


def _check(score: str, num_experts: int, num_groups: int) -> None:
    if score not in SCORES:
        raise ValueError(f"unknown router score {score!r}")
    if num_experts % num_groups:
        raise ValueError(f"{num_experts} experts do not divide into {num_groups} groups")


def _mask_groups(choice_TE: Tensor, num_groups: int, top_groups: int, best: int) -> Tensor:
    grouped_TGe = choice_TE.unflatten(-1, (num_groups, -1))
    # A group may hold a single expert in small models.
    best = min(best, grouped_TGe.shape[-1])
    worth_TG = grouped_TGe.topk(best, dim=-1).values.sum(-1)
    kept = torch.zeros_like(worth_TG, dtype=torch.bool)
    kept.scatter_(1, _topk_lowest_id_first(worth_TG, top_groups), True)
    # -inf, not 0: biased scores may all be negative.
    masked_TE: Tensor = grouped_TGe.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    return masked_TE


def _topk_lowest_id_first(choice_TE: Tensor, top_k: int) -> Tensor:
    """Top-k with ties to the lowest id, so that the choice is the same on every device."""
    order_TE: Tensor = choice_TE.sort(dim=-1, descending=True, stable=True).indices
    return order_TE[:, :top_k].contiguous()


def topk_router_triton(
    logits_TE: Tensor,
    top_k: int,
    *,
    score: str,
    renormalize: bool,
    scale: float = 1.0,
    correction_bias_E: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    load_CE: Tensor | None = None,
    phases_T: Tensor | None = None,
    num_valid_1: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits_TE.shape
    _check(score, num_experts, num_groups)
    if top_groups >= num_groups:
        num_groups = top_groups = 1
    assert logits_TE.stride(1) == 1 and 1 <= top_k <= num_experts
    if load_CE is not None:
        assert load_CE.dtype == torch.int64 and load_CE.shape[1] == num_experts
        assert load_CE.is_contiguous() and (phases_T is None or phases_T.is_contiguous())
    ids_TK = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    weights_TK = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits_TE.device)
    group_size = num_experts // num_groups
    groups, slots = power_of_two(num_groups), power_of_two(group_size)
    tiles = router_tiles(groups * slots)
    launch(
        _topk_router_kernel,
        (triton.cdiv(num_tokens, tiles.rows),),
        logits_TE,
        correction_bias_E,
        num_valid_1,
        ids_TK,
        weights_TK,
        load_CE,
        phases_T,
        num_tokens,
        logits_TE.stride(0),
        scale,
        TOP_K=top_k,
        SCORE=score,
        RENORMALIZE=renormalize,
        NUM_GROUPS=num_groups,
        TOP_GROUPS=top_groups,
        GROUP_SIZE=group_size,
        ROWS=tiles.rows,
        GROUPS=groups,
        SLOTS=slots,
        KS=power_of_two(top_k),
        num_warps=tiles.num_warps,
    )
    return ids_TK, weights_TK


topk_router = by_device(topk_router_triton, topk_router_torch, topk_router_cpu)


@triton.jit
def rank_keys(x, SIZE: tl.constexpr):
    """int64, all distinct in a row of [R, SIZE]: greater number first, then lower column."""
    countdown = SIZE - 1 - tl.arange(0, SIZE)
    return ordered_bits(x).to(tl.int64) * SIZE + countdown[None, :]


@triton.jit
def _take_best(keys):
    """Where each row's greatest key stands, and the keys without it."""
    is_best = keys == tl.max(keys, axis=1)[:, None]
    return is_best, tl.where(is_best, NO_KEY, keys)


@triton.jit
def _is_kept(choice, keys, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr,
             ROWS: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Mask [R, GROUPS * SLOTS] of the experts in the best groups."""
    choice = tl.reshape(choice, (ROWS * GROUPS, SLOTS))
    keys = tl.reshape(keys, (ROWS * GROUPS, SLOTS))
    worth = tl.zeros((ROWS * GROUPS,), tl.float32)
    for _ in tl.static_range(BEST):
        is_best, keys = _take_best(keys)
        worth += tl.sum(tl.where(is_best, choice, 0.0), axis=1)
    worth = tl.reshape(worth, (ROWS, GROUPS))
    group_keys = rank_keys(worth, GROUPS)
    group_keys = tl.where((tl.arange(0, GROUPS) < NUM_GROUPS)[None, :], group_keys, NO_KEY)
    kept = tl.zeros((ROWS, GROUPS), tl.int1)
    for _ in tl.static_range(TOP_GROUPS):
        is_best, group_keys = _take_best(group_keys)
        kept = kept | is_best
    kept = tl.broadcast_to(kept[:, :, None], (ROWS, GROUPS, SLOTS))
    return tl.reshape(kept, (ROWS, GROUPS * SLOTS))


# Experts of a group stand at the first GROUP_SIZE of its SLOTS columns: both are powers of two.
@triton.jit(do_not_specialize=["num_tokens"])
def _topk_router_kernel(
    logits_ptr,
    bias_ptr,
    num_valid_ptr,
    ids_ptr,
    weights_ptr,
    load_ptr,
    phases_ptr,
    num_tokens,
    logits_stride,
    scale,
    TOP_K: tl.constexpr,
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    KS: tl.constexpr,
):
    COLUMNS: tl.constexpr = GROUPS * SLOTS
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    experts = columns // SLOTS * GROUP_SIZE + columns % SLOTS
    is_expert = (columns % SLOTS < GROUP_SIZE) & (columns // SLOTS < NUM_GROUPS)
    at = rows.to(tl.int64)[:, None] * logits_stride + experts[None, :]
    mask = (rows < num_tokens)[:, None] & is_expert[None, :]
    logits = tl.load(logits_ptr + at, mask=mask, other=0.0).to(tl.float32)
    logits = tl.where(is_expert[None, :], logits, float("-inf"))
    if SCORE == "softmax":
        likelihood = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores = tl.div_rn(likelihood, tl.broadcast_to(
            tl.sum(likelihood, axis=1)[:, None], (ROWS, COLUMNS)))  # fmt: skip
    else:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    choice = scores
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + experts, mask=is_expert, other=0.0).to(tl.float32)
        choice = scores + bias[None, :]
    keys = tl.where(is_expert[None, :], rank_keys(choice, COLUMNS), NO_KEY)
    if TOP_GROUPS < NUM_GROUPS:
        best_of: tl.constexpr = 1 if (bias_ptr is None or GROUP_SIZE == 1) else 2
        kept = _is_kept(choice, keys, NUM_GROUPS, TOP_GROUPS, best_of, ROWS, GROUPS, SLOTS)
        keys = rank_keys(tl.where(kept, choice, float("-inf")), COLUMNS)
        keys = tl.where(is_expert[None, :], keys, NO_KEY)

    slots = tl.arange(0, KS)
    ids = tl.zeros((ROWS, KS), tl.int32)
    weights = tl.zeros((ROWS, KS), tl.float32)
    for slot in range(TOP_K):
        is_best, keys = _take_best(keys)
        expert = tl.sum(tl.where(is_best, experts[None, :], 0), axis=1)
        weight = tl.sum(tl.where(is_best, scores, 0.0), axis=1)
        is_slot = (slots == slot)[None, :]
        ids = tl.where(is_slot, expert[:, None], ids)
        weights = tl.where(is_slot, weight[:, None], weights)
    if RENORMALIZE:
        total = tl.broadcast_to(tl.sum(weights, axis=1)[:, None], (ROWS, KS))
        weights = tl.div_rn(weights, total)
    weights = weights * scale
    is_valid = tl.broadcast_to((rows < num_tokens)[:, None], (ROWS, KS))
    if num_valid_ptr is not None:
        is_valid = is_valid & (rows < tl.load(num_valid_ptr))[:, None]
    mask = (rows < num_tokens)[:, None] & (slots < TOP_K)[None, :]
    out_at = rows.to(tl.int64)[:, None] * TOP_K + slots[None, :]
    tl.store(ids_ptr + out_at, tl.where(is_valid, ids, -1).to(tl.int64), mask=mask)
    tl.store(weights_ptr + out_at, tl.where(is_valid, weights, 0.0), mask=mask)
    if load_ptr is not None:
        at = ids
        if phases_ptr is not None:
            phases = tl.load(phases_ptr + rows, mask=rows < num_tokens, other=0)
            at += phases[:, None] * (NUM_GROUPS * GROUP_SIZE)
        one = tl.full((ROWS, KS), 1, tl.int64)
        # Integers: exact in any order.
        tl.atomic_add(load_ptr + at, one, mask=mask & is_valid, sem="relaxed")
