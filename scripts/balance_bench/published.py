"""The baseline: DeepSeek's published expert-parallelism load balancer, as it is described.

Source: github.com/deepseek-ai/EPLB, commit d52c72d (MIT). Written anew from the description, with
the same cost: loops over layers and items in Python, torch tensors of float32 as items, one
least-loaded search an item. Checked by `matches_worked_example` against the example of its README.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Shapes: L layers, E logical experts, P slots, I items to pack.

Slots = npt.NDArray[np.int64]


def pack(weight_LI: Tensor, num_packs: int) -> tuple[Tensor, Tensor]:
    """Heaviest item first, each into the lightest pack with room; packs get equally many.

    Returns (pack, place in it) of each item, [L, I] both.
    """
    num_layers, num_items = weight_LI.shape
    room = num_items // num_packs
    pack_LI = torch.full(weight_LI.shape, -1)
    place_LI = torch.full(weight_LI.shape, -1)
    if room == 1:
        each = torch.arange(num_items).expand(num_layers, -1)
        return each, torch.zeros_like(each)
    order_LI = weight_LI.sort(dim=-1, descending=True).indices
    for layer in range(num_layers):
        loads: list[Tensor | float] = [0.0] * num_packs
        sizes = [0] * num_packs
        for item in order_LI[layer]:
            open_packs = (index for index in range(num_packs) if sizes[index] < room)
            chosen = min(open_packs, key=loads.__getitem__)
            pack_LI[layer, item] = chosen
            place_LI[layer, item] = sizes[chosen]
            loads[chosen] += weight_LI[layer, item]
            sizes[chosen] += 1
    return pack_LI, place_LI


def replicate(weight_LE: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """One more replica at a time for the expert whose replicas carry most.

    Returns the expert of each item [L, P] and the replicas of each expert [L, E].
    """
    num_layers, num_experts = weight_LE.shape
    expert_LP = torch.arange(num_slots).repeat(num_layers, 1)
    counts_LE = torch.ones(num_layers, num_experts, dtype=torch.int64)
    every = torch.arange(num_layers)
    for slot in range(num_experts, num_slots):
        hottest_L = (weight_LE / counts_LE).max(dim=-1).indices
        expert_LP[:, slot] = hottest_L
        counts_LE[every, hottest_L] += 1
    return expert_LP, counts_LE


def balance_published(
    load_LE: npt.NDArray[np.generic],
    num_slots: int,
    num_ranks: int,
    num_groups: int = 1,
    num_nodes: int = 1,
) -> Slots:
    """The logical expert of each slot, rank by rank, [L, P]; a rank may hold an expert twice."""
    weight_LE = torch.from_numpy(np.ascontiguousarray(load_LE)).float()
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    num_layers, num_experts = weight_LE.shape
    size = num_experts // num_groups
    group_load = weight_LE.unflatten(-1, (num_groups, size)).sum(-1)
    node_LG, place_LG = pack(group_load, num_nodes)
    first_LG = (node_LG * (num_groups // num_nodes) + place_LG) * size
    moved_LE = (first_LG[..., None] + torch.arange(size)).flatten(-2)
    expert_of_moved_LE = inverse(moved_LE)

    weight_NE = weight_LE.gather(-1, expert_of_moved_LE).view(-1, num_experts // num_nodes)
    moved_NP, counts_NE = replicate(weight_NE, num_slots // num_nodes)
    share_NP = (weight_NE / counts_NE).gather(-1, moved_NP)
    rank_NP, place_NP = pack(share_NP, num_ranks // num_nodes)
    slot_NP = rank_NP * (num_slots // num_ranks) + place_NP
    moved_NP = moved_NP.gather(-1, inverse(slot_NP)).view(num_layers, num_nodes, -1)
    starts_N = torch.arange(0, num_experts, num_experts // num_nodes)
    moved_LP = (moved_NP + starts_N[:, None]).flatten(-2)
    slots_LP: Slots = expert_of_moved_LE.gather(-1, moved_LP).numpy()
    return slots_LP


def inverse(permutation_LI: Tensor) -> Tensor:
    index_LI = torch.arange(permutation_LI.shape[1]).expand(permutation_LI.shape)
    return torch.empty_like(permutation_LI).scatter_(-1, permutation_LI, index_LI)


def matches_worked_example(file: Path) -> bool:
    """`file`: weights and published result as JSON. True where every slot is equal."""
    example = json.loads(file.read_text())
    slots_LP = balance_published(
        np.array(example["weight"]),
        example["num_replicas"],
        example["num_gpus"],
        example["num_groups"],
        example["num_nodes"],
    )
    return bool((slots_LP == np.array(example["expected_phy2log"])).all())
