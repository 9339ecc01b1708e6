"""A report for a terminal: sentences, a map of layers and experts, and tables.

Shades differ in height, so the map reads without colour; a terminal that has no Unicode gets ASCII.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Shapes: L MoE layers, E logical experts, R ranks, X columns of the map.

Titled = tuple[str, Table]

# Load over the mean of its layer, from which the next shade begins; a shade of its own for nothing.
BOUNDS = (0.0, 0.25, 0.5, 0.8, 1.25, 2.0, 3.0, 5.0)
_UNICODE = "·▁▂▃▄▅▆▇█"
_ASCII = " .:-=+*%@"
# From dark blue to yellow, told apart with any colour vision (matplotlib's "cividis").
_COLOURS = ("#6e6e6e", "#1f3f70", "#3c4d6e", "#575d6d", "#707173", "#8a8678", "#a59c74", "#d2c060",
            "#ffe945")  # fmt: skip
_ROWS = 10


def print_report(report: dict[str, Any], console: Console) -> None:
    """`report`: a document as in `experts.analysis.report`."""
    ranks = report["ranks"]
    sizes = (
        f"{report['num_layers']} MoE layers, {report['num_experts']} experts, "
        f"{report['top_k']} per token"
    )
    console.print(Text(f"Expert load of {report['model']}", style="bold"))
    console.print(_plain(f"{sizes}; {_recorded(report)}"))
    console.print()
    for sentence in report["summary"]:
        console.print(_plain(f"- {sentence}"))
    if not report["tokens"]["total"]:
        return
    console.print()
    print_map(report, console)
    tables = [_hot(report), _layers(report)]
    if ranks is not None and ranks["num_ranks"] > 1:
        tables += [_ranks(ranks), _rebalancing(report["rebalancing"])]
    if report["drift"] is not None:
        tables.append(_drift(report["drift"]))
    for title, table in tables:
        console.print()
        console.print(Text(title, style="bold"))
        table.box = box.SIMPLE_HEAD if is_unicode(console) else box.ASCII
        console.print(table)
    for note in report["notes"]:
        console.print(_plain(note))


def print_map(report: dict[str, Any], console: Console) -> None:
    """A line a layer. Where experts are too many for the width, a cell is the hottest of a few."""
    load_LE = np.array(report["load"], dtype=np.float64)
    margin = len(str(len(load_LE) - 1)) + 1
    each = -(-load_LE.shape[1] // max(8, console.width - margin - 1))
    shades = _UNICODE if is_unicode(console) else _ASCII
    level_LX = _levels(_x_mean(load_LE), each)
    cells = "each cell an expert" if each == 1 else f"each cell the hottest of {each} experts"
    console.print(Text("Load over the mean of its layer", style="bold"), _plain(f"({cells})"))
    for layer, level_X in enumerate(level_LX):
        line = Text(f"{layer:>{margin - 1}} ")
        for level in level_X:
            line.append(shades[level], style=_COLOURS[level])
        console.print(line, no_wrap=True, overflow="crop")
    legend = Text(f"{'':>{margin}}")
    for level, shade in enumerate(shades):
        legend.append(f"{shade!s} ", style=_COLOURS[level])
        legend.append(f"{_bound(level)}  ")
    console.print(legend)


def _x_mean(load_LE: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    mean_L1 = load_LE.mean(1, keepdims=True)
    return load_LE / np.where(mean_L1 > 0, mean_L1, 1)


def _levels(x_mean_LE: npt.NDArray[np.float64], each: int) -> npt.NDArray[np.int64]:
    """[L, X]: index of the shade of the hottest of `each` neighbours."""
    short = -x_mean_LE.shape[1] % each
    padded_LE = np.pad(x_mean_LE, ((0, 0), (0, short)))
    hottest_LX = padded_LE.reshape(len(x_mean_LE), -1, each).max(2)
    level_LX = np.searchsorted(BOUNDS[1:], hottest_LX, side="right") + 1
    return np.where(hottest_LX > 0, level_LX, 0)


def _bound(level: int) -> str:
    if level == 0:
        return "none"
    return f"<{BOUNDS[1]:g}" if level == 1 else f">={BOUNDS[level - 1]:g}"


def _recorded(report: dict[str, Any]) -> str:
    tokens = report["tokens"]
    phases = ", ".join(
        f"{count:,} {name}" for name, count in tokens.items() if name != "total" and count
    )
    text = f"{tokens['total']:,} tokens ({phases})" if phases else "no tokens"
    steps, seconds = report["num_steps"], report["seconds"]
    if steps:
        text += f" in {steps:,} steps"
    return f"{text}, {seconds:,.1f} s" if seconds else text


def _hot(report: dict[str, Any]) -> Titled:
    table = _table("layer", "expert", "x mean", "load", "ranks")
    for hot in report["hot"][:_ROWS]:
        ranks = ", ".join(map(str, hot["ranks"])) or "-"
        table.add_row(str(hot["layer"]), str(hot["expert"]), f"{hot['x_mean']:.2f}",
                      f"{hot['load']:,.0f}", ranks)  # fmt: skip
    return "Hottest experts", table


def _layers(report: dict[str, Any]) -> Titled:
    """The least even ones: by ranks where there are any, else by experts."""
    experts, ranks = report["experts"], report["ranks"]
    names = ["layer", "hottest x mean", "entropy", "gini", "dead"]
    has_ranks = ranks is not None and ranks["num_ranks"] > 1
    even = ranks["balancedness"]["layers"] if has_ranks else experts["entropy"]["layers"]
    order = sorted(range(len(even)), key=lambda layer: even[layer])[:_ROWS]
    table = _table(*names, *(["balancedness"] if has_ranks else []))
    for layer in order:
        cells = [
            str(layer),
            f"{experts['hottest']['layers'][layer]:.2f}",
            f"{experts['entropy']['layers'][layer]:.3f}",
            f"{experts['gini']['layers'][layer]:.3f}",
            str(len(experts["dead"][layer])),
        ]
        table.add_row(*cells, *([f"{even[layer]:.3f}"] if has_ranks else []))
    return "Least even layers", table


def _ranks(ranks: dict[str, Any]) -> Titled:
    load_R = np.array(ranks["load"], dtype=np.float64).sum(0)
    mean = load_R.mean() or 1.0
    title = f"Rows of ranks, all layers ({ranks['source']}; placement {ranks['placement']})"
    table = _table("rank", "slots", "rows", "x mean", "")
    for rank, load in enumerate(load_R):
        bar = "#" * round(20 * load / load_R.max()) if load else ""
        table.add_row(str(rank), str(ranks["slots_of_ranks"][rank]), f"{load:,.0f}",
                      f"{load / mean:.2f}", bar)  # fmt: skip
    table.columns[-1].justify = "left"
    return title, table


def _rebalancing(options: list[dict[str, Any]]) -> Titled:
    table = _table("placement", "slots", "balancedness", "lowest",
                   "expert ms a step", "moves", "MiB to move", "more MiB a rank")  # fmt: skip
    for row in options:
        table.add_row(
            row["name"], str(row["num_slots"]), f"{row['balancedness_mean']:.3f}",
            f"{row['balancedness_min']:.3f}", _number(row["expert_ms"], "{:,.3f}"),
            f"{row['moves']:,}", _number(row["moved_bytes"], "{:,.1f}", 2**20),
            _number(row["more_bytes_of_rank"], "{:,.1f}", 2**20),
        )  # fmt: skip
    table.columns[0].justify = "left"
    return "What rebalancing would give", table


def _drift(drift: dict[str, Any]) -> Titled:
    title = f"Experts whose share moved most since {drift['baseline']}"
    table = _table("layer", "expert", "share before", "share after")
    for move in drift["moves"][:_ROWS]:
        table.add_row(str(move["layer"]), str(move["expert"]), f"{move['before']:.2%}",
                      f"{move['after']:.2%}")  # fmt: skip
    return title, table


def _table(*names: str) -> Table:
    table = Table(pad_edge=False)
    for name in names:
        table.add_column(name, justify="right")
    return table


def _number(value: float | None, form: str, unit: float = 1) -> str:
    return "-" if value is None else form.format(value / unit)


def _plain(text: str) -> Text:
    """Without rich's colouring of numbers, and without its reading of [brackets]."""
    return Text(text)


def is_unicode(console: Console) -> bool:
    """Whether it shows lines and shades."""
    return console.encoding.lower().startswith("utf")
