"""What a model folder holds beside its weights: config, tokenizer, chat template, checksums."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from moe_serve.convert.new_folder import sync_folder, writing
from moe_serve.errors import CheckpointError
from moe_serve.model_folder import CONFIG_NAME, GENERATION_CONFIG_NAME

CHECKSUMS_NAME = "SHA256SUMS"

# As transformers and the hub name them. All else of a training run stays behind.
_COPIED = (
    GENERATION_CONFIG_NAME, "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab.*", "merges.txt", "spiece.model", "*.tiktoken", "chat_template*",
    "additional_chat_templates/*.jinja", "LICENSE*",
)  # fmt: skip
# Old configs, and libraries of their time, have the second alone.
_DTYPE_FIELDS = ("dtype", "torch_dtype")


def read_side_files(folder: Path, dtype: str) -> dict[str, bytes]:
    """Relative path -> content of all that goes along with weights in `dtype`."""
    files = {CONFIG_NAME: _config(folder / CONFIG_NAME, dtype)}
    for pattern in _COPIED:
        for file in sorted(folder.glob(pattern)):
            if file.is_file():
                files[file.relative_to(folder).as_posix()] = _read(file)
    return files


def write_side_files(folder: Path, files: Mapping[str, bytes]) -> dict[str, str]:
    """Relative path -> SHA-256 of each, after its bytes have reached the disk."""
    for name, content in files.items():
        path = folder / name
        with writing(path):
            if path.parent != folder:
                path.parent.mkdir(exist_ok=True)
            with path.open("xb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            sync_folder(path.parent)
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def checksums_text(digests: Mapping[str, str]) -> str:
    """As `sha256sum` prints them, so that `sha256sum -c SHA256SUMS` checks them."""
    return "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))


def _config(file: Path, dtype: str) -> bytes:
    """The config, telling `dtype` where it told another."""
    fields = json.loads(_read(file))
    for name in [name for name in _DTYPE_FIELDS if name in fields] or _DTYPE_FIELDS[:1]:
        fields[name] = dtype
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
