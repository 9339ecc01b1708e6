"""Cases timed, beside what the machine's limits allow."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_serve.bench.kernels.against import Match
from moe_serve.bench.kernels.cases import Case
from moe_serve.bench.limits import Limits
from moe_serve.bench.ruler import Spread, time_calls
from moe_serve.bench.table import Table

# What stays in a cache that is nearly full is anybody's guess; of more, taken in turns, nothing.
_COLD_CACHES = 1.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`us` of one call. `limit_us`: what its bytes or its products take at the limits, whichever
    is more (`limit`). `is_cached`: the calls find what they read in the last cache, so that memory
    is no limit, and without products (`limit_us` 0) none is known.
    """

    op: str
    shape: str
    tokens: int
    us: Spread
    num_bytes: float
    flops: float
    limit: str
    limit_us: float
    is_cached: bool

    @property
    def share(self) -> float:
        """Of the limit: 1 is as fast as can be."""
        return self.limit_us / self.us.median

    def values(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | {
            "us": self.us._asdict(),
            "gigabytes_per_second": self.num_bytes / self.us.median / 1e3,
            "gigaflops_per_second": self.flops / self.us.median / 1e3,
            "share_of_limit": self.share,
        }


def time_case(case: Case, limits: Limits, cache_bytes: int, budget_us: float) -> Row:
    is_cached = case.footprint < _COLD_CACHES * cache_bytes
    read_us = 0.0 if is_cached else case.num_bytes / limits.read * 1e6
    multiply_us = case.flops / limits.operations(case.dtype) * 1e6
    return Row(
        op=case.op,
        shape=case.shape,
        tokens=case.tokens,
        us=time_calls(case.calls, budget_us=budget_us),
        num_bytes=case.num_bytes,
        flops=case.flops,
        limit="memory" if read_us > multiply_us else "products" if multiply_us else "unknown",
        limit_us=max(read_us, multiply_us),
        is_cached=is_cached,
    )


def rows_table(rows: Sequence[Row]) -> str:
    table = Table(
        ["op", "shape", "T", "us", "quartiles", "GB/s", "GFLOP/s", "limit", "of limit"],
        num_text_columns=2,
    )
    for row in rows:
        rates = row.values()
        flops = rates["gigaflops_per_second"]
        table.add(
            row.op,
            row.shape,
            row.tokens,
            f"{row.us.median:.1f}",
            f"{row.us.low:.1f} to {row.us.high:.1f}",
            f"{rates['gigabytes_per_second']:.1f}",
            f"{flops:.1f}" if flops else "",
            "in cache" if not row.limit_us else row.limit + ", in cache" * row.is_cached,
            f"{row.share:.0%}" if row.limit_us else "",
        )
    return str(table)


def matches_table(matches: Sequence[Match]) -> str:
    table = Table(["the MoE layer against", "T", "ours us", "theirs us", "theirs / ours",
                   "quartiles", "difference"])  # fmt: skip
    for match in matches:
        found = match.comparison
        table.add(
            match.name,
            match.tokens,
            f"{found.ours.median:.1f}",
            f"{found.theirs.median:.1f}",
            f"{found.ratio.median:.2f}",
            f"{found.ratio.low:.2f} to {found.ratio.high:.2f}",
            f"{match.error:.1e}",
        )
    return str(table)


def last_cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Of the largest cache that a core reaches; 32 MiB where the system does not tell."""
    sizes = [0]
    for file in folder.glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KMG])", file.read_text().strip())
        if match is not None:
            sizes.append(int(match[1]) << {"K": 10, "M": 20, "G": 30}[match[2]])
    return max(sizes) or 32 << 20
