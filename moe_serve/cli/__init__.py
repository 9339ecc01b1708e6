"""The `moe-serve` command: picks the command, turns our errors into one line and an exit code.

0 done, 1 the engine failed or nobody reads the output any more, 2 what was asked for cannot be
done, 130 interrupted.
Each command imports what it needs when it runs, so `--help` and `--version` answer at once.
"""

from __future__ import annotations

import importlib
import os
import select
import sys
from collections.abc import Sequence
from typing import TextIO

from moe_serve import __version__
from moe_serve.errors import ConfigError, EngineError, MoeServeError
from moe_serve.option_parser import closest

PROG = "moe-serve"
COMMANDS = {
    "serve": "answer the OpenAI API over HTTP",
    "generate": "complete prompts from the command line",
    "convert": "write a checkpoint anew: from DeepSpeed's files, in other shards, another dtype",
    "bench": "measure a server, the engine or its kernels",
    "plan": "replay recorded expert choices through placements, before having the GPUs",
    "rebalance": "place the experts of a running server anew",
    "record": "record the expert choices of a running server",
    "report": "tell how even expert load is, and what rebalancing would give",
    "version": "print the version",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        # Here, not at exit, where the interpreter would complain of a reader that went away.
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if _has_reader(sys.stdout):
            raise
        _drop_output()
        return 1
    except KeyboardInterrupt:
        return 130
    except MoeServeError as error:
        print(f"{PROG}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, EngineError) else 2


def _has_reader(file: TextIO) -> bool:
    """Whether anybody may still read what is written; True for what is no pipe."""
    poll = select.poll()
    try:
        poll.register(file.fileno(), 0)
    except OSError:
        return True
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def _drop_output() -> None:
    """What is left to be written goes nowhere, instead of failing again at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _run(argv: list[str]) -> int:
    if argv and _is_own_rank(argv[0]):
        argv = argv[1:]
    command = argv[0] if argv else ""
    if command in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if command in ("--version", "version"):
        print(f"{PROG} {__version__}")
        return 0
    if command not in COMMANDS:
        raise ConfigError(_unknown(command))
    run = importlib.import_module(f"moe_serve.cli.{command}").run
    return int(run(argv[1:], prog=f"{PROG} {command}"))


def _is_own_rank(argument: str) -> bool:
    """Whether a launcher, as DeepSpeed's does, tells once more what the environment has said."""
    name, _, value = argument.partition("=")
    return name in ("--local_rank", "--local-rank") and value == os.environ.get("LOCAL_RANK")


def _overview() -> str:
    lines = [f"usage: {PROG} COMMAND [options]", "", "commands:"]
    lines += [f"  {name:<12}{text}" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", f"{PROG} COMMAND --help tells the options of a command."])


def _unknown(command: str) -> str:
    known = f"commands: {', '.join(COMMANDS)}"
    if not command:
        return f"which command? {known}"
    return f"{command!r} is not a command{closest(command, COMMANDS)} ({known})"
