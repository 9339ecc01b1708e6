"""The report as tables, for a terminal or a file."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_serve.bench.serving.figures import LATENCIES, SPREADS, Figures
from moe_serve.bench.serving.report import Document

_TOTALS = {
    "completed": "successful requests",
    "failed": "failed requests",
    "duration": "duration (s)",
    "max_concurrent_requests": "peak concurrency",
    "total_input_tokens": "input tokens",
    "total_output_tokens": "output tokens",
    "tokens_per_chunk": "tokens per chunk",
    "request_throughput": "requests per second",
    "request_goodput": "good requests per second",
    "output_throughput": "output tokens per second",
    "total_token_throughput": "all tokens per second",
    "p99_delay_ms": "p99 delay of sending (ms)",
    "client_cpu_share": "client's share of a core",
}
_OF_RUN = {
    "output_throughput": "output tok/s",
    "total_token_throughput": "all tok/s",
    "p50_ttft_ms": "TTFT p50",
    "p50_tpot_ms": "TPOT p50",
    "p50_itl_ms": "ITL p50",
    "p99_itl_ms": "ITL p99",
    "p50_e2el_ms": "E2EL p50",
    "completed": "ok",
    "failed": "failed",
}
# Beyond this share of a core, the client may be what is measured.
_BUSY = 0.5


def print_report(report: Document, console: Console) -> None:
    """`report`: as in `report.document`."""
    targets = report["targets"]
    num_runs = len(targets[0]["runs"])
    for target in targets:
        console.print(Text(f"{target['name']}: {target['model']} at {target['url']}"))
    kind = "median of each number over the runs" if num_runs > 1 else "one run"
    console.print(Text(f"{report['load']['num_requests']} requests a run; {kind}"))
    titled = [("Totals", _totals(report)), ("Latencies (ms)", _latencies(report))]
    if num_runs > 1:
        titled.append(("Runs", _runs(report)))
    for title, table in titled:
        console.print()
        console.print(Text(title, style="bold"))
        table.box = box.SIMPLE_HEAD if _is_unicode(console) else box.ASCII
        console.print(table)
    for note in notes(report):
        console.print(Text(note))


def notes(report: Document) -> list[str]:
    """What a reader must know besides the numbers."""
    lines = []
    if left_out := report["load"]["num_left_out"]:
        lines.append(f"left out of the trace, as longer than --trace-max-len: {left_out}")
    for target in report["targets"]:
        for text, count in target["median"]["errors"].items():
            lines.append(f"{target['name']}: {count} x {text}")
        if short := target["median"]["short"]:
            lines.append(f"{target['name']}: {short} answers had fewer tokens than were asked for.")
        share = target["median"]["client_cpu_share"]
        if share > _BUSY:
            lines.append(
                f"{target['name']}: the client was busy {share:.0%} of the time, so latencies may "
                "be its own; run it on another machine, or with a smaller load."
            )
    return lines


def _totals(report: Document) -> Table:
    table = _table("", *_columns(report))
    for name, title in _TOTALS.items():
        values = [target["median"][name] for target in report["targets"]]
        if all(value is None for value in values):
            continue
        table.add_row(title, *map(_number, values), *_ratios(report, name))
    return table


def _latencies(report: Document) -> Table:
    targets, pairs = report["targets"], report["ratios"]
    is_alone = len(targets) == 1
    table = _table("", *SPREADS) if is_alone else _table("", "", *SPREADS, left=2)
    for latency in LATENCIES:
        names = [f"{spread}_{latency}_ms" for spread in SPREADS]
        for target in targets:
            cells = [_number(target["median"][name]) for name in names]
            first = [latency.upper()] if is_alone else [latency.upper(), target["name"]]
            table.add_row(*first, *cells)
        for pair in pairs:
            cells = [_ratio(pair["median"][name]) for name in names]
            table.add_row("", f"{pair['of']} / {pair['to']}", *cells)
    return table


def _runs(report: Document) -> Table:
    table = _table("run", "server", *_OF_RUN.values(), left=2)
    for number in range(len(report["targets"][0]["runs"])):
        for target in report["targets"]:
            figures: Figures = target["runs"][number]
            cells = [_number(figures[name]) for name in _OF_RUN]
            table.add_row(str(number + 1), target["name"], *cells)
    return table


def _columns(report: Document) -> list[str]:
    names = [target["name"] for target in report["targets"]]
    return [*names, *(f"{pair['of']} / {pair['to']}" for pair in report["ratios"])]


def _ratios(report: Document, name: str) -> list[str]:
    return [_ratio(pair["median"][name]) for pair in report["ratios"]]


def _table(*titles: str, left: int = 1) -> Table:
    table = Table(pad_edge=False)
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number < left else "right", no_wrap=number < left)
    return table


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 10000 else f"{value:,.2f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _is_unicode(console: Console) -> bool:
    return console.encoding.startswith("utf")
