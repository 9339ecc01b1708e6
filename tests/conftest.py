"""Tiny model folders that the whole server can load: random weights, or a script of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"
VOCAB_SIZE = 320


def byte_vocabulary() -> dict[str, int]:
    """One token a byte: the id is the byte."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    encoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    table: dict[str, int] = {}
    for code in range(128):
        table[encoder.pre_tokenize_str(chr(code))[0][0]] = code
    # The rest of GPT-2's table, in its documented order: shifted bytes stand at U+0100 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [byte for byte in range(256) if byte not in printable]
    for byte in range(128, 256):
        letter = chr(byte) if byte in printable else chr(256 + shifted.index(byte))
        table[letter] = byte
    assert set(table) == set(alphabet)
    return table


def save_byte_tokenizer(folder: Path) -> None:
    """256 byte tokens and an end token of id 256; a plain chat template."""
    backend = Tokenizer(models.BPE(vocab=byte_vocabulary(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(folder)


def save_random_model(folder: Path, **changes: object) -> None:
    """A Qwen3-MoE of a few thousand weights, always the same."""
    torch.manual_seed(0)
    fields: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    config = transformers.Qwen3MoeConfig(**(fields | changes))
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)


def save_scripted_model(folder: Path, followers: dict[int, dict[int, float]]) -> None:
    """A model whose logits after token t are `followers[t]` (0 elsewhere), whatever came before.

    The hidden state is one-hot in the last token: attention and experts add nothing, the final
    norm turns it into sqrt(hidden), and the head maps it to the wanted row.
    """
    save_random_model(folder, hidden_size=VOCAB_SIZE, num_hidden_layers=1)
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(folder)
    state = model.state_dict()
    for name, tensor in state.items():
        if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")):
            tensor.zero_()
    state["model.embed_tokens.weight"].copy_(torch.eye(VOCAB_SIZE))
    head = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
    for token, row in followers.items():
        for follower, logit in row.items():
            head[follower, token] = logit / VOCAB_SIZE**0.5
    state["lm_head.weight"].copy_(head)
    model.save_pretrained(folder)


def chain(text: bytes, after: int) -> dict[int, dict[int, float]]:
    """Followers that write `text` after the token `after`, then the end token."""
    tokens = [after, *text, 256]
    assert len(set(tokens)) == len(tokens), "each token has one follower"
    return {a: {b: 20.0} for a, b in zip(tokens, tokens[1:], strict=False)}


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    save_random_model(folder)
    save_byte_tokenizer(folder)
    return folder


@pytest.fixture
def scripted_model(tmp_path: Path) -> Callable[[dict[int, dict[int, float]]], Path]:
    """scripted_model(followers) -> a folder; the end token stops it."""

    def make(followers: dict[int, dict[int, float]]) -> Path:
        save_scripted_model(tmp_path, followers)
        save_byte_tokenizer(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        config["eos_token_id"] = 256
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return make


@pytest.fixture(autouse=True, scope="session")
def _quiet_transformers() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
