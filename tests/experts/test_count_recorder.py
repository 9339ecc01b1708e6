from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve import count_recorder
from moe_serve.count_recorder import CountRecorder
from moe_serve.expert_monitor import LoadSlice


def part(steps: int, shape: tuple[int, int, int] = (1, 3, 2)) -> LoadSlice:
    """Each step adds one to each number."""
    return LoadSlice(
        steps=steps,
        seconds=float(steps),
        tokens_C=np.full(3, steps),
        counts_LCE=np.full(shape, steps),
        rows_LR=np.full((shape[0], 2), steps),
    )


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count_recorder, "MOST_WINDOWS", 8)


@pytest.mark.usefixtures("few")
@given(window=st.integers(1, 7), parts=st.lists(st.integers(1, 7), max_size=99))
def test_windows_are_as_long_as_asked_for_until_there_are_too_many(
    window: int, parts: list[int]
) -> None:
    recorder = CountRecorder(window)
    total = 0
    for wanted in parts:
        # As the monitor collects: never beyond the end of the open window.
        steps = min(wanted, recorder.num_steps_left)
        assert steps > 0
        recorder.add(part(steps))
        total += steps
    windows = recorder.windows
    lengths = [each.steps for each in windows]
    assert sum(lengths) == total and len(windows) <= 8
    longest = lengths[0] if len(lengths) > 1 else window
    assert longest % window == 0 and (longest == window or total >= 8 * window)
    assert set(lengths[:-1]) <= {longest} and all(length <= longest for length in lengths[1:])
    for each in windows:
        for array in (each.tokens_C, each.counts_LCE, each.rows_LR):
            assert (array == each.steps).all()
    assert recorder.window == window


def test_memory_does_not_grow_with_the_model() -> None:
    """A window of counts of a large model is larger, so that there are fewer."""
    shape = (64, 3, 256)
    size = part(1, shape).counts_LCE.nbytes
    recorder = CountRecorder(1)
    for _ in range(1000):
        recorder.add(part(1, shape))
        assert len(recorder.windows) * size <= count_recorder.MOST_BYTES
    assert sum(each.steps for each in recorder.windows) == 1000
    assert len(recorder.windows) * size >= count_recorder.MOST_BYTES // 4


def test_one_window_too_large_for_the_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count_recorder, "MOST_BYTES", 7)
    recorder = CountRecorder(3)
    for _ in range(17):
        recorder.add(part(1))
    assert sum(each.steps for each in recorder.windows) == 17
    assert len(recorder.windows) <= 2
