"""From the name of a backend to its dispatcher."""

from __future__ import annotations

from typing import Any, Literal

from moe_serve.parallel.group import RankGroup
from moe_serve.routing.all_gather import AllGatherDispatcher
from moe_serve.routing.all_to_all import AllToAllDispatcher
from moe_serve.routing.auto import AutoDispatcher
from moe_serve.routing.dispatch import Dispatcher
from moe_serve.routing.expert_map import ExpertMap, ReplicaTurns
from moe_serve.routing.local import LocalDispatcher

Backend = Literal["auto", "allgather_reducescatter", "all_to_all"]


def make_dispatcher(backend: Backend, group: RankGroup, experts: ExpertMap) -> Dispatcher[Any]:
    """`group`: the ranks that `experts` places them on. A group of one has nothing to exchange."""
    assert len(experts.num_local) == group.size and experts.rank == group.rank
    if group.size == 1:
        index_of_E = None if experts.is_in_order else experts.replicas_EC[:, 0]
        return LocalDispatcher(experts.most_local, index_of_E)
    turns = ReplicaTurns(experts)
    if backend == "all_to_all":
        return AllToAllDispatcher(group, turns)
    static = AllGatherDispatcher(group, turns)
    if backend == "allgather_reducescatter":
        return static
    return AutoDispatcher(static, AllToAllDispatcher(group, turns))
