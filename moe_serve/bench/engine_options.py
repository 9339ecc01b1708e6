"""The engine's options on the parser of a benchmark: the same flags, variables and YAML keys."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Collection

from moe_serve import logs, settings
from moe_serve.cli.generate import GenerateConfig
from moe_serve.config import EngineConfig, ServeConfig, flag
from moe_serve.option_parser import OptionParser
from moe_serve.options import FILE, Option, options_of

_GROUP = "engine options"
_PREFIX_CACHING = "enable_prefix_caching"


def add_engine_arguments(
    parser: argparse.ArgumentParser, names: Collection[str] | None = None
) -> None:
    """MODEL, also as --model, and every flag of `EngineConfig`, or those of `names`.

    Values stay text until `read_engine_config`: there is one place that knows what they may be.
    """
    parser.add_argument(
        "model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="as --model"
    )
    # An `OptionParser` also takes the short spellings of flags that it is told of.
    if isinstance(parser, OptionParser):
        add: Callable[..., object] = functools.partial(parser.add_to_group, _GROUP)
    else:
        add = parser.add_argument_group(_GROUP).add_argument
    for option in options_of(EngineConfig).values():
        if names is None or option.name in (*names, FILE):
            add(*(flag(spelling) for spelling in option.spellings), **_keywords(option))


def _keywords(option: Option) -> dict[str, object]:
    words: dict[str, object] = {
        "dest": option.name,
        "default": argparse.SUPPRESS,
        "metavar": option.metavar,
        "help": option.help_text.replace("%", "%%"),
    }
    if option.kind is bool:
        words["action"] = argparse.BooleanOptionalAction
    return words


def read_engine_config(args: argparse.Namespace, *, prog: str) -> EngineConfig:
    """What the flags, the environment and the YAML file say; `ConfigError` where that cannot be.

    Prefixes are not cached unless --enable-prefix-caching is given: prompts that come again would
    cost nothing. Only warnings are logged from here on.
    """
    logs.set_up("warning", role="bench")
    words = [] if hasattr(args, _PREFIX_CACHING) else [flag(f"no_{_PREFIX_CACHING}")]
    for name, option in options_of(EngineConfig).items():
        if not hasattr(args, name):
            continue
        value = getattr(args, name)
        if name == "model":
            words.append(value)
        elif option.kind is bool:
            words.append(flag(name if value else f"no_{name}"))
        else:
            words.append(f"{flag(name)}={value}")
    return settings.parse(EngineConfig, words, prog=prog, other_types=[ServeConfig, GenerateConfig])
