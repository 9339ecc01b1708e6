"""The servers under test, and what they tell of themselves."""

from __future__ import annotations

import dataclasses
import urllib.error
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from moe_serve.bench.serving.material import Material, ids_seen, probe_text
from moe_serve.cli.client import ask
from moe_serve.errors import ConfigError, MoeServeError

# Letters of the text whose tokens prompts are made of; a server may refuse a longer one.
_PROBES = (16000, 2000, 200)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`facts`: what the server tells of the model and of itself, for the record."""

    name: str
    url: str
    model: str
    facts: dict[str, Any]


def parse_urls(base_url: str, compare: Sequence[str] | None) -> list[tuple[str, str]]:
    """(name, URL) of each server, without the /v1 that clients of the API give."""
    if not compare:
        return [("server", _checked("--base-url", base_url))]
    pairs = []
    for word in compare:
        name, mark, url = word.partition("=")
        if not mark or not name:
            raise ConfigError(f"--compare {word} must be NAME=URL, as ours=http://127.0.0.1:8000")
        pairs.append((name, _checked("--compare", url)))
    names = [name for name, _ in pairs]
    if len(names) < 2:
        raise ConfigError("--compare needs two servers or more; one alone goes to --base-url")
    if len(set(names)) < len(names):
        raise ConfigError(f"--compare gives a name twice: {', '.join(names)}")
    return pairs


def _checked(flag: str, url: str) -> str:
    try:
        address = urlsplit(url)
        is_whole = address.scheme in ("http", "https") and bool(address.hostname)
        _ = address.port
    except ValueError as error:
        raise ConfigError(f"{flag} {url}: {error}") from error
    if not is_whole:
        raise ConfigError(f"{flag} {url} must begin with http:// or https:// and name a host")
    return url.rstrip("/").removesuffix("/v1")


def find_target(name: str, url: str, model: str | None, api_key: str | None) -> Target:
    """Asks the server what it serves. Raises `ConfigError` where it does not answer.

    One that has no list of models will do where `model` is given.
    """
    facts: dict[str, Any] = {}
    try:
        served = ask(url, "/v1/models", api_key)
        entries = [each for each in served["data"] if isinstance(each["id"], str)]
    except (MoeServeError, LookupError, TypeError) as error:
        cause = error.__cause__
        is_there = not isinstance(error, MoeServeError) or isinstance(cause, urllib.error.HTTPError)
        if model is None or not is_there:
            text = error if isinstance(error, MoeServeError) else f"{url}/v1/models lists no model"
            raise ConfigError(str(text)) from error
        entries = []
    if model is None and not entries:
        raise ConfigError(f"{url}/v1/models lists no model; give --model")
    model = model or entries[0]["id"]
    facts["model"] = next((entry for entry in entries if entry["id"] == model), None)
    facts["version"] = _version(url, api_key)
    return Target(name=name, url=url, model=model, facts=facts)


def _version(url: str, api_key: str | None) -> Any:
    try:
        return ask(url, "/version", api_key, timeout=5)
    except MoeServeError:
        return None


def ids_of(targets: Sequence[Target], api_key: str | None, seed: int) -> Material:
    """Ids of ordinary text, from the first server that tokenizes. Raises `ConfigError`."""
    for target in targets:
        for num_letters in _PROBES:
            text = probe_text(seed, num_letters)
            # As vLLM and this server spell it; as llama.cpp does.
            for body in (
                {"model": target.model, "prompt": text, "add_special_tokens": False},
                {"content": text, "add_special": False},
            ):
                if ids := _tokenized(target.url, api_key, body):
                    return ids_seen(ids)
    raise ConfigError(
        "no server has /tokenize, which tells ids that are safe to send; give --tokenizer PATH, "
        "--vocab-size N or --prompt-tokens text"
    )


def _tokenized(url: str, api_key: str | None, body: dict[str, Any]) -> list[int]:
    try:
        ids = ask(url, "/tokenize", api_key, body=body)["tokens"]
    except (MoeServeError, LookupError, TypeError):
        return []
    return ids if isinstance(ids, list) and all(type(each) is int for each in ids) else []
