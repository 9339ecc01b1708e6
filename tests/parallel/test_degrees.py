"""From options and a launcher's environment to degrees and seats."""

from __future__ import annotations

import re

import pytest

from moe_serve.errors import ConfigError
from moe_serve.parallel.degrees import Degrees, RankSeat, read_seat, resolve_degrees

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("tensor", "data", "world", "expected"),
    [
        (None, 1, None, (1, 1)),
        (None, 3, None, (1, 3)),
        (4, 2, None, (4, 2)),
        (None, 1, 1, (1, 1)),
        (None, 1, 7, (7, 1)),
        (None, 2, 8, (4, 2)),
        (None, 8, 8, (1, 8)),
        (2, 4, 8, (2, 4)),
        (1, 1, 1, (1, 1)),
    ],
)
def test_degrees_use_every_rank(tensor, data, world, expected) -> None:
    degrees = resolve_degrees(tensor, data, world)
    assert degrees == Degrees(*expected)
    assert world is None or degrees.world_size == world


@pytest.mark.parametrize(
    ("tensor", "data", "world", "message"),
    [
        (None, 3, 8, "--data-parallel-size 3 does not divide the 8 ranks that the "
                     "launcher (torchrun: --nproc-per-node x --nnodes, deepspeed: --num_gpus x "
                     "--num_nodes) started; use a divisor: 1, 2, 4, 8"),
        (None, 9, 3, "--data-parallel-size 9 does not divide the 3 ranks"),
        (4, 1, 2, "--tensor-parallel-size 4 x --data-parallel-size 1 takes 4 ranks, but the "
                  "launcher (torchrun: --nproc-per-node x --nnodes, deepspeed: --num_gpus x "
                  "--num_nodes) started 2; start 4 ranks, or use --tensor-parallel-size 2"),
        (2, 2, 8, "started 8; start 4 ranks, or use --tensor-parallel-size 4, or use "
                  "--data-parallel-size 4"),
        (2, 3, 8, "started 8; start 6 ranks, or use --data-parallel-size 4"),
        (3, 3, 8, "started 8; start 9 ranks"),
        (2, 1, 1, "started 1; start 2 ranks, or use --tensor-parallel-size 1"),
    ],
)  # fmt: skip
def test_degrees_that_leave_ranks_over_or_lack_some_are_refused(
    tensor, data, world, message
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_degrees(tensor, data, world)
    assert message in str(caught.value)
    offered = re.findall(r"use --(tensor|data)-parallel-size (\d+)", str(caught.value))
    for name, size in offered:
        changed = {"tensor": tensor, "data": data} | {name: int(size)}
        assert resolve_degrees(changed["tensor"], changed["data"], world).world_size == world


def test_a_seat_is_what_torchrun_says() -> None:
    expected = RankSeat(rank=5, world_size=8, local_rank=1, local_world_size=4)
    assert read_seat(TORCHRUN | {"OTHER": "x"}) == expected


def test_a_seat_is_what_deepspeed_says() -> None:
    environment = TORCHRUN | {"LOCAL_SIZE": "4", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
    del environment["LOCAL_WORLD_SIZE"]
    expected = RankSeat(rank=5, world_size=8, local_rank=1, local_world_size=4)
    assert read_seat(environment) == expected
    # Where both are said, torchrun's is what it is about.
    assert read_seat(TORCHRUN | {"LOCAL_SIZE": "8"}) == expected


def test_the_ranks_of_mpirun_are_told_what_to_use() -> None:
    assert read_seat({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}) is None
    assert read_seat(TORCHRUN | {"OMPI_COMM_WORLD_SIZE": "8"}) is not None
    with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_SIZE=2, but RANK is not set: mpirun's"):
        read_seat({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"})


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"LOCAL_SIZE": "2"},
        {"MASTER_ADDR": "a", "MASTER_PORT": "1"},
        dict.fromkeys(TORCHRUN, ""),
    ],
    ids=["nothing", "a size", "an address alone", "all empty"],
)
def test_without_a_launcher_there_is_no_seat(environment) -> None:
    assert read_seat(environment) is None


@pytest.mark.parametrize("name", TORCHRUN)
@pytest.mark.parametrize("is_empty", [False, True])
def test_a_half_set_environment_names_what_is_missing(name: str, is_empty: bool) -> None:
    environment = TORCHRUN | {name: ""}
    if not is_empty:
        del environment[name]
    with pytest.raises(ConfigError, match=rf"set without {name}: start the ranks with torchrun"):
        read_seat(environment)


def test_a_single_leftover_says_what_to_unset() -> None:
    message = (
        "WORLD_SIZE set without RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT: "
        "start the ranks with torchrun, which sets all of them, or unset WORLD_SIZE"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_seat({"WORLD_SIZE": "1"})


@pytest.mark.parametrize("name", [name for name in TORCHRUN if name != "MASTER_ADDR"])
@pytest.mark.parametrize("value", ["x", "-1", "1.0", "1_0", "+1", "٣", "0x1", " "])
def test_a_value_that_is_no_number_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r} is not a whole number")):
        read_seat(TORCHRUN | {name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "8"}, "RANK=8 must be below WORLD_SIZE=8"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 must be below WORLD_SIZE=0"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 must be below LOCAL_WORLD_SIZE=4"),
        ({"RANK": "0"}, "LOCAL_RANK=1 must be at most RANK=0"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 must be at most WORLD_SIZE=8"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 must be between 1 and 65535"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 must be between 1 and 65535"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(changes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_seat(TORCHRUN | changes)


@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_each_rank_of_a_machine_gets_a_seat(world_size: int) -> None:
    for rank in range(world_size):
        counts = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank,
                  "LOCAL_WORLD_SIZE": world_size}  # fmt: skip
        seat = read_seat(TORCHRUN | {name: str(value) for name, value in counts.items()})
        assert seat == RankSeat(
            rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size
        )
