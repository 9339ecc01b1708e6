"""The ruler on a GPU: what a call takes there, and what the GPU can do at most."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from moe_serve.bench.ruler import Call, Spread

# What events are put around lasts about so long, in microseconds: next to it, their own cost and a
# graph's launch are nothing.
_SPAN_US = 300.0
_MOST_SAMPLES, _FEWEST_SAMPLES = 40, 7
_MOST_CALLS_OF_A_GRAPH = 512
# Sizes that the two ceilings are measured at.
_COPY_BYTES = 4 << 30
_MATMUL_SIZE = 8192
# Its streams and events have no types.
_cuda: Any = torch.cuda


class Ceilings(NamedTuple):
    """Bytes a second that a device-to-device copy reads and writes; bf16 operations a second."""

    copy: float
    matmul: float

    @classmethod
    def measure(cls, device: torch.device) -> Ceilings:
        return cls(_copy_rate(device), _matmul_rate(device))


def _copy_rate(device: torch.device) -> float:
    size = min(_COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2e6 * size / time_calls([lambda: target.copy_(source)]).median


def _matmul_rate(device: torch.device) -> float:
    # Zeros would be multiplied faster.
    n = _MATMUL_SIZE
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2e6 * n**3 / time_calls([lambda: a @ b]).median


def time_calls(
    calls: Sequence[Call], *, is_captured: bool = True, budget_us: float = 40_000.0
) -> Spread:
    """What one call takes, in turns over `calls`: the same call on inputs of its own each.

    Captured calls follow each other without a gap, as in a captured decode step. Calls that wait
    for the GPU cannot be captured: of these, gaps are a part.
    """
    for call in calls:
        call()
    repeat = _capture if is_captured else _plainly
    once = _elapsed_us([repeat(calls, 1)] * 2)[-1]
    rounds = max(1, min(round(_SPAN_US / once), _MOST_CALLS_OF_A_GRAPH // len(calls)))
    run = repeat(calls, rounds)
    span = _elapsed_us([run] * 2)[-1]
    num_samples = int(max(_FEWEST_SAMPLES, min(_MOST_SAMPLES, budget_us / span)))
    num_calls = rounds * len(calls)
    return Spread.of([time / num_calls for time in _elapsed_us([run] * num_samples)])


def copies_to_miss_cache(num_bytes: int, device: torch.device, most: int = 64) -> int:
    """Sets of inputs to take turns with, so that none of them is still in the L2 cache."""
    size = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(most, -(-3 * size // max(1, num_bytes))))


def is_cold(num_bytes: int, num_copies: int, device: torch.device) -> bool:
    """Whether so many sets do not fit into the L2 cache together."""
    return num_bytes * num_copies > 2 * torch.cuda.get_device_properties(device).L2_cache_size


def _plainly(calls: Sequence[Call], rounds: int) -> Call:
    def run() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    return run


def _capture(calls: Sequence[Call], rounds: int) -> Call:
    """Not by `torch.cuda.graph`, which empties torch's cache of memory each time."""
    graph, stream = torch.cuda.CUDAGraph(), _side_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Libraries take the memory that they keep for a stream when first called there.
        calls[0]()
        graph.capture_begin()
        try:
            _plainly(calls, rounds)()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


@functools.cache
def _side_stream() -> Any:
    return _cuda.Stream()


def _elapsed_us(runs: Sequence[Call]) -> list[float]:
    """Microseconds of each, one launched after the other without waiting in between."""
    marks: list[tuple[Any, Any]] = []
    for run in runs:
        start, end = (_cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in marks]
