"""Which collectives ranks get, and what they are told where they cannot have those they named."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_serve import LLM, SamplingParams
from moe_serve.errors import ConfigError
from moe_serve.parallel.comm_backend import check_any_shared, check_comm_backend, make_collectives
from moe_serve.parallel.group import RankGroup
from moe_serve.parallel.layout import SINGLE_RANK, RankLayout
from moe_serve.parallel.shm.library import load
from tests.rank_pool import RankPool

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TWO_RANKS = RankLayout(tensor_size=2)
TWO_LANES = RankLayout(data_size=2)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3) as pool:
        yield pool


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    load.cache_clear()
    yield
    load.cache_clear()


@pytest.mark.parametrize("layout", [SINGLE_RANK, TWO_LANES])
@pytest.mark.parametrize("name", ["gloo", "deepspeed", "shm"])
def test_a_choice_without_effect_is_refused(name: Any, layout: RankLayout) -> None:
    with pytest.raises(
        ConfigError, match=f"--comm-backend {name} has no effect where no two ranks"
    ):
        check_comm_backend(name, layout, "cpu")
    check_comm_backend("auto", layout, "cpu")


def test_the_engine_refuses_it_before_it_loads() -> None:
    with pytest.raises(ConfigError, match="--comm-backend gloo has no effect"):
        LLM("builtin", comm_backend="gloo")


@pytest.mark.parametrize("name", ["gloo", "deepspeed", "shm"])
def test_on_a_gpu_there_is_nothing_to_choose(name: Any) -> None:
    message = f"--comm-backend {name} moves tensors between CPUs, but the model runs on cuda; use a"
    with pytest.raises(ConfigError, match=message):
        check_comm_backend(name, TWO_RANKS, "cuda")
    check_comm_backend("auto", TWO_RANKS, "cuda")


def test_without_a_compiler_only_auto_goes_on(no_compiler: None) -> None:
    with pytest.raises(
        ConfigError, match="--comm-backend shm: no C.. compiler found.*use auto, or"
    ):
        check_comm_backend("shm", TWO_RANKS, "cpu")
    check_comm_backend("auto", TWO_RANKS, "cpu")


def made(
    group: RankGroup, name: Any, hosts: list[str], unable: list[int], cache: str
) -> tuple[str, str | None]:
    """On a rank: what it got, and why. `unable`: ranks without a compiler and with another cache"""
    torch_collectives: Any = group._collectives
    with pytest.MonkeyPatch.context() as patch:
        if group.rank in unable:
            patch.setenv("CXX", "no-such-compiler")
            patch.setenv("XDG_CACHE_HOME", cache)
        load.cache_clear()
        collectives, reason = make_collectives(name, torch_collectives._group, hosts, 20.0, "cpu")
    load.cache_clear()
    collectives.close()
    return collectives.name, reason


@pytest.mark.dist
@pytest.mark.parametrize("name", ["auto", "shm"])
@pytest.mark.parametrize("unable", [[0], [2], [0, 1, 2]])
def test_all_ranks_of_a_group_use_the_same(
    pool: RankPool, name: Any, unable: list[int], tmp_path: Path
) -> None:
    found = pool.run(made, name, ["a"] * 3, unable, str(tmp_path))
    reason = "no C++ compiler found (no-such-compiler); install one, for example g++"
    assert found == [("gloo", reason)] * 3
    assert pool.run(made, name, ["a"] * 3, [], "") == [("shm", None)] * 3


@pytest.mark.dist
def test_a_group_over_two_hosts_shares_no_memory_and_one_within_a_host_does(pool: RankPool) -> None:
    hosts = ["a", "a", "b"]
    assert pool.run(made, "auto", hosts, [], "") == [("gloo", "its ranks are on several hosts")] * 3
    assert pool.run(made, "auto", hosts, [], "", size=2) == [("shm", None)] * 2
    assert pool.run(made, "gloo", hosts, [], "", size=2) == [("gloo", None)] * 2


def refused(group: RankGroup, reasons: list[list[str | None]]) -> str:
    try:
        check_any_shared("shm", reasons[group.rank])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_where_no_group_shares_memory_all_ranks_say_why(pool: RankPool) -> None:
    reason = "its ranks are on several hosts"
    told = f"--comm-backend shm: {reason}; use auto, or gloo"
    assert pool.run(refused, [[reason]] * 3) == [told] * 3
    assert pool.run(refused, [[None, reason], [None, reason], [reason]]) == [""] * 3


@pytest.mark.dist
def test_the_same_tokens_by_gloo_and_by_shared_memory(caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    answers = []
    for name in ("gloo", "shm"):
        caplog.clear()
        with (
            caplog.at_level(logging.INFO, logger="moe_serve"),
            LLM("builtin", comm_backend=name, **options) as llm,
        ):
            results = llm.generate([[1, 2, 3], list(range(17)), [5] * 129], GREEDY)
        answers.append([result.outputs[0].token_ids for result in results])
        lines = [line for line in caplog.messages if "exchange tensors" in line]
        assert lines == [
            f"the ranks of the {group} exchange tensors by {name}" for group in ("lane", "experts")
        ]
    assert answers[0] == answers[1]
