"""Collects what ranks count of expert choices: windows of steps, and totals."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from moe_serve.experts.analysis import load_statistics
from moe_serve.experts.load import LoadCounts
from moe_serve.experts.placement import Placement
from moe_serve.experts.recording import PHASES, Ints, LoadRecording
from moe_serve.experts.step_cost import StepCost
from moe_serve.messages import ExpertStats
from moe_serve.step import StepPlan

# Shapes: C phases, L MoE layers, E logical experts, R ranks.

# Steps between two collections. One copies the counters of all ranks to the host, so that a step
# pays a small part of that.
COLLECT_STEPS = 32
# What a window is made of: a slice holds counts of all layers and experts, and a step may be one.
MANY_SLICES = 64
# What `expert_hot_share` tells of.
HOT_COUNTS = (1, 4, 8)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadSlice:
    """What some steps in a row counted. Arrays as in `LoadRecording`."""

    steps: int
    seconds: float
    tokens_C: Ints
    counts_LCE: Ints
    rows_LR: Ints


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a recording tells of the model and the machine beside its counts; see there."""

    name: str
    top_k: int
    expert_bytes: int
    cost: StepCost | None
    has_rows: bool


class ExpertMonitor:
    """`read`: what was counted so far on all ranks. `window_size`: steps of the sliding window, to
    within a collection or a small part of it.
    """

    def __init__(
        self, read: Callable[[], LoadCounts], facts: ModelFacts, *, window_size: int
    ) -> None:
        self.facts = facts
        self.on_slice: Callable[[LoadSlice], None] = lambda part: None
        self.stats: ExpertStats | None = None
        self._read = read
        self._window_size = window_size
        self._slices: collections.deque[LoadSlice] = collections.deque()
        self._last = read()
        # Of the slices in the window, and of all that it has passed.
        self._window = self._before = self._nothing()
        # Of the steps since experts moved, while the window holds others too.
        self._since_move: LoadSlice | None = None
        self._steps, self._seconds = 0, 0.0
        self._tokens_C = np.zeros(len(PHASES), dtype=np.int64)

    @property
    def num_experts(self) -> int:
        """Logical ones, of the layer that has most."""
        return int(self._last.counts_LCE.shape[2])

    def after_step(self, plan: StepPlan, seconds: float, *, max_steps: int | None = None) -> None:
        """Collects every `COLLECT_STEPS`, or after `max_steps` where that is sooner."""
        self._steps += 1
        self._seconds += seconds
        lengths = [chunk.phase_lengths for chunk in plan.chunks]
        self._tokens_C += np.array(lengths, dtype=np.int64).reshape(-1, len(PHASES)).sum(0)
        if self._steps >= min(COLLECT_STEPS, max_steps or COLLECT_STEPS):
            self.collect()

    def collect(self) -> None:
        """Take in the steps since the last time. To be called between steps."""
        if not self._steps:
            return
        counts = self._read()
        part = LoadSlice(
            steps=self._steps,
            seconds=self._seconds,
            tokens_C=self._tokens_C,
            counts_LCE=counts.counts_LCE - self._last.counts_LCE,
            rows_LR=counts.rows_LR - self._last.rows_LR,
        )
        self._last = counts
        self._steps, self._seconds = 0, 0.0
        self._tokens_C = np.zeros(len(PHASES), dtype=np.int64)
        self._keep(part)
        self._window = add(self._window, part)
        while self._window.steps - self._slices[0].steps >= self._window_size:
            oldest = self._slices.popleft()
            self._before = add(self._before, oldest)
            self._window = subtract(self._window, oldest)
        if self._since_move is not None:
            self._since_move = add(self._since_move, part)
            if self._since_move.steps >= self._window.steps:
                self._since_move = None
        self.stats = self._make_stats()
        self.on_slice(part)

    def note_move(self) -> None:
        """Experts lie anew from the next step on: rows of ranks from before are those of another
        placement. Loads of experts stay what they are.
        """
        self.collect()
        self._since_move = self._nothing()

    def _keep(self, part: LoadSlice) -> None:
        """Short ones join: who asks for counts, or records short windows, makes many of them."""
        most_steps = self._window_size // MANY_SLICES
        if self._slices and self._slices[-1].steps + part.steps <= most_steps:
            part = add(self._slices.pop(), part)
        self._slices.append(part)

    @property
    def window(self) -> LoadSlice:
        """The newest `window_size` steps that were collected."""
        return self._window

    def recording(self, placement: Placement | None) -> LoadRecording:
        """All since the start, in two windows: the newest steps, and what was before them; or in
        three, where experts moved among the newest: the last one is what came after.
        """
        since_move = self._since_move
        newest = [self._window]
        if since_move is not None:
            newest = [subtract(self._window, since_move), since_move]
        recording = self.to_recording([self._before, *newest], placement)
        return dataclasses.replace(recording, windows_placed=None if placement is None else 1)

    def to_recording(self, parts: list[LoadSlice], placement: Placement | None) -> LoadRecording:
        """Of slices, one a window; without any, of one window without steps."""
        parts = parts or [self._nothing()]
        rows_WLR = np.stack([part.rows_LR for part in parts])
        return LoadRecording(
            model=self.facts.name,
            top_k=self.facts.top_k,
            counts_WCLE=np.stack([part.counts_LCE.swapaxes(0, 1) for part in parts]),
            tokens_WC=np.stack([part.tokens_C for part in parts]),
            steps_W=np.array([part.steps for part in parts], dtype=np.int64),
            seconds_W=np.array([part.seconds for part in parts]),
            rows_WLR=rows_WLR if self.facts.has_rows else rows_WLR[:, :, :0],
            placement=placement,
            expert_bytes=self.facts.expert_bytes,
            cost=self.facts.cost,
        )

    def _nothing(self) -> LoadSlice:
        return LoadSlice(
            steps=0,
            seconds=0.0,
            tokens_C=np.zeros(len(PHASES), dtype=np.int64),
            counts_LCE=np.zeros_like(self._last.counts_LCE),
            rows_LR=np.zeros_like(self._last.rows_LR),
        )

    def _make_stats(self) -> ExpertStats:
        window = self._window
        counts_LE = window.counts_LCE.sum(1)
        even_L, rows_of_ranks = np.ones(1), []
        if self.facts.has_rows:
            under_placement = window if self._since_move is None else self._since_move
            even_L = load_statistics.balancedness(under_placement.rows_LR)
            rows_of_ranks = self._last.rows_LR.sum(0).tolist()
        hottest = [k for k in HOT_COUNTS if k <= counts_LE.shape[1]]
        return ExpertStats(
            balancedness_mean=float(even_L.mean()),
            balancedness_min=float(even_L.min()),
            entropy=float(load_statistics.entropy(counts_LE).mean()),
            hot_shares={k: float(load_statistics.hot_share(counts_LE, k).mean()) for k in hottest},
            rows_of_ranks=rows_of_ranks,
        )


def add(first: LoadSlice, second: LoadSlice) -> LoadSlice:
    return LoadSlice(
        steps=first.steps + second.steps,
        seconds=first.seconds + second.seconds,
        tokens_C=first.tokens_C + second.tokens_C,
        counts_LCE=first.counts_LCE + second.counts_LCE,
        rows_LR=first.rows_LR + second.rows_LR,
    )


def subtract(whole: LoadSlice, part: LoadSlice) -> LoadSlice:
    return LoadSlice(
        steps=whole.steps - part.steps,
        # Sums of many fractions may end a little below nothing.
        seconds=max(0.0, whole.seconds - part.seconds),
        tokens_C=whole.tokens_C - part.tokens_C,
        counts_LCE=whole.counts_LCE - part.counts_LCE,
        rows_LR=whole.rows_LR - part.rows_LR,
    )
