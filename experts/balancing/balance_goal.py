"""What a balancer is asked for, checked. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.errors import PlacementError
from moe_serve.experts.analysis.load_statistics import count_slots
from moe_serve.experts.balancing.layer_loads import LayerLoads, held_by, whole_loads
from moe_serve.experts.balancing.node_groups import node_of_experts

# Shapes: L MoE layers, E logical experts, R ranks, P slots of all ranks, rank by rank.

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BalanceGoal:
    """What a placement must keep to besides being even.

    num_nodes: ranks lie on nodes in equal runs. num_groups: runs of experts; where they divide by
    the nodes, of which there are several, all replicas of a group lie on one node and nodes have
    equally many groups. max_moves: most slots, of all layers, that get an expert their rank did not
    hold; None is no limit. min_replicas: of each expert; 2 and a rank may be lost.
    """

    num_nodes: int = 1
    num_groups: int = 1
    max_moves: int | None = None
    min_replicas: int = 1

    def __post_init__(self) -> None:
        for name in ("num_nodes", "num_groups", "min_replicas"):
            if getattr(self, name) < 1:
                raise PlacementError(f"{name} is {getattr(self, name)}: must be 1 or more")
        if self.max_moves is not None and self.max_moves < 0:
            raise PlacementError(f"max_moves is {self.max_moves}: must be 0 or more")

    @property
    def keeps_groups(self) -> bool:
        return self.num_nodes > 1 and self.num_groups % self.num_nodes == 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BalanceTask:
    """Loads as whole numbers, slots of each rank, and the goal. Made by `of`, which checks."""

    load_LE: Ints
    shift_L: Ints
    num_slots: tuple[int, ...]
    goal: BalanceGoal

    @classmethod
    def of(
        cls, load_LE: npt.NDArray[Any], num_slots: Sequence[int], goal: BalanceGoal
    ) -> BalanceTask:
        """Raises `PlacementError` with the numbers where no placement can do this."""
        _check_loads(load_LE)
        _check_slots(load_LE.shape[1], num_slots)
        _check_goal(load_LE.shape[1], num_slots, goal)
        whole_LE, shift_L = whole_loads(load_LE)
        return cls(load_LE=whole_LE, shift_L=shift_L, num_slots=tuple(num_slots), goal=goal)

    @property
    def num_experts(self) -> int:
        return int(self.load_LE.shape[1])

    @property
    def filled(self) -> tuple[int, ...]:
        """Slots of the ranks that have any."""
        return tuple(count for count in self.num_slots if count)

    @property
    def node_R(self) -> Ints:
        """Of the ranks that have slots."""
        sizes_R = np.array(self.num_slots)
        node_R = np.arange(len(sizes_R)) // (len(sizes_R) // self.goal.num_nodes)
        return node_R[sizes_R > 0]

    def layer_loads(
        self, slots_LP: npt.NDArray[Any], closed_LER: Bools | None = None
    ) -> LayerLoads:
        return LayerLoads(
            load_LE=self.load_LE,
            slots_LP=slots_LP.astype(np.int64),  # a copy: it changes
            num_slots=self.filled,
            closed_LER=closed_LER,
        )

    def nodes_of(self, slots_LP: npt.NDArray[Any]) -> Ints:
        """[L, E]: see `node_of_experts`; without groups to keep, 0 everywhere."""
        if not self.goal.keeps_groups:
            return np.zeros_like(self.load_LE)
        held_LER = held_by(slots_LP, self.num_slots, self.num_experts)
        return node_of_experts(held_LER, self.goal.num_groups, self.goal.num_nodes)

    def is_met(self, slots_LP: npt.NDArray[Any]) -> Bools:
        """[L]: whether the goal is, budget aside."""
        counts_LE = count_slots(slots_LP, self.num_experts)
        has_replicas_L: Bools = counts_LE.min(axis=1) >= self.goal.min_replicas
        keeps_groups_L: Bools = self.nodes_of(slots_LP).min(axis=1) >= 0
        return has_replicas_L & keeps_groups_L


def _check_slots(num_experts: int, num_slots: Sequence[int]) -> None:
    total = sum(num_slots)
    if not num_slots or not num_experts or min(num_slots) < 0:
        raise PlacementError(f"{num_experts} experts in {list(num_slots)} slots of ranks")
    if max(num_slots) - min(num_slots) > 1:
        raise PlacementError(
            f"ranks have {min(num_slots)} to {max(num_slots)} slots: they may differ by one"
        )
    if total < num_experts:
        raise PlacementError(f"{total} slots on {len(num_slots)} ranks for {num_experts} experts")
    if max(num_slots) > num_experts:
        raise PlacementError(
            f"a rank with {max(num_slots)} slots would hold one of {num_experts} experts twice"
        )


def _check_goal(num_experts: int, num_slots: Sequence[int], goal: BalanceGoal) -> None:
    if len(num_slots) % goal.num_nodes:
        raise PlacementError(
            f"{len(num_slots)} ranks on {goal.num_nodes} nodes: not a whole number"
        )
    if num_experts % goal.num_groups:
        raise PlacementError(
            f"{num_experts} experts in {goal.num_groups} groups: not a whole number"
        )
    num_nodes = goal.num_nodes if goal.keeps_groups else 1
    per_node = num_experts // num_nodes
    size = len(num_slots) // num_nodes
    for node in range(num_nodes):
        own = num_slots[node * size : (node + 1) * size]
        where = f"node {node}" if num_nodes > 1 else "all ranks"
        needed = per_node * goal.min_replicas
        if sum(own) < needed:
            raise PlacementError(
                f"{where}: {sum(own)} slots for {per_node} experts x {goal.min_replicas} replicas"
            )
        ranks = sum(count > 0 for count in own)
        if goal.min_replicas > ranks:
            raise PlacementError(
                f"{where}: {goal.min_replicas} replicas of an expert on {ranks} ranks"
            )
        if max(own) > per_node:
            raise PlacementError(
                f"{where}: a rank with {max(own)} slots would hold one of {per_node} experts twice"
            )


def _check_loads(load_LE: npt.NDArray[Any]) -> None:
    """Raises `PlacementError` unless `load_LE` is a matrix of finite numbers from 0 up."""
    if load_LE.ndim != 2 or load_LE.dtype.kind not in "biuf":
        raise PlacementError(
            f"loads are {load_LE.dtype} of shape {load_LE.shape}: wanted numbers, layers x experts"
        )
    wrong_LE = ~np.isfinite(load_LE) | (load_LE < 0)
    if wrong_LE.any():
        layer, expert = np.argwhere(wrong_LE)[0].tolist()
        raise PlacementError(
            f"load of layer {layer}, expert {expert} is {load_LE[layer, expert]}: "
            "wanted a finite number from 0 up"
        )
