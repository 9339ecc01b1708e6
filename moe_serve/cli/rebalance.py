"""`moe-serve rebalance`: place the experts of a running server anew."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moe_serve.cli.client import DEFAULT_URL, admin_key, ask
from moe_serve.errors import ConfigError, PlacementError, RecordingError
from moe_serve.option_parser import OptionParser
from moe_serve.options import variable

if TYPE_CHECKING:
    from moe_serve.experts.placement import Placement

REBALANCE, PLACEMENT = "/v1/moe/rebalance", "/v1/moe/placement"
# The server gives up after its own transfer_timeout, and says so.
TIMEOUT_SECONDS = 3600.0
_EPILOG = """\
Requests go on meanwhile, and get the same tokens. The server must have been started with
--enable-eplb. Without --placement its experts are placed by the load of its newest steps. A
placement may be of any kind that --init-expert-location takes: ours, SGLang's, EPLB's or
TensorRT-LLM's."""


def run(argv: Sequence[str], *, prog: str) -> int:
    """Ask the server, and say in one line what came of it; returns the exit code."""
    options = _parser(prog).parse(argv)
    key = admin_key(options.api_key)
    body = _body(options, key)
    answer = ask(options.url, REBALANCE, key, body=body, timeout=TIMEOUT_SECONDS)
    try:
        print(_line(answer))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        address = f"{options.url}{REBALANCE}"
        raise RecordingError(f"{address} sends another answer than expected") from error
    return 0


def _parser(prog: str) -> OptionParser:
    parser = OptionParser(
        prog=prog,
        usage=f"{prog} [options]",
        description="Place the experts of a running server anew, by its load or as a file says.",
        epilog=_EPILOG,
    )

    def add(name: str, metavar: str, text: str, **more: Any) -> None:
        parser.add_to_group("options", name, metavar=metavar, help=text, **more)

    add("--url", "URL", f"the server's address [{DEFAULT_URL}]", default=DEFAULT_URL)
    add("--api-key", "KEY", f"its admin key; default: {variable('admin_api_key')}")
    add("--placement", "FILE", "placement to go to")
    add("--max-moves", "N", "most slots that may change, over all layers [the server's limit]")
    return parser


def _body(options: argparse.Namespace, key: str | None) -> dict[str, Any]:
    if options.placement is None:
        moves = options.max_moves
        return {} if moves is None else {"max_moves": _count(moves)}
    if options.max_moves is not None:
        raise ConfigError("--max-moves has no effect with --placement; give one of them")
    placement = _read(options.placement, ask(options.url, PLACEMENT, key), options.url)
    return {"slots": placement.slots_LP.tolist()}


def _count(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 <= number < 2**63:
        raise ConfigError(f"--max-moves {text} must be a whole number, 0 or more")
    return number


def _read(file: str, values: Any, url: str) -> Placement:
    """The file's placement, for a server whose own is `values`."""
    from moe_serve.experts.files.documents import Document
    from moe_serve.experts.files.placement_files import placement_of, read_placement

    now = placement_of(Document(values, f"{url}{PLACEMENT}"))
    placement = read_placement(
        file, now.num_ranks, num_layers=now.num_layers, num_experts=now.num_experts
    )
    if placement.slots_of_ranks != now.slots_of_ranks:
        raise PlacementError(
            f"{file}: {list(placement.slots_of_ranks)} slots by rank; the server has "
            f"{list(now.slots_of_ranks)}"
        )
    return placement


def _line(answer: dict[str, Any]) -> str:
    """What moved, and what it is expected to give."""
    before, after = answer["balancedness"]
    if answer["outcome"] == "unneeded":
        return f"balancedness {before:.3f}: no expert has to move"
    num_moves = answer["num_moves"]
    return (
        f"balancedness {before:.3f} -> {after:.3f}: {num_moves} expert{'s' * (num_moves != 1)} "
        f"moved, {answer['num_bytes'] / 1e6:.1f} MB between ranks, {answer['seconds']:.2f} s"
    )
