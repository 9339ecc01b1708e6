"""What expert parallelism would be like: recorded tokens through many placements. Pure.

Exact: rows of each rank, balancedness, what is sent, memory. Estimated: all that is seconds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from moe_serve.errors import ConfigError
from moe_serve.experts.analysis.expert_shape import ExpertShape
from moe_serve.experts.analysis.load_statistics import balancedness, sum_by_rank
from moe_serve.experts.analysis.replay import Replayed, SlotTable, cut_steps, replay, step_group
from moe_serve.experts.analysis.step_time import BreakEven, ReplicaComparison, TimeModel
from moe_serve.experts.balance import balance
from moe_serve.experts.placement import Placement, check_redundant, slots_of_ranks
from moe_serve.experts.recording import RouteRecording
from moe_serve.routing.traffic import (
    BACKENDS,
    Ints,
    auto_backend,
    slice_size,
    sparse_bytes,
    static_bytes,
)

# Shapes: L MoE layers, N layers of steps, P slots, R ranks.

Source = Literal["linear", "balanced", "file"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A placement to be tried."""

    source: Source
    num_redundant: int
    placement: Placement

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Estimated. Seconds of the MoE layers of a mean step, exchanges by backend.

    `tokens_per_second`: with `auto`; `replica_tokens_per_second`: of as many whole copies, each of
    which has its rank's tokens.
    """

    expert_seconds: float
    exchange_seconds: dict[str, float]
    tokens_per_second: float
    replica_tokens_per_second: float
    break_even: BreakEven


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a layout comes to, over the whole recording.

    - `balancedness_mean`, `balancedness_min`: over layers, of all rows.
    - `step_balancedness`: rows / (ranks x rows of the busiest rank of each layer and step).
    - `rows_R`: rows that ranks compute; all layers.
    - `tokens_out_R`, `results_out_R`: rows that ranks send to others with `all_to_all`.
    - `bytes_out`: by backend, what ranks send; empty where the model's sizes are not known.
    - `expert_bytes_R`: weights of their experts; empty likewise. `timing`: None likewise.
    """

    layout: Layout
    balancedness_mean: float
    balancedness_min: float
    step_balancedness: float
    rows_R: tuple[int, ...]
    tokens_out_R: tuple[int, ...]
    results_out_R: tuple[int, ...]
    bytes_out: dict[str, tuple[int, ...]]
    expert_bytes_R: tuple[int, ...]
    timing: Timing | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`replica_bytes`: the expert weights of a rank that has every expert; 0 if not known."""

    routes: RouteRecording
    batch_tokens: int
    num_steps: int
    model: TimeModel | None
    replica_bytes: int
    outcomes: tuple[Outcome, ...]

    @property
    def best(self) -> Outcome:
        """Fewest seconds; where they are not known, most even steps. The first among equals."""
        return min(self.outcomes, key=_rank_of)


def make_layouts(
    load_LE: Ints, rank_counts: Sequence[int], redundant_counts: Sequence[int]
) -> list[Layout]:
    """Linear placements, and balanced ones for that load, of each pair of numbers.

    Of one rank there is one placement only. Raises `PlacementError` for what cannot be.
    """
    num_layers, num_experts = load_LE.shape
    layouts = []
    for num_ranks, num_redundant in itertools.product(rank_counts, redundant_counts):
        check_redundant(num_experts, num_redundant, num_ranks)
        linear = Placement.make(num_layers, num_experts, num_ranks, num_redundant=num_redundant)
        layouts.append(Layout(source="linear", num_redundant=num_redundant, placement=linear))
        if num_ranks > 1:
            balanced = balance(load_LE, slots_of_ranks(num_experts + num_redundant, num_ranks))
            layouts.append(
                Layout(source="balanced", num_redundant=num_redundant, placement=balanced)
            )
    return layouts


def check_shape(routes: RouteRecording, shape: ExpertShape) -> None:
    """Raises `ConfigError` where routes are not of such a model."""
    pairs = {
        "MoE layers": (routes.num_layers, shape.num_layers),
        "experts": (routes.num_experts, shape.num_experts),
        "experts per token": (routes.top_k, shape.top_k),
    }
    for name, (recorded, configured) in pairs.items():
        if recorded != configured:
            raise ConfigError(
                f"--config is of a model with {configured} {name}, the trace has {recorded}"
            )


def make_plan(
    routes: RouteRecording,
    layouts: Sequence[Layout],
    *,
    batch_tokens: int,
    model: TimeModel | None = None,
    on_tokens: Callable[[int], None] = lambda num_tokens: None,
) -> Plan:
    """Replay the recording through each layout; `on_tokens` hears of tokens that went through one.

    The routes have one token at least, and fit the layouts and the model.
    """
    assert routes.num_tokens and batch_tokens > 0
    tallies = [_Tally(layout, model) for layout in layouts]
    outcomes: dict[int, Outcome] = {}
    for num_ranks in sorted({layout.num_ranks for layout in layouts}):
        own = [index for index, layout in enumerate(layouts) if layout.num_ranks == num_ranks]
        replica_seconds, num_steps = 0.0, 0
        for ids_NTK in cut_steps(routes.ids_TLK, batch_tokens):
            group = step_group(ids_NTK, routes.num_layers, routes.num_experts, num_ranks, num_steps)
            num_steps += len(ids_NTK) // routes.num_layers
            if model is not None:
                replica_seconds += model.replica_seconds(group, routes.num_experts, num_ranks)
            for index in own:
                tallies[index].add(replay(group, tallies[index].table), group.num_tokens)
                on_tokens(len(ids_NTK) // routes.num_layers * group.num_tokens)
        comparison = None
        if model is not None:
            comparison = ReplicaComparison(model, routes.ids_TLK, routes.num_experts, num_ranks)
        for index in own:
            outcomes[index] = tallies[index].outcome(comparison, replica_seconds)
    every = routes.num_layers * routes.num_experts
    return Plan(
        routes=routes,
        batch_tokens=batch_tokens,
        num_steps=-(-routes.num_tokens // batch_tokens),
        model=model,
        replica_bytes=0 if model is None else every * model.shape.expert_bytes,
        outcomes=tuple(outcomes[index] for index in range(len(layouts))),
    )


class _Tally:
    """Adds up what a layout comes to, step by step."""

    def __init__(self, layout: Layout, model: TimeModel | None) -> None:
        self.layout = layout
        self.table = SlotTable.make(layout.placement)
        self._model = model
        num_ranks = layout.num_ranks
        self._rows_LP = np.zeros(layout.placement.slots_LP.shape, dtype=np.int64)
        self._tokens_R = np.zeros(num_ranks, dtype=np.int64)
        self._results_R = np.zeros(num_ranks, dtype=np.int64)
        self._bytes_R = {name: np.zeros(num_ranks, dtype=np.int64) for name in BACKENDS}
        self._busiest_rows = 0
        self._expert_seconds = 0.0
        self._exchange_seconds = dict.fromkeys(BACKENDS, 0.0)
        self._num_steps = 0
        self._num_tokens = 0

    def add(self, replayed: Replayed, num_tokens: int) -> None:
        """`num_tokens`: of each step."""
        num_layers = len(self._rows_LP)
        num_steps = len(replayed.rows_NP) // num_layers
        self._num_steps += num_steps
        self._num_tokens += num_steps * num_tokens
        self._rows_LP += replayed.rows_NP.reshape(-1, *self._rows_LP.shape).sum(0)
        self._tokens_R += replayed.flow.tokens_NHR.sum((0, 2))
        self._results_R += replayed.flow.results_NHR.sum((0, 1))
        self._busiest_rows += int(replayed.rows_NR.max(1).sum())
        if self._model is not None:
            self._add_bytes(self._model, replayed, num_tokens)
            self._expert_seconds += float(self._model.expert_seconds(replayed, self.table).sum())
            seconds = self._model.exchange_seconds(replayed, self.table, num_tokens)
            for name, seconds_N in seconds.items():
                self._exchange_seconds[name] += float(seconds_N.sum())

    def _add_bytes(self, model: TimeModel, replayed: Replayed, num_tokens: int) -> None:
        num_ranks, rows = self.layout.num_ranks, model.row_format
        if num_ranks == 1:
            return
        capacity = slice_size(num_tokens, num_ranks)
        each = static_bytes(capacity, num_ranks, rows) * len(replayed.rows_NP)
        sent = {
            "all_to_all": sparse_bytes(replayed.flow, rows, self.table.most_local).sum(0),
            "allgather_reducescatter": np.full(num_ranks, each),
        }
        sent["auto"] = sent[auto_backend(capacity, num_ranks, rows)]
        for name, bytes_R in sent.items():
            self._bytes_R[name] += bytes_R

    def outcome(self, comparison: ReplicaComparison | None, replica_seconds: float) -> Outcome:
        """`replica_seconds`: what whole copies take for all steps."""
        placement = self.layout.placement
        rows_LR = sum_by_rank(self._rows_LP, placement).astype(np.int64)
        balanced_L = balancedness(rows_LR)
        expert_bytes = 0 if self._model is None else self._model.shape.expert_bytes
        slots = placement.slots_of_ranks if expert_bytes else ()
        return Outcome(
            layout=self.layout,
            balancedness_mean=float(balanced_L.mean()),
            balancedness_min=float(balanced_L.min()),
            step_balancedness=int(rows_LR.sum()) / (len(rows_LR[0]) * self._busiest_rows),
            rows_R=_whole(rows_LR.sum(0)),
            tokens_out_R=_whole(self._tokens_R),
            results_out_R=_whole(self._results_R),
            bytes_out={n: _whole(b) for n, b in self._bytes_R.items()} if expert_bytes else {},
            expert_bytes_R=tuple(n * placement.num_layers * expert_bytes for n in slots),
            timing=None if comparison is None else self._timing(comparison, replica_seconds),
        )

    def _timing(self, comparison: ReplicaComparison, replica_seconds: float) -> Timing:
        seconds = self._expert_seconds + self._exchange_seconds["auto"]
        return Timing(
            expert_seconds=self._expert_seconds / self._num_steps,
            exchange_seconds={
                name: total / self._num_steps for name, total in self._exchange_seconds.items()
            },
            tokens_per_second=self._num_tokens / seconds,
            replica_tokens_per_second=self._num_tokens / replica_seconds,
            break_even=comparison.break_even(self.table),
        )


def _rank_of(outcome: Outcome) -> float:
    if outcome.timing is None:
        return -outcome.step_balancedness
    return -outcome.timing.tokens_per_second


def _whole(values_R: Ints) -> tuple[int, ...]:
    return tuple(values_R.tolist())
