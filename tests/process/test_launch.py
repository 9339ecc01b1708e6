"""How ranks are started and their end is told, without starting any."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from moe_serve import launch, wire
from moe_serve.config import EngineConfig, ServeConfig
from moe_serve.engine_client import EngineClient
from moe_serve.errors import ConfigError
from moe_serve.messages import EngineFailed, EngineReady
from moe_serve.parallel import world
from moe_serve.parallel.degrees import Degrees, local_seat
from moe_serve.parallel.network import address_towards
from moe_serve.rank_setup import RankSetup, pick_device

READY = EngineReady(
    architecture="Qwen3MoeForCausalLM",
    vocab_size=4096,
    max_model_len=1024,
    block_size=16,
    num_kv_blocks=64,
    kv_cache_bytes=2**20,
    num_parameters=2,
    num_active_parameters=1,
    dtype="bfloat16",
    device="cpu",
    num_threads=1,
    load_seconds=0.5,
)


@pytest.fixture(autouse=True)
def _unchanged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `launch.run` does to its process, which is a process of its own."""
    monkeypatch.setattr(RankSetup, "make", lambda *args: None)
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    handler, logger = signal.getsignal(signal.SIGTERM), logging.getLogger("moe_serve")
    level, handlers = logger.level, list(logger.handlers)
    yield
    signal.signal(signal.SIGTERM, handler)
    logger.setLevel(level)
    logger.handlers[:] = handlers
    os.environ.pop("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", None)


def run(monkeypatch: pytest.MonkeyPatch, agent: Any, **options: Any) -> int:
    monkeypatch.setattr(launch, "launch_agent", agent)
    return launch.run(ServeConfig(tensor_parallel_size=2, **options), [], Degrees(2, 1))


@pytest.mark.parametrize(
    ("exit_code", "code", "words"), [(2, 2, ""), (1, 1, ""), (-9, 1, "rank 1 (process 7) was")]
)
def test_a_rank_that_could_not_tell_of_its_end_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    exit_code: int,
    code: int,
    words: str,
) -> None:
    failure = ProcessFailure(local_rank=1, pid=7, exitcode=exit_code, error_file="")

    def fail(*args: object) -> None:
        raise ChildFailedError("serve", {1: failure})

    assert run(monkeypatch, fail) == code
    told = capsys.readouterr().err
    assert words in told and bool(words) == bool(told)


@pytest.mark.parametrize(("given", "patience"), [(45.0, "55"), (float("inf"), "1000010")])
def test_the_launcher_is_more_patient_than_the_server(
    monkeypatch: pytest.MonkeyPatch, given: float, patience: str
) -> None:
    seen: list[Any] = []
    assert run(monkeypatch, lambda *args: seen.append(args), shutdown_timeout=given) == 0
    assert os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == patience
    # The host's own name need not lead anywhere.
    assert seen[0][0].local_addr == "127.0.0.1"


def test_a_signal_before_there_are_ranks_ends_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def signalled(*args: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, signalled)
    assert ended.value.code == 0


def test_the_first_reason_of_an_engines_end_stays() -> None:
    async def hear(*messages: Any) -> EngineClient:
        client = EngineClient(EngineConfig())
        inbox: asyncio.Queue[bytes] = asyncio.Queue()
        for message in messages:
            inbox.put_nowait(wire.encode(message))
        client._inbox = type("Inbox", (), {"recv": inbox.get})()  # type: ignore[assignment]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client._receive(), 0.05)
        return client

    mistake = EngineFailed(message="a mistake", is_config=True)
    fault = EngineFailed(message="a fault")
    for first, second in ((mistake, fault), (fault, mistake)):
        client = asyncio.run(hear(first, second, READY))
        assert (client.status, client.failure) == ("dead", first.message)
        assert client.failed_by_config == first.is_config


def test_a_first_host_without_a_way_to_it_is_a_mistake_of_the_user() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    for host in ("no.such.host.invalid", "::1"):
        with pytest.raises(ConfigError, match=f"MASTER_ADDR '{host}'"):
            address_towards(host)


def test_ranks_whose_launcher_is_gone_do_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        for name, value in (
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", str(nobody.getsockname()[1])),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ):
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(world, "CONNECT_SECONDS", 0.2)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        began = time.monotonic()
        with pytest.raises(dist.DistNetworkError):
            world.join(local_seat(1, 2), torch.device("cpu"), 5)
        assert time.monotonic() - began < 10


def test_too_few_devices_are_met_by_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for rank in range(3):
        with pytest.raises(ConfigError, match="3 ranks on this host, .* 2 CUDA devices"):
            pick_device("auto", local_seat(rank, 3))
    assert pick_device("auto", local_seat(1, 2)) == torch.device("cuda:1")
