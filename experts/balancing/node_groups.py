"""Groups of experts that stay together on a node. Pure.

With group-limited routing a token goes to few groups; with each group on one node it goes to few
nodes. The policy, groups to nodes before anything else, is the published hierarchical one
(github.com/deepseek-ai/EPLB).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_serve.experts.balancing.layer_loads import LayerLoads
from moe_serve.experts.balancing.local_search import improve
from moe_serve.experts.balancing.packing import pack

# Shapes: L MoE layers, E logical experts, G groups of equal size, N nodes, X experts of a node,
# R ranks.

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def experts_of_nodes(load_LE: Ints, num_groups: int, num_nodes: int) -> list[Ints]:
    """Ways to spread the groups, [L, N, X] each: heaviest group first, and that with swaps.

    Nodes get equally many groups. More even nodes need not give more even ranks, hence both.
    """
    num_layers, num_experts = load_LE.shape
    size = num_experts // num_groups
    load_LG = load_LE.reshape(num_layers, num_groups, size).sum(axis=2)
    per_node = (num_groups // num_nodes,) * num_nodes
    first_LG = pack(load_LG, np.ones_like(load_LG), per_node)
    state = LayerLoads(load_LE=load_LG, slots_LP=first_LG.copy(), num_slots=per_node)
    improve(state, least=1)
    ways = [first_LG] if (first_LG == state.slots_LP).all() else [first_LG, state.slots_LP]
    return [
        (group_LG[..., None] * size + np.arange(size)).reshape(num_layers, num_nodes, -1)
        for group_LG in ways
    ]


def node_of_experts(held_LER: Bools, num_groups: int, num_nodes: int) -> Ints:
    """[L, E]: the node that holds an expert; a layer whose groups do not lie so is all -1."""
    num_layers, num_experts, _ = held_LER.shape
    held_LEN = held_LER.reshape(num_layers, num_experts, num_nodes, -1).any(axis=3)
    node_LE = held_LEN.argmax(axis=2)
    groups_LGX = node_LE.reshape(num_layers, num_groups, -1)
    is_one_L = (held_LEN.sum(axis=2) == 1).all(axis=1)
    is_whole_L = (groups_LGX == groups_LGX[..., :1]).all(axis=(1, 2))
    groups_LN = (groups_LGX[..., 0, None] == np.arange(num_nodes)).sum(axis=1)
    is_even_L = (groups_LN == num_groups // num_nodes).all(axis=1)
    return np.where((is_one_L & is_whole_L & is_even_L)[:, None], node_LE, -1)
