"""What dispatchers compute where, and what they send, told from routing alone. Pure.

The numpy twin of `ExpertMap.choose` and of what `RankGroup.bytes_sent` counts in `dispatch` and
`combine`; tests hold both equal.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# Shapes: N layers of steps, each with the T tokens of its step; K top-k, H home ranks, R computing
# ranks (as many), E logical experts.

Ints = npt.NDArray[np.int64]

BACKENDS = ("auto", "all_to_all", "allgather_reducescatter")
# Where all-to-all becomes faster. Measured with gloo on one machine, 2 and 4 ranks, rows of 2 KiB
# (scripts/bench_dispatch.py, BENCHMARKS.md): between 1.2 and 2.4 MB, and 1.3 and 1.8 MB. Below, it
# loses by its third message, with which the ranks tell each other their counts.
STATIC_BYTES = 2**20
# Exchanges of a layer: counts, tokens, results; or tokens, results.
NUM_EXCHANGES = {"all_to_all": 3, "allgather_reducescatter": 2}

_ALIGNMENT = 8
_INDEX_BYTES = 2
_COUNT_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """How rows travel: `hidden` elements of `itemsize` bytes; with a token go its `top_k` ids."""

    hidden: int
    itemsize: int
    top_k: int

    @property
    def result_bytes(self) -> int:
        return self.hidden * self.itemsize

    @property
    def token_bytes(self) -> int:
        """As `packing.pack` lays them out."""
        start = _round_up(self.result_bytes, _INDEX_BYTES)
        return _round_up(start + self.top_k * _INDEX_BYTES, _ALIGNMENT)


class Flow(NamedTuple):
    """Who needs what of whom.

    - `tokens_NHR`: tokens of home rank H with an expert on rank R; none on their own rank.
    - `rows_NHR`: (token, slot) rows of home rank H that rank R computes; its own ones, too.
    """

    tokens_NHR: Ints
    rows_NHR: Ints

    @property
    def results_NHR(self) -> Ints:
        """Rows that go back to another rank."""
        return _without_own(self.rows_NHR)


def slice_size(num_tokens: int, num_ranks: int) -> int:
    """Tokens of the first rank, which has the most: the capacity of a step."""
    return -(-num_tokens // num_ranks)


def home_ranks(num_tokens: int, num_ranks: int) -> Ints:
    """[T]: where `TokenSlices` puts a step's tokens. Example, 7 on 3 ranks: 0 0 0 1 1 1 2."""
    return np.arange(num_tokens) // max(1, slice_size(num_tokens, num_ranks))


def turns(
    ids_NTK: npt.NDArray[Any], home_T: Ints, num_experts: int, step_N: Ints | None = None
) -> Ints:
    """[N, T, K]: which replica's turn it is, before the modulo by their number.

    That is the number of times that tokens of the same home rank chose the expert before in the
    step, by token and slot, plus the home rank, plus the number of the step (0 without `step_N`).
    Example, one rank, top-1: experts 5 3 5 5 -> 0 0 1 2.
    """
    keys_NTK = ids_NTK + home_T[:, None] * num_experts
    is_short = (int(home_T.max(initial=0)) + 1) * num_experts < 2**15
    # Short keys are sorted by radix.
    keys = keys_NTK.reshape(len(ids_NTK), -1).astype(np.int16 if is_short else np.int64)
    order = np.argsort(keys, axis=1, kind="stable")
    ordered = np.take_along_axis(keys, order, axis=1)
    is_first = np.ones(keys.shape, dtype=bool)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    places = np.arange(keys.shape[1])
    starts = np.maximum.accumulate(np.where(is_first, places, 0), axis=1)
    times = np.empty(keys.shape, dtype=np.int64)
    np.put_along_axis(times, order, places - starts, axis=1)
    first_N1 = 0 if step_N is None else step_N[:, None, None]
    return times.reshape(ids_NTK.shape) + home_T[:, None] + first_N1


def flow(rank_NTK: npt.NDArray[Any], home_T: Ints, num_ranks: int) -> Flow:
    """`rank_NTK`: the rank that computes each choice."""
    num_layers, num_tokens, _ = rank_NTK.shape
    shape = (num_layers, num_ranks, num_ranks)
    pairs = np.arange(num_layers)[:, None, None] * num_ranks + home_T[:, None]
    pairs = pairs * num_ranks + rank_NTK
    rows = np.bincount(pairs.ravel(), minlength=num_layers * num_ranks**2).reshape(shape)
    needed_NTR = np.zeros((num_layers, num_tokens, num_ranks), dtype=bool)
    np.put_along_axis(needed_NTR, rank_NTK, True, axis=2)
    tokens = np.zeros(shape, dtype=np.int64)
    starts = np.flatnonzero(np.diff(home_T, prepend=-1))
    if num_tokens:
        sums = np.add.reduceat(needed_NTR, starts, axis=1, dtype=np.int64)
        tokens[:, home_T[starts]] = sums
    return Flow(_without_own(tokens), rows)


def count_bytes(num_ranks: int, most_local: int) -> int:
    """What a rank sends in the exchange of counts. `most_local`: slots of the rank with most."""
    return (num_ranks - 1) * (1 + most_local) * _COUNT_BYTES


def sparse_bytes(flow: Flow, rows: RowFormat, most_local: int) -> Ints:
    """[N, R]: bytes that each rank sends in a layer through `AllToAllDispatcher`."""
    num_ranks = flow.rows_NHR.shape[1]
    tokens_NR, results_NR = flow.tokens_NHR.sum(2), flow.results_NHR.sum(1)
    sent_NR: Ints = tokens_NR * rows.token_bytes + results_NR * rows.result_bytes
    return sent_NR + count_bytes(num_ranks, most_local)


def static_bytes(capacity: int, num_ranks: int, rows: RowFormat) -> int:
    """Bytes that a rank sends in a layer through `AllGatherDispatcher`: each sends as many.

    gloo's way of adding results and a library's reduce-scatter count the same.
    """
    results = rows.top_k * rows.result_bytes
    return capacity * (num_ranks - 1) * (rows.token_bytes + results)


def prefers_static(capacity: int, num_ranks: int, top_k: int, row_bytes: int) -> bool:
    """By the bytes that a rank would send, from what every rank knows: all choose alike."""
    return capacity * (num_ranks - 1) * (1 + top_k) * row_bytes <= STATIC_BYTES


def auto_backend(capacity: int, num_ranks: int, rows: RowFormat) -> str:
    """What `AutoDispatcher` chooses."""
    is_static = prefers_static(capacity, num_ranks, rows.top_k, rows.result_bytes)
    return "allgather_reducescatter" if is_static else "all_to_all"


def _without_own(values_NHR: Ints) -> Ints:
    others: Ints = ~np.eye(values_NHR.shape[1], dtype=bool) * values_NHR
    return others


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
