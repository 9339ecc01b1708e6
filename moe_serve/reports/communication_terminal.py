"""The report on communication, for a terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_serve.reports.terminal import is_unicode

_COLUMNS = ("rank", "group", "operation", "from", "calls", "MiB sent", "mean us", "max us",
            "bus MB/s")  # fmt: skip
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def print_communication(report: dict[str, Any], console: Console) -> None:
    """`report`: a document as in `reports.communication`, with the model's name."""
    console.print(Text(f"Communication of {report['model']}", style="bold"))
    for sentence in report["summary"]:
        console.print(Text(f"- {sentence}"))
    rows = [
        (rank["rank"], group["group"], row)
        for rank in report["ranks"]
        for group in rank["groups"]
        for row in group["operations"]
    ]
    if not rows:
        return
    lines = box.SIMPLE_HEAD if is_unicode(console) else box.ASCII
    table = Table(pad_edge=False, padding=(0, 1, 0, 0), box=lines)
    for name in _COLUMNS:
        is_word = name in ("group", "operation")
        table.add_column(name, justify="left" if is_word else "right", no_wrap=is_word)
    for rank, group, row in rows:
        table.add_row(
            str(rank), group, row["operation"], _size(row["least_bytes"]), f"{row['calls']:,}",
            f"{row['bytes_sent'] / 2**20:,.1f}", _number(row["mean_seconds"], 1e6),
            _number(row["longest_seconds"], 1e6), _number(row["bus_bandwidth"], 1e-6),
        )  # fmt: skip
    console.print()
    console.print(table)
    console.print(Text("From: the least size of a message; it is less than twice that."))


def _size(num_bytes: int) -> str:
    """A power of two."""
    step = max(0, num_bytes.bit_length() - 1) // 10
    return f"{num_bytes >> 10 * step} {_UNITS[step]}"


def _number(value: float | None, factor: float) -> str:
    return "-" if value is None else f"{value * factor:,.0f}"
