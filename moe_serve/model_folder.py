"""A model folder: its config, its spec and its end-of-text ids."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoConfig

from moe_serve.deepspeed_checkpoint.step_files import is_deepspeed
from moe_serve.errors import CheckpointError
from moe_serve.model_path import resolve_model
from moe_serve.models.reading import HFConfig, token_ids
from moe_serve.models.registry import find_family
from moe_serve.models.spec import DecoderSpec

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A folder whose config can be served. `eos_token_ids`: all that end a text."""

    path: Path
    hf_config: HFConfig
    spec: DecoderSpec
    eos_token_ids: frozenset[int]

    @property
    def architecture(self) -> str:
        return self.spec.architecture


def open_model_folder(model: str, revision: str | None = None) -> ModelFolder:
    """Find the folder and read all but its weights. Raises `CheckpointError`."""
    path = resolve_model(model, revision)
    hf_config = read_config(path)
    return ModelFolder(
        path=path,
        hf_config=hf_config,
        spec=find_family(hf_config.architectures).spec(hf_config),
        eos_token_ids=eos_token_ids(path, hf_config, tokenizer_eos(path)),
    )


def read_config(folder: Path) -> HFConfig:
    """The folder's config as transformers reads it, of an architecture that can be served.

    Raises `CheckpointError` naming the file.
    """
    file = folder / CONFIG_NAME
    if not file.is_file():
        # DeepSpeed alone saves weights and nothing else.
        hint = "; copy it there from the model that was trained, with the tokenizer"
        raise CheckpointError(
            f"{folder}: has no {CONFIG_NAME}{hint if is_deepspeed(folder) else ''}"
        )
    # Before transformers sees it, which does not know every architecture's type either.
    find_family(_read_json(file).get("architectures"))
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # The library raises whatever its validators raise.
    except Exception as error:
        raise CheckpointError(f"{file}: cannot be used: {error}") from error


def eos_token_ids(
    folder: Path, hf_config: HFConfig, tokenizer_eos: int | None = None
) -> frozenset[int]:
    """Every id that ends a text: config.json's, generation_config.json's and the tokenizer's.

    An id outside the vocabulary is dropped with a warning.
    """
    sources = {
        CONFIG_NAME: token_ids(hf_config.eos_token_id, f"{CONFIG_NAME}: eos_token_id"),
        GENERATION_CONFIG_NAME: _generation_eos(folder / GENERATION_CONFIG_NAME),
        "the tokenizer": () if tokenizer_eos is None else (tokenizer_eos,),
    }
    for source, ids in sources.items():
        for outside in (one for one in ids if not 0 <= one < hf_config.vocab_size):
            logger.warning(
                "%s: ignoring eos_token_id %d of %s: the vocabulary has %d entries",
                folder, outside, source, hf_config.vocab_size,
            )  # fmt: skip
    return frozenset(
        one for ids in sources.values() for one in ids if 0 <= one < hf_config.vocab_size
    )


def tokenizer_eos(folder: Path) -> int | None:
    """The id of the tokenizer's own end-of-text token, where the folder names one."""
    config, vocabulary = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not (config.is_file() and vocabulary.is_file()):
        return None
    token = _read_json(config).get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    try:
        token_id: int | None = Tokenizer.from_file(str(vocabulary)).token_to_id(text)
    # The Rust library raises bare exceptions.
    except Exception as error:
        raise CheckpointError(f"{vocabulary}: cannot be read: {error}") from error
    return token_id


def _generation_eos(file: Path) -> tuple[int, ...]:
    if not file.is_file():
        return ()
    return token_ids(_read_json(file).get("eos_token_id"), f"{file}: eos_token_id")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{file}: not readable JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file}: must hold a JSON object, found {type(fields).__name__}")
    return fields
