from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from moe_serve import rank_setup
from moe_serve.config import EngineConfig
from moe_serve.errors import ConfigError
from moe_serve.kv_pool import gpu_budget, pool_blocks
from moe_serve.memory_profile import largest_step, num_blocks_of
from moe_serve.rank_setup import RankSetup
from moe_serve.ranks import SINGLE_RANK


@pytest.mark.parametrize(
    ("num_tokens", "num_sequences", "max_model_len", "lengths"),
    [
        (10, 4, 100, [3, 3, 2, 2]),
        (3, 64, 100, [1, 1, 1]),
        (2048, 1, 300, [299]),
        (7, 1, 8, [7]),
        (9, 2, 4, [3, 3]),
    ],
)
@pytest.mark.parametrize("num_lanes", [1, 3])
@pytest.mark.parametrize("block_size", [1, 16])
def test_the_largest_step_fills_the_token_budget_of_every_lane(
    num_tokens: int,
    num_sequences: int,
    max_model_len: int,
    lengths: list[int],
    num_lanes: int,
    block_size: int,
) -> None:
    plan = largest_step(
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        max_model_len=max_model_len,
        block_size=block_size,
        num_lanes=num_lanes,
    )
    for lane in range(num_lanes):
        chunks = plan.of_lane(lane).chunks
        assert sorted((c.num_tokens for c in chunks), reverse=True) == lengths
        assert all(chunk.samples for chunk in chunks)


def test_the_largest_step_runs_on_a_pool_of_its_own(random_model: Path) -> None:
    setup = RankSetup.make(EngineConfig(model=str(random_model), num_threads=1), None)
    plan = largest_step(
        num_tokens=30, num_sequences=4, max_model_len=64, block_size=16, num_lanes=1
    )
    model = setup.load(SINGLE_RANK, None, show_progress=False)
    result = setup.make_runner(model, num_blocks_of(plan)).run(plan)
    assert result is not None and result.failures == {}
    assert all(one.sampled is not None for one in result.results)


@pytest.mark.parametrize(
    ("free", "total", "step", "share", "left"),
    [(60, 100, 10, 0.9, 40), (100, 100, 0, 1.0, 100), (5, 100, 10, 0.9, 0), (60, 100, 0, 0.5, 10)],
)
def test_the_pool_gets_what_weights_and_the_largest_step_leave(
    free: int, total: int, step: int, share: float, left: int
) -> None:
    assert gpu_budget(free, total, step, share) == left


def test_memory_that_the_largest_step_gave_back_counts_as_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = 30

    def free_it() -> None:
        nonlocal kept
        kept = 0

    monkeypatch.setattr(torch.cuda, "empty_cache", free_it)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 - kept, 100))
    config = EngineConfig(model="", gpu_memory_utilization=0.9)
    assert pool_blocks(config, 2, torch.device("cuda"), step_bytes=10) == 20


def test_a_step_that_does_not_fit_is_refused_by_name(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object) -> int:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(rank_setup, "peak_bytes", too_large)
    config = EngineConfig(model=str(random_model), num_threads=1, max_num_batched_tokens=30)
    setup = RankSetup.make(config, None)
    model = setup.load(SINGLE_RANK, None, show_progress=False)
    on_gpu = dataclasses.replace(setup, device=torch.device("cuda"))
    monkeypatch.setattr(RankSetup, "make_runner", lambda *_: None)
    with pytest.raises(ConfigError, match="30 tokens .* --max-num-batched-tokens"):
        on_gpu.num_fitting_blocks(model)
