"""Line charts as SVG text, readable on a light and on a dark page. No drawing library needed.

svg([Chart(title="Throughput", x_label="requests at once", y_label="tokens/s", log_x=True,
           series=[Series("ours", [(1, 50.0), (4, 170.0)]),
                   Series("memory limit", [(1, 80.0), (4, 320.0)], style="limit")])])
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Sequence
from typing import Literal

Point = tuple[float, float]

WIDTH, HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 40, 46
_LEGEND_LINE = 18
_MOST_TICKS = 7  # of a logarithmic axis, where there are powers of ten enough
# Told apart with any colour vision (after Okabe and Ito), lighter on dark pages; shapes differ too.
_LIGHT = ("#0072b2", "#c44e00", "#00795c", "#a3488b", "#7a6000", "#444444")
_DARK = ("#6db8f2", "#ff9d5c", "#4fd0a8", "#e39bcf", "#e6c84c", "#c8c8c8")
_INK = {"text": ("#1f2328", "#e6edf3"), "grid": ("#d8dee4", "#30363d"), "page": ("#fff", "#0d1117")}
_SHAPES = (
    "M-3.5,0a3.5,3.5 0 1,0 7,0a3.5,3.5 0 1,0 -7,0",
    "M-3,-3h6v6h-6z",
    "M0,-4L4,3h-8z",
    "M0,-4.5L4.5,0L0,4.5L-4.5,0z",
    "M-4,-3h8L0,4z",
    "M-4,-1.2h2.8v-2.8h2.4v2.8h2.8v2.4h-2.8v2.8h-2.4v-2.8h-2.8z",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """Points are drawn in order of x. A "limit" is dashed and grey; "line" has no marks."""

    name: str
    points: Sequence[Point]
    style: Literal["marks", "line", "limit"] = "marks"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Points that an axis cannot show (not finite; 0 or less where it is logarithmic) are left out.

    Linear axes begin at 0.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False

    def points(self, series: Series) -> list[Point]:
        """Those that can be shown, in order of x."""
        return sorted(
            (x, y)
            for x, y in series.points
            if math.isfinite(x) and math.isfinite(y)
            if not (self.log_x and x <= 0) and not (self.log_y and y <= 0)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """Values -> 0..1, and where its ticks stand."""

    low: float
    high: float
    is_log: bool
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def axis(values: Sequence[float], *, is_log: bool) -> Axis:
    """An axis that holds all `values`, from one tick to another.

    axis([3, 17]) -> ticks 0, 5, 10, 15, 20; logarithmic -> 3, 5, 7, 10, 15, 20
    """
    if not is_log:
        low, high = min(0.0, *values, 0.0), max(*values, 0.0, 0.0)
        step = _nice((high - low or 1.0) / 5)
        first, last = math.floor(low / step), max(math.ceil(high / step), 1)
        ticks = tuple(number * step for number in range(first, last + 1))
        return Axis(ticks[0], ticks[-1], False, ticks)
    low, high = (min(values), max(values)) if values else (1.0, 10.0)
    finest_first = [_log_ticks(low, high, parts) for parts in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5))]
    few = [ticks for ticks in finest_first if len(ticks) <= _MOST_TICKS]
    ticks = few[0] if few else _log_ticks(low, high, (1,))
    return Axis(ticks[0], ticks[-1], True, ticks)


def svg(charts: Sequence[Chart]) -> str:
    """The charts beside each other, each with its legend below."""
    lines = max((len(chart.series) for chart in charts), default=0)
    width, height = WIDTH * max(1, len(charts)), HEIGHT + _LEGEND_LINE * lines + 6
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">',
        f"<title>{_text('; '.join(chart.title for chart in charts))}</title>",
        f"<style>{_style()}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
    ]
    for number, chart in enumerate(charts):
        parts += [f'<g transform="translate({number * WIDTH},0)">', *_panel(chart), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(chart: Chart) -> list[str]:
    shown = [chart.points(series) for series in chart.series]
    x_axis = axis([x for points in shown for x, _ in points], is_log=chart.log_x)
    y_axis = axis([y for points in shown for _, y in points], is_log=chart.log_y)

    def at(point: Point) -> Point:
        across, up = x_axis.place(point[0]), y_axis.place(point[1])
        return (
            _LEFT + across * (WIDTH - _LEFT - _RIGHT),
            HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM),
        )

    parts = [f'<text class="title" x="{_LEFT}" y="22">{_text(chart.title)}</text>']
    parts += _grid(x_axis, y_axis, at)
    middle_x, middle_y = (_LEFT + WIDTH - _RIGHT) / 2, (_TOP + HEIGHT - _BOTTOM) / 2
    parts += [
        f'<text text-anchor="middle" x="{middle_x:g}" y="{HEIGHT - 10}">'
        f"{_text(chart.x_label)}</text>",
        f'<text text-anchor="middle" transform="translate(14,{middle_y:g}) rotate(-90)">'
        f"{_text(chart.y_label)}</text>",
    ]
    for number, (series, points) in enumerate(zip(chart.series, shown, strict=True)):
        parts += _drawn(series, number, [at(point) for point in points])
        parts += _legend(series, number)
    return parts


def _grid(x_axis: Axis, y_axis: Axis, at: Callable[[Point], Point]) -> list[str]:
    parts = []
    for tick in x_axis.ticks:
        x, bottom = at((tick, y_axis.low))
        parts.append(f'<path class="grid" d="M{x:.1f},{bottom:.1f}V{_TOP}"/>')
        parts.append(f'<text text-anchor="middle" x="{x:.1f}" y="{bottom + 16:.1f}">{_number(tick)}'
                     "</text>")  # fmt: skip
    for tick in y_axis.ticks:
        left, y = at((x_axis.low, tick))
        parts.append(f'<path class="grid" d="M{left:.1f},{y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text text-anchor="end" x="{left - 6:.1f}" y="{y + 4:.1f}">{_number(tick)}'
                     "</text>")  # fmt: skip
    return parts


def _drawn(series: Series, number: int, places: Sequence[Point]) -> list[str]:
    if not places:
        return []
    path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in places)
    if series.style == "limit":
        return [f'<path class="limit" d="{path}"/>']
    colour = number % len(_LIGHT)
    parts = [f'<path class="line s{colour}" d="{path}"/>']
    if series.style == "marks":
        parts += [
            f'<path class="f{colour}" transform="translate({x:.1f},{y:.1f})" '
            f'd="{_SHAPES[colour]}"/>'
            for x, y in places
        ]
    return parts


def _legend(series: Series, number: int) -> list[str]:
    y = HEIGHT + 8 + number * _LEGEND_LINE
    sample = _drawn(series, number, [(_LEFT, y), (_LEFT + 24, y)])
    return [*sample, f'<text x="{_LEFT + 34}" y="{y + 4}">{_text(series.name)}</text>']


def _style() -> str:
    def rules(page: int) -> str:
        colours = (_LIGHT, _DARK)[page]
        ink = {name: pair[page] for name, pair in _INK.items()}
        each = "".join(f".s{n}{{stroke:{c}}}.f{n}{{fill:{c}}}" for n, c in enumerate(colours))
        return (
            f"text{{fill:{ink['text']}}}.grid{{stroke:{ink['grid']}}}.page{{fill:{ink['page']}}}"
            f".limit{{stroke:{ink['text']}}}{each}"
        )

    return (
        "text{font:12px system-ui,sans-serif}.title{font-size:14px;font-weight:600}"
        ".line{fill:none;stroke-width:2}"
        ".limit{fill:none;stroke-width:1.5;stroke-dasharray:6 4;opacity:.7}"
        f"{rules(0)}@media(prefers-color-scheme:dark){{{rules(1)}}}"
    )


def _nice(step: float) -> float:
    """The least of 1, 2, 5 x a power of ten that is not below `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(part * power for part in (1, 2, 5, 10) if part * power >= step * (1 - 1e-9))


def _log_ticks(low: float, high: float, parts: Sequence[float]) -> tuple[float, ...]:
    """Parts x powers of ten from the last one at or below `low` to the first at or above `high`."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = [part * 10.0**power for power in range(first, last + 1) for part in parts]
    every.append(10.0 ** (last + 1))
    begin = max(index for index, tick in enumerate(every) if tick <= low * (1 + 1e-9))
    end = next(i for i, tick in enumerate(every) if i > begin and tick >= high * (1 - 1e-9))
    return tuple(every[begin : end + 1])


def _number(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:.6g}"


def _text(text: str) -> str:
    return html.escape(text, quote=False)
