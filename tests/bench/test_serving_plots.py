from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.bench.plots import HEIGHT, WIDTH, Chart, Series, axis, svg

NUMBERS = st.lists(st.floats(1e-6, 1e12), max_size=7)


@given(values=NUMBERS, is_log=st.booleans())
def test_an_axis_holds_all_values_between_its_ticks(values: list[float], is_log: bool) -> None:
    scale = axis(values, is_log=is_log)
    assert 2 <= len(scale.ticks) <= 22
    assert list(scale.ticks) == sorted(set(scale.ticks))
    assert (scale.place(scale.low), scale.place(scale.high)) == (0, 1)
    assert all(-1e-6 <= scale.place(value) <= 1 + 1e-6 for value in values)


def test_known_ticks() -> None:
    assert axis([3, 17], is_log=False).ticks == (0, 5, 10, 15, 20)
    assert axis([-3, 17], is_log=False).ticks == (-5, 0, 5, 10, 15, 20)
    assert axis([3, 17], is_log=True).ticks == (3, 5, 7, 10, 15, 20)
    assert axis([16, 20.2], is_log=True).ticks == (15, 20, 30)
    assert axis([2, 99], is_log=True).ticks == (2, 5, 10, 20, 50, 100)
    assert axis([1, 64], is_log=True).ticks == (1, 2, 5, 10, 20, 50, 100)
    assert axis([1, 1e6], is_log=True).ticks == pytest.approx([10.0**n for n in range(7)])
    assert axis([10, 10], is_log=True).ticks == (10, 15)
    assert axis([0, 0], is_log=False).ticks[0] == 0
    assert axis([10, 100], is_log=True).place(math.sqrt(1000)) == pytest.approx(0.5)


def chart(*series: Series, log: bool = True) -> Chart:
    return Chart(title="a < b & c", x_label="x", y_label="y", log_x=log, log_y=log, series=series)


def test_a_picture_has_each_point_and_is_xml() -> None:
    text = svg([chart(Series("ours <1>", [(4, 8.0), (1, 2.0)]),
                      Series("limit", [(1, 10.0), (4, 10.0)], "limit"))])  # fmt: skip
    root = ET.fromstring(text)
    assert root.get("width") == str(WIDTH)
    assert "ours &lt;1&gt;" in text and "a &lt; b &amp; c" in text
    # Two points and two marks in the legend; a limit has none.
    assert text.count('class="f0"') == 4 and 'class="f1"' not in text
    assert text.count('class="limit"') == 2
    # Drawn in order of x: from left to right.
    path = re.search(r'class="line s0" d="M([\d.]+),[\d.]+L([\d.]+),', text)
    assert path is not None and float(path[1]) < float(path[2])
    assert "prefers-color-scheme:dark" in text


def test_what_an_axis_cannot_show_is_left_out() -> None:
    series = Series("a", [(0, 1.0), (1, -1.0), (2, math.nan), (3, math.inf), (5, 7.0)])
    assert chart(series).points(series) == [(5, 7.0)]
    assert chart(series, log=False).points(series) == [(0, 1.0), (1, -1.0), (5, 7.0)]


@pytest.mark.parametrize("log", [False, True])
def test_charts_without_points(log: bool) -> None:
    for charts in ([], [chart(log=log)], [chart(Series("a", []), log=log)] * 2):
        root = ET.fromstring(svg(charts))
        assert root.get("width") == str(WIDTH * max(1, len(charts)))
        assert int(root.get("height") or 0) >= HEIGHT


def test_all_points_are_inside(tmp_path_factory: pytest.TempPathFactory) -> None:
    points = [(10.0**n, 3.0**n) for n in range(-3, 9)]
    text = svg([chart(*(Series(f"s{n}", points) for n in range(9)), log=log)
                for log in (True, False)])  # fmt: skip
    places = re.findall(r'class="f\d" transform="translate\(([-\d.]+),([-\d.]+)\)', text)
    height = int(ET.fromstring(text).get("height") or 0)
    assert len(places) == 2 * 9 * (12 + 2)
    assert all(0 < float(x) < WIDTH and 0 < float(y) < height for x, y in places)
