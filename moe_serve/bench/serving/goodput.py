"""Service-level objectives: what a request must meet to count as good."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from moe_serve.bench.serving.outcome import Outcome
from moe_serve.errors import ConfigError
from moe_serve.option_parser import closest

KEYS = ("ttft", "tpot", "e2el")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Limits in seconds; None where there is none."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def is_met(self, outcome: Outcome) -> bool:
        """A request that failed meets none; one of a single token meets any `tpot`."""
        if outcome.error is not None:
            return False
        times = ((getattr(outcome, key), getattr(self, key)) for key in KEYS)
        return all(limit is None or time is None or time <= limit for time, limit in times)


def parse_objectives(words: Sequence[str] | None) -> Objectives | None:
    """["ttft:500", "tpot:50"] in milliseconds, as `vllm bench serve --goodput`; None for none."""
    if not words:
        return None
    limits: dict[str, float] = {}
    for word in words:
        key, _, text = word.partition(":")
        if key not in KEYS:
            raise ConfigError(f"--goodput {word}: {key!r} must be {' or '.join(KEYS)}"
                              f"{closest(key, KEYS)}")  # fmt: skip
        if key in limits:
            raise ConfigError(f"--goodput gives {key} twice")
        try:
            limits[key] = float(text) / 1000
        except ValueError:
            limits[key] = 0.0
        if not 0 < limits[key] < float("inf"):
            raise ConfigError(f"--goodput {word}: {text!r} must be milliseconds, as {key}:500")
    return Objectives(**limits)
