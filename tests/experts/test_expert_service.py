"""What the engine's loop does about experts, without an engine: faults that must not end it."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_serve.eplb_config import EplbConfig
from moe_serve.expert_monitor import ExpertMonitor, ModelFacts
from moe_serve.expert_service import ExpertService
from moe_serve.experts.files.load_files import read_load
from moe_serve.experts.load import LoadCounts
from moe_serve.experts.moving.migration import Copies
from moe_serve.experts.placement import LayerPlacement, Placement
from moe_serve.experts.recording import PHASES
from moe_serve.messages import (
    CallAnswer,
    EngineCall,
    LoadCall,
    PlacementCall,
    RebalanceCall,
    RecordCall,
)
from moe_serve.rank_messages import Staging
from moe_serve.rebalancer import Rebalancer
from moe_serve.step import StepPlan

NUM_LAYERS, NUM_EXPERTS, NUM_RANKS = 3, 8, 2


class Mover:
    """Ranks that are done with each part when they are asked for the second time."""

    def __init__(self) -> None:
        self.num_asked = 0

    def stage(self, copies: Copies, timeout: float) -> None:
        self.num_asked = 0

    def staging(self) -> Staging:
        self.num_asked += 1
        return Staging(is_done=self.num_asked > 1, num_bytes=7)

    def switch(self, placement: Placement, layers: list[int]) -> None:
        pass

    def drop_staged(self) -> None:
        pass

    def checksums(self) -> list[list[list[int]]]:
        return [[[0] * 12] * NUM_LAYERS] * NUM_RANKS


class Ranks:
    """Their counters: each step adds a skewed load."""

    def __init__(self) -> None:
        shape = (NUM_LAYERS, len(PHASES), NUM_EXPERTS)
        self.counts = LoadCounts(np.zeros(shape, np.int64), np.zeros((NUM_LAYERS, 2), np.int64))
        self._random = np.random.default_rng(0)

    def step(self) -> None:
        added = self._random.zipf(1.5, self.counts.counts_LCE.shape)
        self.counts = LoadCounts(self.counts.counts_LCE + added, self.counts.rows_LR + 1)


class Loop:
    """The engine's loop, as far as the service sees it."""

    def __init__(
        self,
        folder: Path,
        placement: Placement | None = None,
        mover: Mover | None = None,
        **config: Any,
    ) -> None:
        self.ranks = Ranks()
        facts = ModelFacts(name="tiny", top_k=2, expert_bytes=7, cost=None, has_rows=True)
        monitor = ExpertMonitor(lambda: self.ranks.counts, facts, window_size=100)
        eplb = EplbConfig(**config)
        placement = placement or Placement.make(NUM_LAYERS, NUM_EXPERTS, NUM_RANKS)
        self.service = ExpertService(monitor, placement, eplb, mover, folder)

    def step(self) -> None:
        self.service.before_step()
        self.ranks.step()
        self.service.after_step(StepPlan(chunks=()), [], 0.001)

    def ask(self, message: EngineCall) -> CallAnswer:
        self.service.call(message)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if answers := self.service.take_answers():
                (answer,) = answers
                assert answer.call_id == message.call_id
                return answer
            self.service.before_step()
        raise AssertionError("no answer")


def record(action: Any, **fields: Any) -> RecordCall:
    return RecordCall(call_id=3, action=action, **fields)


def test_a_goal_that_the_budget_does_not_reach_does_not_end_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a placement by hand, of which each node has half of each group."""
    lopsided = Placement((LayerPlacement(((0, 1, 4, 5), (2, 3, 6, 7))),) * NUM_LAYERS)
    loop = Loop(
        tmp_path, lopsided, Mover(), step_interval=1, num_nodes=2, num_groups=2, max_moves=1,
        use_async=False,
    )  # fmt: skip
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        loop.step()
    assert "experts stay where they are: 1 moves at most" in caplog.text
    answer = loop.ask(RebalanceCall(call_id=1))
    assert answer.is_client_fault and answer.error is not None and "1 moves" in answer.error
    assert loop.service.placement == lopsided


def test_a_rebalance_goes_on_while_no_request_runs(tmp_path: Path) -> None:
    loop = Loop(tmp_path, mover=Mover(), step_interval=0, min_gain=1)
    target = [[7, 6, 5, 4, 3, 2, 1, 0]] * NUM_LAYERS
    loop.service.call(RebalanceCall(call_id=1, slots=target))
    assert loop.service.is_busy and not loop.service.take_answers()
    loop.service.call(RebalanceCall(call_id=2))
    (refused,) = loop.service.take_answers()
    assert refused.call_id == 2 and refused.is_client_fault
    assert refused.error is not None and "already" in refused.error
    while loop.service.is_busy:
        loop.service.before_step()
    (done,) = loop.service.take_answers()
    assert done.call_id == 1 and done.body is not None and done.body["outcome"] == "done"
    assert done.body["num_moves"] == 8 * NUM_LAYERS
    told = loop.ask(PlacementCall(call_id=4)).body
    assert told is not None and told["slots"] == target


def test_what_is_not_enabled_is_refused_with_the_fix(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    for message in (RebalanceCall(call_id=1), PlacementCall(call_id=2, verify=True)):
        answer = loop.ask(message)
        assert answer.is_client_fault and answer.error is not None
        assert "--enable-eplb" in answer.error


def test_a_model_without_experts_is_told_plainly_and_counts_nothing(tmp_path: Path) -> None:
    nothing = LoadCounts(np.zeros((0, 3, 0), np.int64), np.zeros((0, 1), np.int64))
    facts = ModelFacts(name="dense", top_k=0, expert_bytes=0, cost=None, has_rows=False)
    monitor = ExpertMonitor(lambda: nothing, facts, window_size=1)
    service = ExpertService(monitor, None, EplbConfig(), None, tmp_path)
    for _ in range(33):
        service.before_step()
        service.after_step(StepPlan(chunks=()), [], 0.001)
    assert service.take_stats() is None
    calls = [LoadCall(call_id=1), PlacementCall(call_id=2), RebalanceCall(call_id=3)]
    for message in [*calls, record("start")]:
        service.call(message)
        (answer,) = service.take_answers()
        assert answer.is_client_fault and answer.error == "the model has no layers with experts"


def test_a_placement_of_a_great_many_layers_is_refused_at_once(tmp_path: Path) -> None:
    loop = Loop(tmp_path, mover=Mover())
    # Not one of them is looked at.
    answer = loop.ask(RebalanceCall(call_id=1, slots=[[99]] * 100_000))
    assert answer.is_client_fault and answer.error is not None
    assert "slots of 100000 layers; here are 3 with [4, 4] slots by rank" in answer.error


@pytest.mark.parametrize("action", ["stop", "dump"])
def test_nothing_is_recorded_until_that_is_asked_for(tmp_path: Path, action: str) -> None:
    loop = Loop(tmp_path)
    loop.step()
    answer = loop.ask(record(action))
    assert answer.is_client_fault and answer.error is not None
    assert "start a recording first" in answer.error and not list(tmp_path.iterdir())


def test_a_dump_that_cannot_be_written_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    loop = Loop(tmp_path / "file" / "deeper")
    loop.step()
    assert loop.ask(record("start", window=2)).body == {"is_recording": True}
    before = loop.ranks.counts.counts_LE
    for _ in range(7):
        loop.step()
    for _ in range(2):
        answer = loop.ask(record("dump"))
        assert answer.body is None and answer.error is not None
        assert str(tmp_path / "file") in answer.error and "Not a directory" in answer.error
    loop.step()
    after = loop.ranks.counts.counts_LE
    assert loop.ask(record("stop")).body == {"is_recording": False}
    # Mended: what was recorded all along is there, in a folder that is made for it.
    (tmp_path / "file").unlink()
    told = loop.ask(record("dump")).body
    assert told is not None and told["is_recording"] is False and told["num_windows"] == 4
    (file,) = (tmp_path / "file" / "deeper").iterdir()
    assert told["path"] == str(file)
    recording = read_load(file)
    assert (recording.counts_LE == after - before).all()
    assert recording.steps_W.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("style", ["json", "npz"])
def test_windows_go_on_over_a_rebalance(tmp_path: Path, style: str) -> None:
    loop = Loop(tmp_path, mover=Mover(), step_interval=0)
    loop.ask(record("start", window=3))
    for number in range(7):
        if number == 4:
            loop.ask(RebalanceCall(call_id=1, slots=[[7, 6, 5, 4, 3, 2, 1, 0]] * NUM_LAYERS))
        loop.step()
    told = loop.ask(record("dump", style=style)).body
    assert told is not None and told["is_recording"]
    recording = read_load(told["path"])
    # A rebalance collects what was counted; the window goes on all the same.
    assert recording.steps_W.tolist() == [3, 3, 1]
    assert (recording.counts_LE == loop.ranks.counts.counts_LE).all()
    assert recording.placement == loop.service.placement
    assert recording.placement is not None and recording.placement.slots_LP[0, 0] == 7


def test_a_second_recording_does_not_begin_within_one(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.ask(record("start"))
    loop.step()
    answer = loop.ask(record("start", mode="routes"))
    assert answer.is_client_fault and answer.error is not None and "stop it first" in answer.error
    told = loop.ask(record("dump", style="json")).body
    assert told is not None and told["num_windows"] == 1


def test_no_plan_is_made_for_a_rebalance_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests wait for a plan: whoever asks again and again must not slow them."""
    loop = Loop(tmp_path, mover=Mover(), step_interval=0)
    loop.service.call(RebalanceCall(call_id=1, slots=[[7, 6, 5, 4, 3, 2, 1, 0]] * NUM_LAYERS))
    monkeypatch.delattr(Rebalancer, "plan")
    loop.service.call(RebalanceCall(call_id=2))
    (refused,) = loop.service.take_answers()
    assert refused.is_client_fault and refused.error is not None and "already" in refused.error


def test_rebalances_by_itself_come_every_so_many_steps_and_where_they_gain_enough(
    tmp_path: Path,
) -> None:
    for min_gain, outcome in ((1, "unneeded"), (-1, "done")):
        loop = Loop(tmp_path, mover=Mover(), step_interval=5, min_gain=min_gain, use_async=False)
        rebalancer = loop.service.rebalancer
        assert rebalancer is not None
        numbers = []
        for _ in range(17):
            loop.step()
            numbers.append(rebalancer.outcomes[outcome])
        # Before the 6th step for the first time.
        assert numbers == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 2
        assert rebalancer.outcomes.total() == 3


def test_replicas_that_differ_are_told_and_where(tmp_path: Path) -> None:
    mover = Mover()
    placement = Placement.make(NUM_LAYERS, NUM_EXPERTS, NUM_RANKS, num_redundant=2)
    sums = [[list(layer.experts[rank]) for layer in placement.layers] for rank in range(NUM_RANKS)]
    mover.checksums = lambda: sums  # type: ignore[method-assign]
    loop = Loop(tmp_path, placement, mover)
    told = loop.ask(PlacementCall(call_id=1, verify=True)).body
    assert told is not None and told["checksums"] == [list(range(NUM_EXPERTS))] * NUM_LAYERS
    assert placement.layers[2].experts[1][4] == 0
    sums[1][2][4] = 99
    answer = loop.ask(PlacementCall(call_id=2, verify=True))
    assert answer.error is not None
    assert "layer 2: rank 1 holds other weights of expert 0" in answer.error


def test_a_full_recording_of_routes_asks_for_no_more_and_makes_room_for_another(
    tmp_path: Path,
) -> None:
    """As long as routes are asked for, no step is a captured one."""
    loop = Loop(tmp_path)
    assert not loop.service.records_routes
    assert loop.ask(record("start", mode="routes")).body == {"is_recording": True}
    assert loop.service.records_routes
    recorder = loop.service._recorder._routes
    assert recorder is not None
    recorder.max_tokens = -1
    loop.service.after_step(StepPlan(chunks=(), records_routes=True), [], 0.001)
    assert recorder.is_full and not loop.service.records_routes
    assert loop.ask(record("start")).body == {"is_recording": True}
