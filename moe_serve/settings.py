"""Flags, `MOE_SERVE_*` variables and YAML keys, all made from the dataclasses of `config`.

    flag  >  environment  >  file (--config or MOE_SERVE_CONFIG)  >  default

A field `max_num_seqs` is `--max-num-seqs`, `MOE_SERVE_MAX_NUM_SEQS` and `max_num_seqs` (or
`max-num-seqs`) in YAML; its aliases are spelled the same three ways. A flag given twice counts
once, the last. Two spellings of one option in the environment, or in the file, are an error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import AliasChoices, Field, TypeAdapter, ValidationError, create_model
from pydantic_settings import (
    BaseSettings,
    CliPositionalArg,
    CliSettingsSource,
    EnvSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from moe_serve.config import EngineConfig, flag
from moe_serve.errors import ConfigError
from moe_serve.option_parser import OptionParser, closest
from moe_serve.options import ENV_PREFIX, FILE, Option, options_of, variable

POSITIONAL = "model"
EPILOG = """\
Every option can also be set as MOE_SERVE_<NAME> in the environment (MOE_SERVE_PORT=9000) or as a
key of the YAML file (port: 9000). A flag beats the environment, which beats the file."""

C = TypeVar("C", bound=EngineConfig)


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """A value and where it was written: '--port', 'MOE_SERVE_PORT' or 'serve.yaml: port'."""

    value: Any
    origin: str


def parse(
    config_type: type[C],
    argv: Sequence[str],
    *,
    prog: str,
    description: str = "",
    other_types: Iterable[type[EngineConfig]] = (),
) -> C:
    """Build `config_type` from flags, environment and file, in that order of precedence.

    `other_types` are the configs of other commands: their variables are known, and ignored here.
    Raises `ConfigError` naming the flag, variable or key, its value and what is allowed;
    `SystemExit(0)` after `--help`.
    """
    options = options_of(config_type)
    reader = _Reader(options, _parser(options, prog, description))
    flags = reader.flags(argv)
    variables = reader.variables(other_types)
    path = (flags.get(FILE) or variables.get(FILE) or Given(None, "")).value
    given = (reader.file(path) if path else {}) | variables | flags
    given.pop(FILE, None)
    return _build(config_type, options, given)


class _Reader:
    """Reads each source through pydantic-settings into option name -> `Given`."""

    def __init__(self, options: dict[str, Option], parser: OptionParser) -> None:
        self._options = options
        self._parser = parser
        self._by_spelling = {name: o for o in options.values() for name in o.spellings}
        self._model = _settings_model(options)
        self._cli: CliSettingsSource[OptionParser] = CliSettingsSource(
            self._model,
            root_parser=parser,
            add_argument_method=self._add_argument,
            cli_kebab_case=True,
            cli_implicit_flags=True,
            # Nothing on a command line stands for None: no argument can hold a NUL.
            cli_parse_none_str="\0",
        )

    def flags(self, argv: Sequence[str]) -> dict[str, Given]:
        namespace = self._parser.parse(argv)
        for name, value in vars(namespace).items():
            if isinstance(value, list):
                # As JSON, so that a comma in a repeated value does not split it.
                setattr(namespace, name, json.dumps(value))
        values = self._named(self._cli(parsed_args=namespace)())
        return {
            name: Given(value, "MODEL" if name == POSITIONAL else flag(name))
            for name, value in values.items()
        }

    def variables(self, other_types: Iterable[type[EngineConfig]]) -> dict[str, Given]:
        present = {
            name.upper()
            for name, value in os.environ.items()
            if name.upper().startswith(ENV_PREFIX) and not _is_service_link(name.upper(), value)
        }
        own = [spelling.upper() for spelling in self._by_spelling]
        other_options = [o for type_ in other_types for o in options_of(type_).values()]
        others = [spelling.upper() for o in other_options for spelling in o.spellings]
        for name in sorted(present.difference(ENV_PREFIX + word for word in own + others)):
            bare = name.removeprefix(ENV_PREFIX)
            advice = closest(bare, own, prefix=ENV_PREFIX)
            advice = advice or closest(bare, others, prefix=ENV_PREFIX)
            raise ConfigError(f"{name} is set but names no option{advice}")
        values = self._named(EnvSettingsSource(self._model)())
        written = [(variable(s), s) for s in self._by_spelling if variable(s) in present]
        names = {self._by_spelling[spelling].name for _, spelling in written}
        return self._given({name: values[name] for name in names}, written)

    def file(self, path: str) -> dict[str, Given]:
        keys = _read_yaml(self._model, path)
        spelled = {str(key).replace("-", "_"): value for key, value in keys.items()}
        if len(spelled) < len(keys):
            raise ConfigError(f"{path}: a key is there twice, once with - and once with _")
        known = [name for name in self._by_spelling if name != FILE]
        for name in spelled:
            if name not in known:
                raise ConfigError(f"{path}: {name} is not an option{closest(name, known)}")
        return self._given(self._named(spelled), [(f"{path}: {name}", name) for name in spelled])

    def _given(
        self, values: dict[str, Any], written: Iterable[tuple[str, str]]
    ) -> dict[str, Given]:
        """`written`: (origin, spelling) of each entry of one source."""
        origins: dict[str, str] = {}
        for origin, spelling in written:
            name = self._by_spelling[spelling].name
            if name in origins:
                raise ConfigError(f"{origins[name]} and {origin} are one option; keep one of them")
            origins[name] = origin
        return {name: Given(value, origins[name]) for name, value in values.items()}

    def _named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {self._by_spelling[key].name: value for key, value in values.items()}

    def _add_argument(self, parser: OptionParser, *names: str, **kwargs: Any) -> None:
        """pydantic-settings' hook for adding one argument: our group, metavar and help."""
        dest = kwargs.get("dest", names[0])
        if dest not in self._options:
            parser.add_argument(*names, **kwargs)
            return
        option = self._options[dest]
        if "metavar" in kwargs:
            kwargs["metavar"] = option.metavar
        kwargs["help"] = option.help_text.replace("%", "%%")
        parser.add_to_group(option.group, *names, **kwargs)


def _is_service_link(name: str, value: str) -> bool:
    """Kubernetes and Docker tell a container of a service called moe-serve by such variables."""
    bare = name.removeprefix(ENV_PREFIX)
    of_service = re.fullmatch(r"SERVICE_(HOST|PORT(_.*)?)|PORT_\d+_(TCP|UDP).*", bare)
    return of_service is not None or (bare == "PORT" and "://" in value)


def _settings_model(options: Mapping[str, Option]) -> type[BaseSettings]:
    class Base(BaseSettings):
        # Lists are decoded in `_checked`, where the error can name the variable.
        model_config = SettingsConfigDict(
            env_prefix=ENV_PREFIX,
            env_prefix_target="all",
            populate_by_name=True,
            enable_decoding=False,
        )

    fields: dict[str, Any] = {}
    for option in options.values():
        hint: Any = CliPositionalArg[str] if option.name == POSITIONAL else option.hint
        alias = AliasChoices(*option.spellings) if option.aliases else None
        fields[option.name] = (hint, Field(default=option.default, validation_alias=alias))
    return create_model("Settings", __base__=Base, **fields)


def _parser(options: Mapping[str, Option], prog: str, description: str) -> OptionParser:
    usage = f"{prog} [MODEL] [options]" if POSITIONAL in options else f"{prog} [options]"
    return OptionParser(prog=prog, usage=usage, description=description, epilog=EPILOG)


def _build(config_type: type[C], options: dict[str, Option], given: dict[str, Given]) -> C:
    values = {name: _checked(options[name], item) for name, item in given.items()}
    try:
        return config_type(**values)
    except ConfigError as error:
        raise ConfigError(_with_origins(str(error), given)) from error


def _checked(option: Option, given: Given) -> Any:
    """The value in the option's type; `ConfigError` with what is allowed."""
    value, origin = given.value, given.origin
    if value == "":
        raise ConfigError(f"{origin} is empty; give a value or leave it out")
    # YAML's `yes` is no port, and pydantic would make 1 of it.
    is_misplaced_bool = isinstance(value, bool) and option.kind is not bool
    try:
        if isinstance(value, str) and option.is_list:
            return TypeAdapter(option.hint).validate_json(value)
        if not is_misplaced_bool:
            return TypeAdapter(option.hint).validate_python(value)
    except ValidationError:
        pass
    if option.kind is str and value is not None:
        # The value stays out of the message: it may be a key.
        raise ConfigError(f"{origin} must be text; write it in quotes")
    raise ConfigError(f"{origin} {value} must be {_allowed(option, value)}")


def _allowed(option: Option, value: Any) -> str:
    if option.choices:
        return f"one of {', '.join(option.choices)}{closest(str(value), option.choices)}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(option.kind, 'a list, as ["a", "b"]')


def _with_origins(message: str, given: Mapping[str, Given]) -> str:
    """`config` names flags; say the variable or the key where the value came from one."""
    origins = {flag(name): item.origin for name, item in given.items()}
    return re.sub(r"--[a-z][a-z0-9-]*", lambda match: origins.get(match[0], match[0]), message)


def _read_yaml(model: type[BaseSettings], path: str) -> dict[str, Any]:
    if not Path(path).is_file():
        raise ConfigError(f"{flag(FILE)} {path}: there is no such file")
    try:
        return YamlConfigSettingsSource(model, path).yaml_data
    except (yaml.YAMLError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{flag(FILE)} {path} cannot be read: {reason}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{flag(FILE)} {path} must hold lines such as `port: 9000`") from error
