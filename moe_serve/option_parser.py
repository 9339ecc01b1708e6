"""The argparse side of `settings`: groups, a readable `--help`, and errors that name the fix."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from moe_serve.errors import ConfigError
from moe_serve.options import COMMON

HELP_COLUMN = 32

_EXPERTS = "--enable-expert-parallel spreads the experts over all ranks; drop it"
_LAYERS = "layers are not spread over ranks; use --tensor-parallel-size or --data-parallel-size"
# What people bring along from other engines, and what to do instead.
ELSEWHERE = {
    "--model": "give the model without a flag: {prog} MODEL",
    "--model-path": "give the model without a flag: {prog} MODEL",
    "--tp-size": "write --tensor-parallel-size",
    "--dp-size": "write --data-parallel-size",
    "--expert-parallel-size": _EXPERTS,
    "--ep-size": _EXPERTS,
    "--ep": _EXPERTS,
    "--pipeline-parallel-size": _LAYERS,
    "--pp-size": _LAYERS,
    "--pp": _LAYERS,
    "--trust-remote-code": "code of a model folder is never run; drop it",
    "--enable-metrics": "metrics are always on, at /metrics; drop it",
    "--schedule-policy": "requests run by priority, then in order of arrival; drop it",
    "--scheduling-policy": "requests run by priority, then in order of arrival; drop it",
    "--enable-chunked-prefill": "it is always on; --max-num-batched-tokens sets the chunk",
    "--seed": "requests carry their own seed; drop it",
}


def closest(word: str, known: Iterable[str], *, prefix: str = "") -> str:
    """'; did you mean X?' for the known word nearest to `word`, or nothing."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {prefix}{matches[0]}?" if matches else ""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """One short left column: `--a, --b N` and `--[no-]flag`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=HELP_COLUMN)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            names = [name for name in action.option_strings if not name.startswith("--no-")]
            return ", ".join(name.replace("--", "--[no-]", 1) for name in names)
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, action.dest.upper())
        return f"{', '.join(action.option_strings)} {value}"


class OptionParser(argparse.ArgumentParser):
    """Raises `ConfigError` where argparse would print its usage and exit."""

    def __init__(self, *, prog: str, usage: str, description: str, epilog: str) -> None:
        super().__init__(prog=prog, usage=usage, description=description, epilog=epilog,
                         allow_abbrev=False, formatter_class=HelpFormatter)  # fmt: skip
        # argparse's own group takes what every command has.
        self._groups: dict[str, argparse._ActionsContainer] = {COMMON: self}

    def add_to_group(self, title: str, *names: str, **kwargs: Any) -> None:
        if title not in self._groups:
            self._groups[title] = self.add_argument_group(title)
        self._groups[title].add_argument(*names, **kwargs)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all of `argv`; an unknown flag is a `ConfigError` with the closest known one."""
        namespace, unknown = self.parse_known_args([self._two_dashes(word) for word in argv])
        for word in unknown:
            name = word.split("=")[0]
            if name.startswith("-"):
                raise ConfigError(f"{name} is not a flag of {self.prog}{self._advice(name)}")
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is one argument too many; see {self.prog} --help")
        return namespace

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ")
        text = text.replace(": expected one argument", " needs a value")
        raise ConfigError(text.replace(": ignored explicit argument", " takes no value, but got"))

    def _two_dashes(self, word: str) -> str:
        """`-tp` and `-tp=2`, as other engines spell them -> `--tp`, `--tp=2`.

        As a flag of argparse's own it would also answer to `-t`.
        """
        name = word.partition("=")[0]
        is_known = f"-{name}" in {*self._option_string_actions, *ELSEWHERE}
        return f"-{word}" if re.fullmatch(r"-[a-z]{2}", name) and is_known else word

    def _advice(self, name: str) -> str:
        if name in ELSEWHERE:
            return f"; {ELSEWHERE[name].format(prog=self.prog)}"
        advice = closest(name.replace("_", "-"), self._option_string_actions)
        return advice or f"; see {self.prog} --help"
