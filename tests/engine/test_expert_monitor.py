"""The sliding window of counts, without ranks: it keeps to its length, and to its memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moe_serve.expert_monitor import COLLECT_STEPS, MANY_SLICES, ExpertMonitor, ModelFacts
from moe_serve.experts.load import LoadCounts
from moe_serve.experts.placement import Placement
from moe_serve.experts.recording import PHASES
from moe_serve.step import StepPlan

FACTS = ModelFacts(name="tiny", top_k=2, expert_bytes=7, cost=None, has_rows=True)


class Ranks:
    """Counters that grow by one a step."""

    def __init__(self, window_size: int) -> None:
        self.num_steps = 0
        self.monitor = ExpertMonitor(self.read, FACTS, window_size=window_size)

    def read(self) -> LoadCounts:
        counts_LCE = np.full((2, len(PHASES), 3), self.num_steps, dtype=np.int64)
        return LoadCounts(counts_LCE, counts_LCE[:, 0, :2].copy())

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.num_steps += 1
            self.monitor.after_step(StepPlan(chunks=()), 0.5)


@pytest.mark.parametrize("window_size", [1, 5, 64, 100, 1000, 12345])
@pytest.mark.parametrize("lengths", [[1], [7, 1, 32], [31, 2], [100]])
def test_a_window_has_its_length_and_few_slices_however_often_it_is_asked(
    window_size: int, lengths: list[int]
) -> None:
    ranks = Ranks(window_size)
    monitor = ranks.monitor
    longest = max(min(COLLECT_STEPS, max(lengths)), window_size // MANY_SLICES)
    for length in itertools.islice(itertools.cycle(lengths), 3000 // max(lengths)):
        ranks.run(length)
        monitor.collect()
        window = monitor.window
        assert min(window_size, ranks.num_steps) <= window.steps < window_size + longest
        assert (window.counts_LCE == window.steps).all() and (window.rows_LR == window.steps).all()
        assert window.seconds == 0.5 * window.steps
        assert len(monitor._slices) <= 2 * MANY_SLICES + 2
        recording = monitor.recording(None)
        assert (recording.counts_LE == len(PHASES) * ranks.num_steps).all()
        assert recording.steps_W.tolist() == [ranks.num_steps - window.steps, window.steps]


def test_rows_from_before_a_move_are_kept_apart_until_the_window_has_passed_them() -> None:
    ranks = Ranks(100)
    monitor, placement = ranks.monitor, Placement.make(2, 3, 2)

    def lengths() -> tuple[list[int], int | None]:
        recording = monitor.recording(placement)
        assert recording.num_steps == monitor.window.steps + recording.steps_W[0]
        assert (recording.rows_WLR[-1] == recording.steps_W[-1]).all()
        return recording.steps_W.tolist(), recording.windows_placed

    ranks.run(64)
    assert lengths() == ([0, 64], 1)
    ranks.run(7)
    # What was not collected yet belongs to the placement before.
    monitor.note_move()
    assert lengths() == ([0, 71, 0], 1)
    ranks.run(32)
    assert lengths() == ([0, 71, 32], 1) and monitor.stats is not None
    monitor.note_move()
    ranks.run(32)
    before, rest, since = lengths()[0]
    assert (since, before + rest) == (32, 103)
    ranks.run(96)
    assert lengths() == ([103, 128], 1)
    assert monitor.recording(None).windows_placed is None
