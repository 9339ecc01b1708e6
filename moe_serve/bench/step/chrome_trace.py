"""Events as a file that ui.perfetto.dev and chrome://tracing open.

The Trace Event Format's JSON object form: complete events (ph "X") with times in microseconds,
and metadata events (ph "M") that name process and threads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_serve.bench.step.probes import Event
from moe_serve.errors import ConfigError

_PROCESS = 1


def chrome_trace(tracks: Mapping[str, Sequence[Event]], process: str) -> dict[str, Any]:
    """`tracks`: by the name of a row. Time begins with the first event of all."""
    began = min((event.start_ns for events in tracks.values() for event in events), default=0)
    found = [_metadata("process_name", 0, process)]
    for thread, (name, events) in enumerate(tracks.items(), start=1):
        found.append(_metadata("thread_name", thread, name))
        found += [
            {
                "name": event.label,
                "cat": event.part,
                "ph": "X",
                "ts": (event.start_ns - began) / 1e3,
                "dur": (event.stop_ns - event.start_ns) / 1e3,
                "pid": _PROCESS,
                "tid": thread,
                "args": {"part": event.part, "own_us": event.own_ns / 1e3},
            }
            for event in sorted(events, key=lambda one: one.start_ns)
        ]
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def write_trace(path: str, trace: dict[str, Any]) -> None:
    """Raises `ConfigError` where the file cannot be written."""
    try:
        Path(path).write_text(json.dumps(trace))
    except OSError as error:
        raise ConfigError(f"--trace {path}: cannot be written: {error}") from error


def _metadata(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {
        "name": kind, "ph": "M", "ts": 0, "pid": _PROCESS, "tid": thread, "args": {"name": name},
    }  # fmt: skip
