"""Expected time of a step's MoE layers, and where it beats that of independent replicas. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moe_serve.experts.analysis.expert_shape import ExpertShape
from moe_serve.experts.analysis.hardware import Hardware
from moe_serve.experts.analysis.replay import (
    Ids,
    Replayed,
    SlotTable,
    StepGroup,
    count_by_row,
    replay,
    sample_steps,
    step_group,
)
from moe_serve.routing.traffic import (
    NUM_EXCHANGES,
    Ints,
    RowFormat,
    auto_backend,
    count_bytes,
    slice_size,
    static_bytes,
)

# Shapes: N layers of steps, P slots, R ranks, H home ranks, E logical experts, T tokens of a step,
# K top-k.

Floats = npt.NDArray[np.float64]

# Tokens of the recording from which one point of the break-even is told.
_SAMPLE_TOKENS = 1024
# Choices of the longest step that it goes to: more would only take long.
_MOST_CHOICES = 2**21
# Sums of the same seconds in another order are not less.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """The slowest rank's experts, then the exchanges; nothing overlaps, and nothing else counts.

    An expert with rows in a step reads its weights once and computes row by row (`StepCost`). An
    exchange takes its fixed time and the bytes of the rank that sends or receives most.
    """

    shape: ExpertShape
    hardware: Hardware

    @property
    def row_format(self) -> RowFormat:
        shape = self.shape
        return RowFormat(hidden=shape.hidden, itemsize=shape.row_bytes, top_k=shape.top_k)

    def slot_seconds(self, rows_NP: Ints) -> Floats:
        """Of slots whose rows in each step are known."""
        cost = self.hardware.step_cost(self.shape)
        seconds: Floats = (rows_NP > 0) * cost.read_seconds + rows_NP * cost.row_seconds
        return seconds

    def expert_seconds(self, replayed: Replayed, table: SlotTable) -> Floats:
        """[N]: of the slowest rank."""
        seconds_NR = self.slot_seconds(replayed.rows_NP) @ table.is_on_PR
        seconds_N: Floats = seconds_NR.max(1)
        return seconds_N

    def exchange_seconds(
        self, replayed: Replayed, table: SlotTable, num_tokens: int
    ) -> dict[str, Floats]:
        """[N] by backend. `num_tokens`: of each step."""
        rows, num_ranks = self.row_format, table.num_ranks
        num_layers, capacity = len(replayed.rows_NP), slice_size(num_tokens, num_ranks)
        if num_ranks == 1:
            return dict.fromkeys(("auto", *NUM_EXCHANGES), np.zeros(num_layers))
        tokens_NHR, results_NHR = replayed.flow.tokens_NHR, replayed.flow.results_NHR
        sparse_N = (
            _busiest(tokens_NHR) * rows.token_bytes
            + _busiest(results_NHR) * rows.result_bytes
            + count_bytes(num_ranks, table.most_local)
        )
        static_N = np.full(num_layers, static_bytes(capacity, num_ranks, rows))
        seconds = {
            name: self._seconds_to_send(NUM_EXCHANGES[name], bytes_N)
            for name, bytes_N in (("all_to_all", sparse_N), ("allgather_reducescatter", static_N))
        }
        return {"auto": seconds[auto_backend(capacity, num_ranks, rows)]} | seconds

    def _seconds_to_send(self, num_exchanges: int, bytes_N: Ints) -> Floats:
        hardware = self.hardware
        fixed = num_exchanges * hardware.message_seconds
        seconds: Floats = bytes_N / hardware.link_bandwidth + fixed
        return seconds

    def replica_seconds(self, group: StepGroup, num_experts: int, num_ranks: int) -> float:
        """Of all layers of all steps, where each rank has every expert and keeps its tokens.

        The mean of the ranks, which do not wait for each other.
        """
        total = 0.0
        for rank in range(num_ranks):
            rows_NE = count_by_row(group.ids_NTK[:, group.home_T == rank], num_experts)
            total += float(self.slot_seconds(rows_NE).sum())
        return total / num_ranks


class BreakEven(NamedTuple):
    """Tokens per rank and step with which expert parallelism takes less time than replicas.

    From `first` (None: never) to `last` (None: without end), as far as `most`, for which the
    recording has a step; 0: it is too short to tell.
    """

    first: int | None
    last: int | None
    most: int

    def __str__(self) -> str:
        if not self.most:
            return "unknown"
        if self.first is None:
            return "never"
        if self.last is not None:
            return f"{self.first} to {self.last}"
        return "always" if self.first == 1 else f"from {self.first}"


def find_break_even(is_lower: Callable[[int], bool], most: int) -> BreakEven:
    """The first run of sizes 1 .. `most` for which `is_lower` holds.

    Powers of two are tried, and `most`; then the ends between two of them are halved down. A run
    that holds none of them is not found.
    """
    sizes = sorted({2**power for power in range(most.bit_length())} | {most} - {0})
    holds = [is_lower(size) for size in sizes]
    if True not in holds:
        return BreakEven(None, None, most)
    start = holds.index(True)
    first = _turn(is_lower, sizes[start - 1], sizes[start]) if start else 1
    if False not in holds[start:]:
        return BreakEven(first, None, most)
    end = holds.index(False, start)
    return BreakEven(first, _turn(is_lower, sizes[end - 1], sizes[end]) - 1, most)


class ReplicaComparison:
    """The break-even of placements on one number of ranks, from samples of a recording.

    Steps and what replicas take for them are the same for all placements, and kept.
    """

    def __init__(self, model: TimeModel, ids_TLK: Ids, num_experts: int, num_ranks: int) -> None:
        self._model = model
        self._ids_TLK = ids_TLK
        self._num_experts = num_experts
        self._num_ranks = num_ranks
        self._steps: dict[int, tuple[StepGroup, float]] = {}

    def break_even(self, table: SlotTable) -> BreakEven:
        num_tokens, num_layers, top_k = self._ids_TLK.shape
        longest = max(self._num_ranks, _MOST_CHOICES // (num_layers * top_k))
        most = min(num_tokens, longest) // self._num_ranks
        return find_break_even(lambda size: self._is_lower(table, size), most)

    def _is_lower(self, table: SlotTable, tokens_of_rank: int) -> bool:
        group, replica_seconds = self._sampled(tokens_of_rank)
        replayed = replay(group, table)
        exchange = self._model.exchange_seconds(replayed, table, group.num_tokens)["auto"]
        seconds = self._model.expert_seconds(replayed, table).sum() + exchange.sum()
        return bool(seconds < replica_seconds * (1 - _ROUNDING))

    def _sampled(self, tokens_of_rank: int) -> tuple[StepGroup, float]:
        if tokens_of_rank not in self._steps:
            batch_tokens = tokens_of_rank * self._num_ranks
            ids_NTK = sample_steps(self._ids_TLK, batch_tokens, _SAMPLE_TOKENS)
            num_layers = self._ids_TLK.shape[1]
            group = step_group(ids_NTK, num_layers, self._num_experts, self._num_ranks)
            seconds = self._model.replica_seconds(group, self._num_experts, self._num_ranks)
            self._steps[tokens_of_rank] = group, seconds
        return self._steps[tokens_of_rank]


def _busiest(values_NHR: Ints) -> Ints:
    """[N]: what the rank sends or receives that sends or receives most."""
    busiest: Ints = np.maximum(values_NHR.sum(2).max(1), values_NHR.sum(1).max(1))
    return busiest


def _turn(holds: Callable[[int], bool], before: int, after: int) -> int:
    """Where `holds` changes to what it is at `after`: the first such size behind `before`."""
    wanted = holds(after)
    while after - before > 1:
        middle = (before + after) // 2
        if holds(middle) == wanted:
            after = middle
        else:
            before = middle
    return after
