"""How the ranks of an engine find each other, and the process groups they form."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_serve.config import CommBackend
from moe_serve.errors import ConfigError
from moe_serve.parallel.collectives import Collectives
from moe_serve.parallel.comm_backend import check_any_shared, make_collectives
from moe_serve.parallel.degrees import RankSeat
from moe_serve.parallel.group import SOLO, RankGroup
from moe_serve.parallel.layout import RankLayout
from moe_serve.parallel.meeting import meet
from moe_serve.parallel.network import address_towards, choose_gloo_interface

logger = logging.getLogger(__name__)

# Ranks start at different times: nodes boot, models are downloaded.
JOIN_SECONDS = 1800.0
CONNECT_SECONDS = 10.0
LOOPBACK = "127.0.0.1"
ENVIRONMENT = "env://"


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """Where a rank runs."""

    host: str
    pid: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All ranks, joined. `peers` by rank; `timeout`: seconds that a collective may take."""

    seat: RankSeat
    peers: tuple[Peer, ...]
    device: torch.device
    timeout: float

    @property
    def is_one_host(self) -> bool:
        return len({peer.host for peer in self.peers}) == 1

    def is_beside(self, rank: int) -> bool:
        """Whether that rank runs on this host."""
        return self.peers[rank].host == self.peers[self.seat.rank].host


def join(
    seat: RankSeat,
    device: torch.device,
    timeout: float,
    init_method: str = ENVIRONMENT,
    check_others: Callable[[], None] = lambda: None,
) -> World:
    """Wait for all ranks, then form the process group: NCCL for CUDA tensors, gloo for the rest.

    `init_method`: torch's, "env://" as torchrun sets it or "tcp://host:port". `check_others`: see
    `meet`. Raises `ConfigError` where this process belongs to a group already: torch has one for
    all.
    """
    if dist.is_initialized():
        raise ConfigError(
            "this process has a torch.distributed group already, perhaps of another engine with "
            "several ranks; close that one first, or use another process"
        )
    master = urlsplit(init_method).hostname or os.environ["MASTER_ADDR"]
    choose_gloo_interface(master)
    store = _open_store(seat, init_method)
    # Before gloo, whose patience with late ranks is the collectives' timeout.
    store = meet(store, seat.rank, seat.world_size, JOIN_SECONDS, check_others)
    peers: list[Any] = [None] * seat.world_size
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=seat.rank,
            world_size=seat.world_size,
            timeout=datetime.timedelta(seconds=timeout),
        )
        dist.all_gather_object(peers, Peer(_host_name(master), os.getpid()))
    except BaseException as error:
        leave()
        if isinstance(error, RuntimeError):
            check_others()
        raise
    return World(seat=seat, peers=tuple(peers), device=device, timeout=timeout)


def _open_store(seat: RankSeat, init_method: str) -> Any:
    patience = datetime.timedelta(seconds=JOIN_SECONDS)
    if init_method == ENVIRONMENT:
        # torchrun's is there before any rank; or not any more.
        is_there = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        rendezvous: Any = dist.rendezvous(  # type: ignore[attr-defined]
            init_method,
            seat.rank,
            seat.world_size,
            timeout=datetime.timedelta(seconds=CONNECT_SECONDS) if is_there else patience,
        )
        store = next(rendezvous)[0]
        store.set_timeout(patience)
        return store
    # Not by torch's rendezvous, which under torchrun takes that one's store to be ours.
    url = urlsplit(init_method)
    assert url.hostname is not None and url.port is not None
    return dist.TCPStore(  # type: ignore[attr-defined]
        url.hostname,
        url.port,
        is_master=seat.rank == 0,
        timeout=patience,
        wait_for_workers=False,
    )


def leave() -> None:
    """Give up all process groups. Does not wait for the others."""
    if dist.is_initialized():
        dist.destroy_process_group()


def broadcast(world: World, value: Any) -> Any:
    """Rank 0's value, at every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]


def own_address(world: World) -> str:
    """The address at which the other ranks reach this one."""
    if world.is_one_host:
        return LOOPBACK
    return world.peers[world.seat.rank].host


def make_groups(
    world: World, layout: RankLayout, backend: CommBackend = "auto"
) -> tuple[RankGroup, RankGroup]:
    """(the ranks of this lane, those that experts are spread over): see `RankLayout`.

    All ranks call it together. Raises `ConfigError` where `backend` cannot be had.
    """
    mesh = _make_mesh(world, layout)
    groups: dict[str, dist.ProcessGroup] = {}
    if layout.tensor_size > 1:
        groups["lane"] = mesh["tensor"].get_group()
    if layout.expert_size > 1:
        everyone = dist.group.WORLD
        assert everyone is not None
        groups["experts"] = everyone
    hosts = [peer.host for peer in world.peers]
    made: dict[str, Collectives] = {}
    reasons: list[str | None] = []
    for name, group in groups.items():
        made[name], reason = make_collectives(
            backend, group, hosts, world.timeout, world.device.type
        )
        reasons.append(reason)
    check_any_shared(backend, reasons)
    if world.seat.rank == 0:
        for (name, own), reason in zip(made.items(), reasons, strict=True):
            why = "" if reason is None else f", not by shm: {reason}"
            logger.info("the ranks of the %s exchange tensors by %s%s", name, own.name, why)
    lane, experts = (_make_group(made.get(name)) for name in ("lane", "experts"))
    return lane, experts


def _make_group(collectives: Collectives | None) -> RankGroup:
    return SOLO if collectives is None else RankGroup(collectives)


def _make_mesh(world: World, layout: RankLayout) -> DeviceMesh:
    """Lanes x ranks of a lane. Its groups get our deadline: torch's own for them is half an hour"""
    ranks_LS = torch.arange(layout.world_size).view(layout.data_size, layout.tensor_size)
    deadline = datetime.timedelta(seconds=world.timeout)
    own: list[dist.ProcessGroup] = []
    for rows in (ranks_LS.T.tolist(), ranks_LS.tolist()):
        # Every rank makes every group, its own or not.
        groups = {tuple(row): dist.new_group(row, timeout=deadline) for row in rows}
        own.append(next(group for row, group in groups.items() if layout.rank in row))
    return DeviceMesh.from_group(
        own, world.device.type, mesh=ranks_LS, mesh_dim_names=("data", "tensor")
    )


def _host_name(master: str) -> str:
    """What tells hosts apart: the address towards the first rank, or this host's name."""
    address = address_towards(master)
    return socket.gethostname() if address.startswith("127.") else address
