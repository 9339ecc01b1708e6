"""Tiny model folders that the whole server can load: random weights, or a script of tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# Triton reads it when a kernel is defined, so before any file of kernels is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

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


FIELDS: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    # Wide enough that texts wander and experts differ.
    "initializer_range": 0.15,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 32,
                               "intermediate_size": 64, "norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2Moe", {"num_experts": 8, "moe_intermediate_size": 32,
                               "intermediate_size": 40, "shared_expert_intermediate_size": 48}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "intermediate_size": 32}),
    "olmoe": ("Olmoe", {"num_experts": 8, "intermediate_size": 32}),
}  # fmt: skip


def save_random_family(folder: Path, family: str, **changes: object) -> None:
    """A model of a few ten thousand random weights, always the same."""
    torch.manual_seed(0)
    prefix, own = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**(FIELDS | own | changes))
    getattr(transformers, f"{prefix}ForCausalLM")(config).save_pretrained(folder)


def save_scripted_model(folder: Path, followers: dict[int, dict[int, float]]) -> None:
    """A model whose logits after token t are `followers[t]` (0 elsewhere), whatever came before.

    The hidden state is one-hot in the last token: attention and experts add nothing, the final
    norm turns it into sqrt(hidden), and the head maps it to the wanted row.
    """
    save_random_family(folder, "qwen3_moe", hidden_size=VOCAB_SIZE, num_hidden_layers=1)
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
    save_random_family(folder, "qwen3_moe")
    save_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def random_family(
    tmp_path_factory: pytest.TempPathFactory, random_model: Path
) -> Callable[[str], Path]:
    """random_family("mixtral") -> a folder of that family, made once."""
    made = {"qwen3_moe": random_model}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            save_random_family(made[name], name)
            save_byte_tokenizer(made[name])
        return made[name]

    return get


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What two test processes share: files stay whole, for their fixtures; servers run one after
    the other, and so do ranks. They begin first, since they take longest.
    """
    if config.pluginmanager.hasplugin("xdist"):
        items.sort(key=lambda item: _GROUPS.index(_group(item)))
        for item in items:
            item.add_marker(pytest.mark.xdist_group(_group(item) or str(item.path)))


_GROUPS = ("servers", "ranks", "")


def _group(item: pytest.Item) -> str:
    if item.path.parent.name == "server":
        return "servers"
    return "ranks" if item.get_closest_marker("dist") is not None else ""
