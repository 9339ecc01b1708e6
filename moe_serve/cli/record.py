"""`moe-serve record`: record the expert choices of a running server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from moe_serve.cli.client import DEFAULT_URL, admin_key, ask
from moe_serve.errors import ConfigError, RecordingError
from moe_serve.option_parser import OptionParser, closest
from moe_serve.options import variable

ACTIONS = ("start", "stop", "dump")
MODES = ("counts", "routes")
STYLES = ("npz", "json", "pt")
# A long recording takes a while to write.
TIMEOUT_SECONDS = 600.0
# Option -> the action that it is for.
_USED_BY = {"mode": "start", "window": "start", "style": "dump"}
_EPILOG = """\
The file lies on the server's machine, in its --expert-record-dir; dump prints its path, and the
recording begins anew. Counts are for `moe-serve report`, routes for `moe-serve plan`; pt is
SGLang's file of counts. After stop, dump still writes what was recorded before."""


def run(argv: Sequence[str], *, prog: str) -> int:
    """Ask the server, and say in one line what came of it; returns the exit code."""
    options = _parser(prog).parse(argv)
    body = _body(options)
    path = f"/v1/moe/record/{options.action}"
    answer = ask(options.url, path, admin_key(options.api_key), body=body, timeout=TIMEOUT_SECONDS)
    try:
        _tell(options.action, body, answer)
    except (LookupError, TypeError, AttributeError) as error:
        raise RecordingError(f"{options.url}{path} sends another answer than expected") from error
    return 0


def _parser(prog: str) -> OptionParser:
    parser = OptionParser(
        prog=prog,
        usage=f"{prog} {{{','.join(ACTIONS)}}} [options]",
        description="Record the expert choices of a running server.",
        epilog=_EPILOG,
    )

    def add(name: str, metavar: str, text: str, **more: Any) -> None:
        parser.add_to_group("options", name, metavar=metavar, help=text, **more)

    add("action", "ACTION", ", ".join(ACTIONS), nargs="?")
    add("--url", "URL", f"the server's address [{DEFAULT_URL}]", default=DEFAULT_URL)
    add("--api-key", "KEY", f"its admin key; default: {variable('admin_api_key')}")
    add(
        "--mode",
        f"{{{','.join(MODES)}}}",
        "start: counts by window, or each token's route [counts]",
    )
    add("--window", "N", "start: steps in each window of counts [100]")
    add("--style", f"{{{','.join(STYLES)}}}", "dump: kind of file [npz]")
    return parser


def _body(options: argparse.Namespace) -> dict[str, Any]:
    """What is given of the options that the action takes; the server knows the defaults."""
    if options.action not in ACTIONS:
        if options.action is None:
            raise ConfigError(f"record what? {', '.join(ACTIONS)}")
        advice = closest(options.action, ACTIONS)
        raise ConfigError(f"{options.action!r} is not one of {', '.join(ACTIONS)}{advice}")
    given = {name: getattr(options, name) for name in _USED_BY if getattr(options, name)}
    for name in given:
        if _USED_BY[name] != options.action:
            raise ConfigError(f"--{name} has no effect with {options.action}; drop it")
    for name, allowed in (("mode", MODES), ("style", STYLES)):
        if name in given and given[name] not in allowed:
            advice = closest(given[name], allowed)
            raise ConfigError(f"--{name} {given[name]} must be one of {', '.join(allowed)}{advice}")
    if "window" in given:
        if given.get("mode") == "routes":
            raise ConfigError("--window has no effect with --mode routes; drop it")
        given["window"] = _steps(given["window"])
    return given


def _steps(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= number < 2**63:
        raise ConfigError(f"--window {text} must be a whole number of steps, 1 or more")
    return number


def _tell(action: str, body: dict[str, Any], answer: dict[str, Any]) -> None:
    if action == "start":
        what = "routes" if body.get("mode") == "routes" else "counts"
        print(f"recording {what} of expert choices")
    elif action == "stop":
        print("recording stopped; `moe-serve record dump` writes what there is")
    else:
        print(answer["path"])
        routes = answer["mode"] == "routes"
        num = answer["num_tokens"] if routes else answer["num_windows"]
        what = f"routes of {num} tokens" if routes else f"counts, {num} windows"
        state = "still recording" if answer["is_recording"] else "recording is stopped"
        print(f"{what}; {state}", file=sys.stderr)
