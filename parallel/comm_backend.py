"""Which collectives the ranks of a group use: `--comm-backend`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from moe_serve.config import CommBackend
from moe_serve.errors import ConfigError
from moe_serve.kernels.cpu.build import BuildError
from moe_serve.parallel.collectives import Collectives
from moe_serve.parallel.layout import RankLayout
from moe_serve.parallel.shm.library import load
from moe_serve.parallel.shm.segment import SegmentAddress
from moe_serve.parallel.shm.shm_collectives import MOST_RANKS, ShmCollectives, ShmError
from moe_serve.parallel.torch_collectives import TorchCollectives


def check_comm_backend(name: CommBackend, layout: RankLayout, device_type: str) -> None:
    """What each rank can tell alone, before they meet. Raises `ConfigError`.

    Compiles what may be needed: once they have met, ranks wait for each other with a deadline.
    """
    exchanges = layout.tensor_size > 1 or layout.expert_size > 1
    if name != "auto" and not exchanges:
        raise ConfigError(
            f"--comm-backend {name} has no effect where no two ranks exchange tensors; drop it, or "
            "add --tensor-parallel-size, or --data-parallel-size and --enable-expert-parallel"
        )
    if name != "auto" and device_type != "cpu":
        raise ConfigError(
            f"--comm-backend {name} moves tensors between CPUs, but the model runs on "
            f"{device_type}; use auto, or --device cpu"
        )
    if exchanges and device_type == "cpu" and name in ("auto", "shm"):
        try:
            load()
        except BuildError as error:
            if name == "shm":
                raise _refusal(str(error)) from error


def make_collectives(
    name: CommBackend,
    process_group: dist.ProcessGroup,
    hosts: list[str],
    timeout: float,
    device_type: str,
) -> tuple[Collectives, str | None]:
    """(collectives, why they are not shared memory's where that was wanted).

    All ranks of the group call it together, and get the same. `hosts`: of all ranks of the world;
    `timeout`: seconds that a collective may take. Raises `ConfigError` where DeepSpeed is missing.
    """
    if name == "deepspeed":
        # An optional package, whose import takes seconds.
        from moe_serve.parallel.deepspeed_collectives import DeepSpeedCollectives

        return DeepSpeedCollectives(process_group), None
    if name == "gloo" or device_type != "cpu":
        return TorchCollectives(process_group), None
    shared = _share(process_group, hosts, timeout)
    if isinstance(shared, str):
        return TorchCollectives(process_group), shared
    return shared, None


def check_any_shared(name: CommBackend, reasons: list[str | None]) -> None:
    """`reasons`: why this rank's groups share no memory, None where they do.

    All ranks of the world call it together. Raises `ConfigError` at each of them where memory was
    to be shared and is nowhere.
    """
    if name != "shm":
        return
    reasons_of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons_of_ranks, reasons)
    found = [reason for reasons in reasons_of_ranks for reason in reasons]
    if None not in found:
        raise _refusal(found[0])


def _refusal(reason: str) -> ConfigError:
    return ConfigError(f"--comm-backend shm: {reason}; use auto, or gloo")


def _share(
    process_group: dist.ProcessGroup, hosts: list[str], timeout: float
) -> ShmCollectives | str:
    """The same kind at each rank: what one of them cannot do, or why."""
    ranks = dist.get_process_group_ranks(process_group)
    if len({hosts[rank] for rank in ranks}) > 1:
        return "its ranks are on several hosts"
    if len(ranks) > MOST_RANKS:
        return f"its {len(ranks)} ranks are more than {MOST_RANKS}"
    made = _open(process_group, timeout)
    reason, pid = (made, 0) if isinstance(made, str) else (None, made.pid)
    answers: list[Any] = [None] * len(ranks)
    dist.all_gather_object(answers, (reason, pid), group=process_group)
    reasons = [reason for reason, _ in answers if reason is not None]
    if isinstance(made, str) or reasons:
        if not isinstance(made, str):
            made.close()
        return str(reasons[0])
    made.ranks, made.pids = ranks, [pid for _, pid in answers]
    return made


def _open(process_group: dist.ProcessGroup, timeout: float) -> ShmCollectives | str:
    """This rank's view of what the group's first made; or why there is none."""
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    made: ShmCollectives | str = ""
    if rank == 0:
        try:
            made = ShmCollectives.create(size, timeout)
        except (BuildError, ShmError) as error:
            made = str(error)
    told: list[Any] = [made if isinstance(made, str) else made.address]
    dist.broadcast_object_list(told, group=process_group, group_src=0)
    if rank == 0:
        return made
    address: SegmentAddress | str = told[0]
    if isinstance(address, str):
        return address
    try:
        return ShmCollectives.find(address, rank, size, timeout)
    except (BuildError, ShmError) as error:
        return str(error)
