"""From what the user calls a model to a folder. Imports neither torch nor transformers."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError

from moe_serve.config import BUILTIN_MODEL
from moe_serve.errors import CheckpointError, ConfigError

_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
_UNWANTED = ["*/*", "consolidated*"]


def resolve_model(model: str, revision: str | None = None) -> Path:
    """'builtin', a local folder, or a hub id (downloaded, or from the cache when offline).

    Raises `CheckpointError` with a hint if there is no such model or it cannot be fetched, and
    `ConfigError` for a revision of what has none.
    """
    path = Path(model).expanduser()
    if model == BUILTIN_MODEL:
        path = Path(__file__).parent / "builtin"
    if path.is_dir():
        if revision is not None:
            raise ConfigError(
                f"--revision {revision} has no effect on {model}, which is no hub model; drop it"
            )
        return path
    if path.exists():
        raise CheckpointError(f"{model}: a file; give the folder that holds it")
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise CheckpointError(f"{model}: no such folder")
    return _download(model, revision)


def _download(model: str, revision: str | None) -> Path:
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
            )
        )
    # Every kind of network, cache and name error; each carries its own text.
    except (HfHubHTTPError, OSError, ValueError) as error:
        at = f" at revision {revision}" if revision else ""
        hint = (
            "HF_HUB_OFFLINE is set and the model is not in the cache"
            if constants.HF_HUB_OFFLINE
            else "check the name, the network, and HF_TOKEN if it is private"
        )
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{model}{at}: no such folder, and not available from the hub ({hint}): {reason[0]}"
        ) from error
