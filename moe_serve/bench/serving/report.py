"""The document of a benchmark: what --save-json writes and what is printed from.

    kind        "moe_serve.bench.serve"
    version     of this layout, 1
    started     date and time, UTC
    settings    every flag as it was understood, but no key
    client      the machine that sent the load (`host`)
    load        num_requests and num_left_out (rows of a trace too long for --trace-max-len)
    targets     a list, a server each:
      name, url, model
      facts     "model": its entry in /v1/models, "version": its answer to /version, or null
      runs      a list of `figures`, a run each
      median    of each number over the runs; errors of all runs together
    ratios      a list, for each pair of servers:
      of, to    names
      median    over the runs, of each number of `of` over that of `to` in the same run

Times in ms have `_ms` in their name, all others are seconds; throughputs are per second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import combinations
from typing import Any

from moe_serve.bench.serving.figures import Figures, medians, ratios
from moe_serve.bench.serving.host import host_facts
from moe_serve.bench.serving.targets import Target

KIND, VERSION = "moe_serve.bench.serve", 1
_SECRETS = {"api_key"}

Document = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A server and the figures of each of its runs."""

    target: Target
    runs: list[Figures]


def document(
    measured: Sequence[Measured], settings: Mapping[str, Any], num_requests: int, num_left_out: int
) -> Document:
    return {
        "kind": KIND,
        "version": VERSION,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": {key: value for key, value in settings.items() if key not in _SECRETS},
        "client": host_facts(),
        "load": {"num_requests": num_requests, "num_left_out": num_left_out},
        "targets": [
            {**dataclasses.asdict(each.target), "runs": each.runs, "median": medians(each.runs)}
            for each in measured
        ],
        "ratios": [
            {"of": own.target.name, "to": other.target.name, "median": ratios(own.runs, other.runs)}
            for other, own in combinations(measured, 2)
        ],
    }
