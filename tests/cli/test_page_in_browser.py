"""The page of a report, drawn by a browser; skipped where none is installed."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_serve.experts.analysis.report import build_report
from moe_serve.experts.placement import Placement
from moe_serve.reports.page import render_page
from tests.experts.recordings import make_recording

NAMES = ("chromium", "chromium-browser", "google-chrome")
# A person who has a keyboard only goes to the last expert, and back to the first.
PROBE = """
const map = byId("map");
const press = (key, times) => {
  for (let i = 0; i < times; i += 1) map.dispatchEvent(new KeyboardEvent("keydown", { key }));
  return [byId("cell").textContent, map.parentElement.scrollLeft];
};
const right = press("ArrowRight", 256);
const left = press("ArrowLeft", 256);
const darkRules = [...document.styleSheets[0].cssRules].flatMap((rule) =>
  [rule, ...(rule.media ? rule.cssRules : [])]).filter((rule) =>
  rule.style && rule.style.colorScheme === "dark");
const found = {
  right, left, seen: map.parentElement.clientWidth, wide: map.clientWidth,
  legend: [...document.querySelectorAll(".scale span")].map((label) => label.textContent),
  title: byId("model").textContent,
  sections: [...document.querySelectorAll("section")].filter((one) => !one.hidden).length,
  bars: document.querySelectorAll("#ranks-bars .bar").length,
  darkMedia: darkRules.map((rule) => rule.parentRule ? rule.parentRule.media.mediaText : "all"),
};
document.body.append(make("pre", { id: "probe" }, btoa(JSON.stringify(found))));
"""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of 256 experts on 8 ranks, in 4 layers: in one of them all load goes to one expert."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        pytest.skip("no browser is installed")
    counts_LE = np.arange(4 * 256).reshape(4, 256) % 7 + 1
    counts_LE[3] = 0
    counts_LE[:, 0] += counts_LE.sum(1).max() - counts_LE.sum(1)
    report = build_report(make_recording(counts_LE, placement=Placement.make(4, 256, 8)))
    folder = tmp_path_factory.mktemp("page")
    page = render_page(report).replace("</body>", f"<script>{PROBE}</script></body>")
    (folder / "page.html").write_text(page, encoding="utf-8")
    return probed(browser, folder)


def probed(browser: str, folder: Path) -> dict[str, Any]:
    argv = [
        browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=600,900",
        f"--user-data-dir={folder / 'profile'}", "--dump-dom", (folder / "page.html").as_uri(),
    ]  # fmt: skip
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    match = re.search(r'<pre id="probe">([\w+/=]+)</pre>', result.stdout)
    assert match, result.stdout[-500:] + result.stderr[-500:]
    values: dict[str, Any] = json.loads(base64.b64decode(match[1]))
    return values


def test_the_page_is_drawn(drawn: dict[str, Any]) -> None:
    assert (drawn["title"], drawn["bars"]) == ("tiny", 8)
    assert drawn["sections"] == 7


def test_one_hot_layer_does_not_darken_all_others(drawn: dict[str, Any]) -> None:
    assert drawn["legend"][-1] == "8x or more"


def test_the_part_of_the_map_that_is_seen_follows_the_keys(drawn: dict[str, Any]) -> None:
    assert drawn["wide"] > drawn["seen"]
    text, scrolled = drawn["right"]
    assert text.startswith("Layer 0, expert 255:")
    assert scrolled >= drawn["wide"] - drawn["seen"] - 20
    text, scrolled = drawn["left"]
    assert text.startswith("Layer 0, expert 0:") and scrolled == 0


def test_dark_colours_are_for_screens_not_for_paper(drawn: dict[str, Any]) -> None:
    assert len(drawn["darkMedia"]) == 2
    assert all(media.startswith("screen") for media in drawn["darkMedia"])
