"""Tokenizers for the text tests: a tiny one made here, and real ones when their files are there."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moe_serve.tokenizer import Tokenizer

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
REAL = {
    "qwen3": "qwen3",
    "deepseek_v3": "deepseek_v3",
    "mixtral": "mixtral_8x7b",
    "olmoe": "olmoe_gpt-neox-olmo-dolma-v1_5",
}
EOS, START = "<|end|>", "<|start|>"


def byte_level_backend() -> tokenizers.Tokenizer:
    """256 byte tokens, three merges (one across a character's bytes), three added tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = "Ġ"
    merges = [("a", "b"), (space, "c"), ("ð", "Ł")]
    vocab = {token: i for i, token in enumerate([*letters, *(a + b for a, b in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS, START])
    backend.add_tokens([tokenizers.AddedToken("<tool ▁é>", special=False)])
    return backend


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    """Byte-level tokenizer without BOS and PAD."""
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), eos_token=EOS))


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    hf = PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), eos_token=EOS)
    hf.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def real_tokenizer() -> Callable[[str], Tokenizer]:
    """Loads one of REAL by name, once; skips the test when its file is not on this machine."""
    loaded: dict[str, Tokenizer] = {}

    def load(name: str) -> Tokenizer:
        if name not in loaded:
            file = SHARED / "tokenizers" / f"{REAL[name]}.tokenizer.json.gz"
            if not file.is_file():
                pytest.skip(f"no {file.name} on this machine")
            backend = tokenizers.Tokenizer.from_str(gzip.decompress(file.read_bytes()).decode())
            loaded[name] = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def prompt_texts() -> list[str]:
    file = SHARED / "prompts" / "prompts.jsonl"
    if not file.is_file():
        pytest.skip(f"no {file.name} on this machine")
    lines = file.read_text(encoding="utf-8").splitlines()
    return [turn for line in lines if line for turn in json.loads(line)["turns"]]


@pytest.fixture(scope="session")
def chat_templates() -> list[Path]:
    found = sorted((SHARED / "chat_templates").glob("*.jinja"))
    if not found:
        pytest.skip("no chat templates on this machine")
    return found
