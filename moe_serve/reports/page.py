"""A report as one page for a browser: all in the file, nothing fetched from anywhere."""

from __future__ import annotations

import html
import importlib.resources
import json
import re
from typing import Any

_PARTS = ("page.css", "page_tools.js", "page_map.js", "page.js")


def render_page(report: dict[str, Any]) -> str:
    """`report`: a document as `build_report` makes it; the page holds it as JSON in #report."""
    values = {name: _file(name) for name in _PARTS}
    values["title"] = html.escape(f"Expert load of {report['model']}")
    values["report"] = _json(report)
    # In one go: what is put in may look like a mark, too.
    return re.sub(r"\{\{([\w.]+)\}\}", lambda mark: values[mark[1]], _file("page.html"))


def _json(report: dict[str, Any]) -> str:
    """JSON that no text in it can close: </script> and <!-- begin with "<"."""
    text = json.dumps(report, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _file(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
