"""The options of a command, read off its config dataclass for `settings` and for `--help`."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal

from moe_serve.config import EngineConfig

ENV_PREFIX = "MOE_SERVE_"
FILE = "config"
COMMON = "options"
_NUMBERS = {int: "N", float: "X"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One field of a config dataclass, as flags, variables and YAML keys see it."""

    name: str
    hint: Any
    default: Any
    help: str
    aliases: tuple[str, ...] = ()
    group: str = COMMON

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def kind(self) -> Any:
        """The type without `| None`."""
        is_union = typing.get_origin(self.hint) in (typing.Union, types.UnionType)
        members = typing.get_args(self.hint) if is_union else (self.hint,)
        return next(member for member in members if member is not type(None))

    @property
    def choices(self) -> tuple[str, ...]:
        is_choice = typing.get_origin(self.kind) is Literal
        return tuple(map(str, typing.get_args(self.kind))) if is_choice else ()

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.kind) is tuple

    @property
    def metavar(self) -> str:
        """`{a,b}` for a choice, N or X for a number, else the last word of the name."""
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        if self.name == FILE:
            return "FILE"
        return _NUMBERS.get(self.kind, self.name.rpartition("_")[2].upper())

    @property
    def help_text(self) -> str:
        default = self.default
        if default is None or default == ():
            return self.help
        if isinstance(default, bool):
            default = "on" if default else "off"
        return f"{self.help} [{default}]"


def options_of(config_type: type[EngineConfig]) -> dict[str, Option]:
    """Name -> option of a config dataclass, and the option that names the YAML file.

    A group is the dataclass that brought the field: "engine options", "serve options".
    """
    hints = typing.get_type_hints(config_type)
    owners = {name: owner for owner in config_type.__mro__ for name in _own_fields(owner)}
    options = {
        field.name: Option(
            name=field.name,
            hint=hints[field.name],
            default=field.default,
            help=field.metadata["help"],
            aliases=field.metadata["aliases"],
            group=f"{owners[field.name].__name__.removesuffix('Config').lower()} options",
        )
        for field in dataclasses.fields(config_type)
    }
    file = Option(name=FILE, hint=str | None, default=None, help="YAML file with any of these")
    return options | {FILE: file}


def variable(spelling: str) -> str:
    """The environment variable of an option's name or alias."""
    return ENV_PREFIX + spelling.upper()


def _own_fields(owner: type) -> list[str]:
    return list(vars(owner).get("__annotations__", {}))
