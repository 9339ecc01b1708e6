"""The sliding window of counts, without ranks: it keeps to its length, and to its memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moe_serve.expert_monitor import COLLECT_STEPS, MANY_SLICES, ExpertMonitor, ModelFacts
from moe_serve.experts.load import LoadCounts
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
