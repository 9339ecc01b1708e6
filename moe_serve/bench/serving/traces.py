"""Recorded arrivals and lengths of real services, read from their published files.

Two formats, told apart by their first line; .gz is unpacked:
- Azure LLM inference traces (github.com/Azure/AzurePublicDataset): CSV with a header and the
  columns TIMESTAMP (date and time), ContextTokens, GeneratedTokens.
- Mooncake (github.com/kvcache-ai/Mooncake): JSON lines with timestamp (ms), input_length,
  output_length, and optionally hash_ids: one number for each block of 512 prompt tokens, equal
  numbers for equal prefixes.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import json
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from moe_serve.errors import ConfigError

BLOCK_TOKENS = 512
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """A request that once was. `hash_ids` is empty where the trace has none."""

    seconds: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()


class Kept(NamedTuple):
    rows: list[TraceRow]
    num_left_out: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceCut:
    """What of a trace is replayed, and how: times divided by `speed`, lengths times `scale`."""

    speed: float = 1.0
    scale: float = 1.0
    max_rows: int | None = None
    max_seconds: float = float("inf")
    max_len: float = float("inf")

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of equal prefix, after scaling."""
        return max(1, round(BLOCK_TOKENS * self.scale))

    def apply(self, rows: list[TraceRow]) -> Kept:
        """In order of time, the first at 0. `max_seconds` are of the trace, before its speed.

        Rows longer than `max_len` (prompt and answer) are left out, not shortened, and do not count
        for `max_rows`.
        """
        rows = sorted(rows, key=lambda row: row.seconds)
        start = rows[0].seconds if rows else 0.0
        kept: list[TraceRow] = []
        num_left_out = 0
        for row in rows:
            if len(kept) == self.max_rows or row.seconds - start >= self.max_seconds:
                break
            scaled = self._scaled(row, start)
            if scaled.input_len + scaled.output_len > self.max_len:
                num_left_out += 1
            else:
                kept.append(scaled)
        return Kept(kept, num_left_out)

    def _scaled(self, row: TraceRow, start: float) -> TraceRow:
        input_len = max(1, round(row.input_len * self.scale))
        return TraceRow(
            seconds=(row.seconds - start) / self.speed,
            input_len=input_len,
            output_len=max(1, round(row.output_len * self.scale)),
            # Rounding may make one block less, or need one more, which is then of this row alone.
            hash_ids=row.hash_ids[: -(-input_len // self.block_tokens)],
        )


def read_trace(path: str) -> list[TraceRow]:
    """All rows of the file, in its order. Raises `ConfigError` that names the line."""
    lines = _lines(path)
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("{"):
        parse: Callable[[str], TraceRow] = _mooncake_row
        start = 0
    elif [name.strip() for name in first.split(",")][:3] == list(_AZURE):
        parse, start = _azure_row, lines.index(first) + 1
    else:
        raise ConfigError(
            f"{path}: line 1 is neither the header {','.join(_AZURE)} nor a JSON object"
        )
    rows = []
    for number, line in enumerate(lines[start:], start + 1):
        if not line.strip():
            continue
        try:
            rows.append(parse(line))
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            reason = f"has no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{path}: line {number}: {reason}") from error
    if not rows:
        raise ConfigError(f"{path}: there is no request in it")
    return rows


def _lines(path: str) -> list[str]:
    try:
        data = Path(path).read_bytes()
        return (gzip.decompress(data) if path.endswith(".gz") else data).decode().splitlines()
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read: {reason}") from error


def _azure_row(line: str) -> TraceRow:
    fields = next(csv.reader([line]))
    if len(fields) < 3:
        raise ValueError(f"has {len(fields)} of the 3 columns")
    moment = datetime.fromisoformat(fields[0].strip())
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return TraceRow(
        seconds=moment.timestamp(),
        input_len=_length("ContextTokens", int(fields[1])),
        output_len=max(1, _length("GeneratedTokens", int(fields[2]))),
    )


def _mooncake_row(line: str) -> TraceRow:
    values: Any = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError("is no JSON object")
    hash_ids = values.get("hash_ids") or []
    if not isinstance(hash_ids, list) or any(type(each) is not int for each in hash_ids):
        raise ValueError("hash_ids must be a list of whole numbers")
    seconds = float(values["timestamp"]) / 1000
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"timestamp {values['timestamp']} must be milliseconds, 0 or more")
    return TraceRow(
        seconds=seconds,
        input_len=_length("input_length", values["input_length"]),
        output_len=max(1, _length("output_length", values["output_length"])),
        hash_ids=tuple(hash_ids),
    )


def _length(name: str, value: Any) -> int:
    """A prompt of no token, or an answer of none, becomes one of one token at its user."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} {value!r} must be a whole number, 0 or more")
    return value
