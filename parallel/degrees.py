"""From options and a launcher's environment to how many ranks there are, and which one this is.

torchrun --nproc-per-node 4 ...         RANK, WORLD_SIZE ... -> RankSeat of each of 4 ranks
deepspeed --num_gpus 4 --module ...     the same, with LOCAL_SIZE for LOCAL_WORLD_SIZE
--tensor-parallel-size, --data-...      + world size 4       -> Degrees(2, 2)

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from moe_serve.errors import ConfigError

_COUNTS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MPI_SIZE = "OMPI_COMM_WORLD_SIZE"
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
_LAUNCHER = (
    "the launcher (torchrun: --nproc-per-node x --nnodes, deepspeed: --num_gpus x --num_nodes)"
)


class Degrees(NamedTuple):
    """`data_size` lanes of `tensor_size` ranks each."""

    tensor_size: int
    data_size: int

    @property
    def world_size(self) -> int:
        return self.tensor_size * self.data_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankSeat:
    """The place that a launcher gave this process: among all, and among those of its machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def local_seat(rank: int, world_size: int) -> RankSeat:
    """The seat of a rank where all are on this machine."""
    return RankSeat(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)


def resolve_degrees(
    tensor_parallel_size: int | None, data_parallel_size: int, world_size: int | None
) -> Degrees:
    """`world_size`: ranks that a launcher started; None where we start them ourselves.

    Raises `ConfigError` where the degrees do not use exactly the ranks that are there.
    """
    if world_size is None:
        return Degrees(tensor_parallel_size or 1, data_parallel_size)
    if tensor_parallel_size is None:
        if world_size % data_parallel_size:
            raise ConfigError(
                f"--data-parallel-size {data_parallel_size} does not divide the {world_size} ranks "
                f"that {_LAUNCHER} started; use a divisor: {_listed(_divisors(world_size))}"
            )
        return Degrees(world_size // data_parallel_size, data_parallel_size)
    degrees = Degrees(tensor_parallel_size, data_parallel_size)
    if degrees.world_size != world_size:
        raise ConfigError(_wrong_product(degrees, world_size))
    return degrees


def read_seat(environment: Mapping[str, str]) -> RankSeat | None:
    """What the launcher says of this process; None where none started it.

    An empty variable counts as unset. Raises `ConfigError` naming the variables where some are
    missing, are no whole numbers, or contradict each other, and for ranks of mpirun's, which knows
    neither names nor an address that we could use.
    """
    is_deepspeed = environment.get("RANK") and environment.get("LOCAL_SIZE")
    if is_deepspeed and not environment.get("LOCAL_WORLD_SIZE"):
        environment = {**environment, "LOCAL_WORLD_SIZE": environment["LOCAL_SIZE"]}
    _refuse_mpirun(environment)
    given = {name: environment[name] for name in _COUNTS if environment.get(name)}
    if not given:
        return None
    missing = [name for name in _COUNTS + _RENDEZVOUS if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"{', '.join(given)} set without {', '.join(missing)}: start the ranks with torchrun, "
            f"which sets all of them, or unset {', '.join(given)}"
        )
    numbers = {name: _number(environment, name) for name in (*_COUNTS, "MASTER_PORT")}
    if not 0 < numbers["MASTER_PORT"] < 65536:
        raise ConfigError(f"MASTER_PORT={numbers['MASTER_PORT']} must be between 1 and 65535")
    seat = RankSeat(**{name.lower(): numbers[name] for name in _COUNTS})
    _check_seat(seat)
    return seat


def _wrong_product(degrees: Degrees, world_size: int) -> str:
    tensor_size, data_size = degrees
    fixes = [f"start {degrees.world_size} ranks"]
    if world_size % data_size == 0:
        fixes.append(f"use --tensor-parallel-size {world_size // data_size}")
    if world_size % tensor_size == 0:
        fixes.append(f"use --data-parallel-size {world_size // tensor_size}")
    return (
        f"--tensor-parallel-size {tensor_size} x --data-parallel-size {data_size} takes "
        f"{degrees.world_size} ranks, but {_LAUNCHER} started {world_size}; "
        f"{', or '.join(fixes)}"
    )


def _refuse_mpirun(environment: Mapping[str, str]) -> None:
    size = environment.get(_MPI_SIZE, "1")
    if size != "1" and not environment.get("RANK"):
        raise ConfigError(
            f"{_MPI_SIZE}={size}, but RANK is not set: mpirun's ranks do not find each other; "
            "start them with torchrun, or with deepspeed and its own launcher (pdsh, or --no_ssh "
            "on each node)"
        )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name].strip()
    # int() alone would also take 1_0 and digits of other scripts.
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name}={environment[name]!r} is not a whole number of 0 or more")
    return int(text)


def _check_seat(seat: RankSeat) -> None:
    below = (("rank", "world_size"), ("local_rank", "local_world_size"))
    at_most = (("local_rank", "rank"), ("local_world_size", "world_size"))
    for small, large in below + at_most:
        is_strict = (small, large) in below
        if getattr(seat, small) > getattr(seat, large) - is_strict:
            raise ConfigError(
                f"{small.upper()}={getattr(seat, small)} must be "
                f"{'below' if is_strict else 'at most'} {large.upper()}={getattr(seat, large)}; "
                "start the ranks with torchrun, which sets both"
            )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
