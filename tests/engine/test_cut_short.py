"""What Ctrl-C cuts short between ranks must not be taken for whole by what comes next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_serve import ranked_executor
from moe_serve.errors import EngineDeadError
from moe_serve.experts.bank import ExpertBank
from moe_serve.experts.moving.staging import ExpertStaging
from moe_serve.experts.placement import Placement
from moe_serve.parallel.layout import RankLayout
from moe_serve.rank_messages import RankReady
from moe_serve.ranked_executor import RankedExecutor
from moe_serve.step import StepPlan


class Interrupted:
    """Links, runner and experts of rank 0, which Ctrl-C meets; notes what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.runner = self.load = self

    def send(self, rank: int, message: Any) -> None:
        self.sent.append(message)

    def send_all(self, message: Any) -> None:
        self.send(0, message)

    def _interrupt(self, *_: Any) -> Any:
        raise KeyboardInterrupt

    run = read = stage = staging = switch = drop_staged = checksums = forget_warm_up = _interrupt
    communication = _interrupt


PLACEMENT = Placement.make(1, 4, 2)
EXCHANGES: dict[str, Callable[[RankedExecutor], Any]] = {
    "a step": lambda ranks: ranks.run(StepPlan(chunks=())),
    "counts": lambda ranks: ranks.read_load(),
    "communication": lambda ranks: ranks.read_communication(),
    "the end of a warm-up": lambda ranks: ranks.forget_warm_up(1),
    "a start": lambda ranks: ranks.stage(((), ()), 1.0),
    "a question how far it is": lambda ranks: ranks.staging(),
    "a switch": lambda ranks: ranks.switch(PLACEMENT, [0]),
    "a drop": lambda ranks: ranks.drop_staged(),
    "checksums": lambda ranks: ranks.checksums(),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_nothing_follows_what_was_cut_short(name: str) -> None:
    """Else rank 1 would compute with other experts than rank 0, or answer the question before."""
    parts: Any = Interrupted()
    layout = RankLayout(rank=0, tensor_size=2, expert_parallel=True)
    executor = RankedExecutor(parts, parts, layout, parts)
    with pytest.raises(KeyboardInterrupt):
        EXCHANGES[name](executor)
    assert len(parts.sent) == 1
    for exchange in EXCHANGES.values():
        with pytest.raises(EngineDeadError, match="cut short"):
            exchange(executor)
    assert len(parts.sent) == 1


class HalfLoaded:
    """Setup and links of rank 0; another rank fails at the end of its load."""

    num_blocks = 7

    def receive_all(self, kind: type) -> list[Any]:
        if kind is RankReady:
            raise EngineDeadError("rank 1 ended")
        return [self]

    def _nothing(self, *_: Any, **__: Any) -> int:
        return 0

    send_all = ranks = load = num_fitting_blocks = make_runner = _nothing


def test_a_load_that_fails_leaves_no_thread_that_holds_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a notebook, which goes on after it."""
    bank = ExpertBank(2, 4, 3, "silu", torch.float32, torch.device("cpu"))
    before = threading.enumerate()
    experts = ExpertStaging([bank], 0, "127.0.0.1")
    monkeypatch.setattr(ranked_executor, "make_rank_experts", lambda *_: experts)
    parts: Any = HalfLoaded()
    with pytest.raises(EngineDeadError, match="rank 1 ended"):
        ranked_executor._load(parts, parts, parts, lambda *_: None)
    assert threading.enumerate() == before
