"""DeepSpeed's collectives give the bits that torch's give, quietly, and leave with the world."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_serve.errors import ConfigError
from moe_serve.parallel.collectives import Collectives
from moe_serve.parallel.deepspeed_collectives import DeepSpeedCollectives
from moe_serve.parallel.group import RankGroup
from moe_serve.parallel.torch_collectives import TorchCollectives
from tests.rank_pool import RankPool

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
# Rows that each rank sends to each, in units: some none, some many, no two rows or columns alike.
ROWS = [[0, 7, 1], [17, 0, 0], [3, 1, 2]]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3, deadline=60.0) as pool:
        yield pool


def outcomes(collectives: Collectives, dtype: torch.dtype, width: int) -> dict[str, Tensor]:
    """What this rank gets of each collective, from inputs that every kind makes alike."""
    rank, size = collectives.rank, collectives.size
    torch.manual_seed(100 * rank + width)
    x = torch.randn(5 * size, width).to(dtype)
    send = ROWS[rank][:size]
    receive = [row[rank] for row in ROWS[:size]]
    rows = torch.randn(sum(send), width).to(dtype)
    bits = torch.randint(-(2**31), 2**31, (5 * size, width), dtype=torch.int32)
    got = {
        "all_gather": x.new_empty(x.shape[0] * size, width),
        "all_to_all": x.new_empty(sum(receive), width),
        "reduce_scatter": x.new_empty(5, width),
        "all_reduce": x.clone(),
        "sum_bits": bits.new_empty(5, width),
    }
    collectives.all_gather(got["all_gather"], x)
    collectives.all_to_all(got["all_to_all"], rows, receive, send)
    collectives.reduce_scatter(got["reduce_scatter"], x)
    collectives.all_reduce(got["all_reduce"])
    collectives.sum_bits(got["sum_bits"], bits)
    parts = [torch.empty_like(x) for _ in range(size)] if rank == 0 else None
    collectives.gather(parts, x)
    return got | {"gather": x if parts is None else torch.stack(parts)}


def differences(process_group: dist.ProcessGroup) -> list[str]:
    """The collectives whose bits are not torch's; they have to be at least six."""
    ours = DeepSpeedCollectives(process_group)
    assert ours.name == "deepspeed"
    wrong = []
    for dtype, width in ((torch.float32, 1), (torch.bfloat16, 17), (torch.float32, 64)):
        expected = outcomes(TorchCollectives(process_group), dtype, width)
        got = outcomes(ours, dtype, width)
        assert len(expected) == 6
        wrong += [name for name in expected if not torch.equal(got[name], expected[name])]
    ours.close()
    return wrong


def differ_among(group: RankGroup, ranks: list[int]) -> list[str]:
    process_group = dist.new_group(ranks)
    return differences(process_group) if group.rank in ranks else []


@needs_deepspeed
@pytest.mark.parametrize("ranks", [[0, 1, 2], [0, 1], [1, 2]])
def test_bits_are_those_of_torch(pool: RankPool, ranks: list[int]) -> None:
    assert pool.run(differ_among, ranks) == [[], [], []]


def refusal(group: RankGroup) -> str:
    """DeepSpeed is set up for gloo by then; a group of NCCL would be something else."""
    from moe_serve.parallel import deepspeed_collectives

    try:
        deepspeed_collectives._open_comm("nccl")
    except ConfigError as error:
        return str(error)
    return ""


@needs_deepspeed
def test_a_group_of_gpus_is_refused(pool: RankPool) -> None:
    (message,) = pool.run(refusal, size=1)
    assert "nccl" in message and "--comm-backend deepspeed" in message


def test_without_deepspeed_the_error_says_how_to_install_it(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_serve.parallel import deepspeed_collectives

    for name in ("deepspeed", "deepspeed.comm"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(ConfigError, match=r"pip install 'moe-serve\[deepspeed\]'"):
        deepspeed_collectives._open_comm("gloo")


ALONE = """
import logging, sys, tempfile
import torch, torch.distributed as dist
from moe_serve.parallel.deepspeed_collectives import DeepSpeedCollectives
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    def held():
        return sys.getrefcount(dist.group.WORLD)
    before, level, handlers = held(), logging.root.level, list(logging.root.handlers)
    x = torch.ones(2, 3)
    out = torch.empty_like(x)
    for _ in range(2):
        collectives = DeepSpeedCollectives(dist.group.WORLD)
        collectives.all_gather(out, x)
        collectives.reduce_scatter(out, x)
        collectives.gather([out], x)
        collectives.close()
    del collectives
    # Whoever keeps the group keeps gloo's threads, which abort the process at its end.
    assert held() == before, (held(), before)
    assert (logging.root.level, logging.root.handlers) == (level, handlers)
    dist.destroy_process_group()
"""


@needs_deepspeed
def test_it_prints_nothing_and_keeps_nothing_of_the_process_group() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "default", "-c", ALONE],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def two_logs(group: RankGroup) -> tuple[list[tuple[str, int, int, int]], ...]:
    """What DeepSpeed's log and ours tell of the same calls: (its operation, size class, calls,
    bytes).
    """
    from deepspeed import comm

    process_group = dist.new_group(list(range(group.size)))
    ours = RankGroup(DeepSpeedCollectives(process_group))
    comm.configure(enabled=True, prof_all=True, verbose=False)
    comm.comm.comms_logger.reset_data()
    try:
        for rows in (0, 6, 600):
            x = torch.ones(rows, 7)
            ours.all_gather(x)
            ours.all_gather(x)
            ours.all_to_all(x)
            ours.reduce_scatter(x)
            ours.all_reduce(x)
            ours.sum_disjoint(x)
            ours.gather(x)
        theirs = comm.comm.comms_logger.get_raw_data()
    finally:
        comm.configure(enabled=False, prof_all=False)
    summed: dict[tuple[str, int], tuple[int, int]] = {}

    def add(operation: str, least_bytes: int, calls: int, num_bytes: int) -> None:
        before = summed.get((operation, least_bytes), (0, 0))
        summed[operation, least_bytes] = (before[0] + calls, before[1] + num_bytes)

    def listed() -> list[tuple[str, int, int, int]]:
        found = sorted((*key, *value) for key, value in summed.items())
        summed.clear()
        return found

    for operation, sizes in theirs.items():
        for size, (calls, *_) in sizes.items():
            add(operation, 2 ** (size.bit_length() - 1) if size else 0, calls, calls * size)
    told_by_deepspeed = listed()
    for row in ours.log.rows():
        add(MADE_OF[row.operation], row.least_bytes, row.calls, row.message_bytes)
    return told_by_deepspeed, listed()


# Which of DeepSpeed's operations each of ours is made of.
MADE_OF = {
    "all_gather": "all_gather_into_tensor",
    "all_reduce": "all_gather_into_tensor",
    "all_to_all": "all_to_all_single",
    "reduce_scatter": "all_to_all_single",
    "sum_disjoint": "all_to_all_single",
    "gather": "gather",
}


@needs_deepspeed
def test_its_log_and_ours_count_the_same_calls_and_bytes(pool: RankPool) -> None:
    for theirs, ours in pool.run(two_logs):
        assert theirs == ours
        assert sum(calls for _, _, calls, _ in ours) == 3 * 7
