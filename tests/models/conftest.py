"""Tiny random models of each family, transformers as the reference, and a paged greedy runner."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moe_serve.context import LayerKV, StepContext
from moe_serve.experts.load import ExpertLoad
from moe_serve.loader import load_model
from moe_serve.model_folder import read_config
from moe_serve.models.decoder import Decoder

BLOCK_SIZE = 4
CPU = torch.device("cpu")

_SHARED = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    # Wide enough that greedy texts wander and experts differ.
    "initializer_range": 0.15,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 8, "intermediate_size": 32}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 8,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "intermediate_size": 40,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_experts": 8,
            "moe_intermediate_size": 32,
            "intermediate_size": 40,
            "head_dim": 32,
            "norm_topk_prob": True,
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "intermediate_size": 32}),
}


class Generated(NamedTuple):
    """Greedy tokens, and the log-probabilities [steps, V] that each was chosen from."""

    token_ids: list[int]
    logprobs: torch.Tensor


class Runner:
    """One sequence at a time through a Decoder, over blocks handed out in a scattered order."""

    def __init__(self, model: Decoder, num_blocks: int = 64) -> None:
        self.model = model
        self.load = ExpertLoad(
            len(model.spec.moe_layers),
            max((layer.num_experts for layer in model.spec.moe_layers), default=0),
            CPU,
        )
        self.kv = []
        for layer in model.spec.layers:
            shape = (num_blocks, BLOCK_SIZE, layer.attention.num_kv_heads, layer.attention.head_dim)
            # NaN: whatever reads a slot that was not written shows.
            pool = [torch.full(shape, float("nan"), dtype=model.dtype) for _ in range(2)]
            self.kv.append(LayerKV(keys_BsNh=pool[0], values_BsNh=pool[1]))
        self.blocks = torch.tensor([(i * 11 + 5) % num_blocks for i in range(num_blocks)])

    def step(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """Tokens at positions from `start` on -> logits [T, V]."""
        stop = start + len(token_ids)
        positions = torch.arange(start, stop)
        context = StepContext(
            positions_T=positions,
            slots_T=self.blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
            query_starts=[0, len(token_ids)],
            context_lens=[stop],
            block_tables_SB=self.blocks[None, : -(-stop // BLOCK_SIZE)],
            num_decodes=int(len(token_ids) == 1 and start > 0),
            block_size=BLOCK_SIZE,
        )
        hidden = self.model(torch.tensor(token_ids), context, self.kv, self.load)
        return self.model.logits(hidden)

    def generate(self, prompt: Sequence[int], num_tokens: int) -> Generated:
        """Prefill, then one token a step."""
        logits = self.step(prompt, 0)[-1]
        token_ids, logprobs = [], []
        while True:
            logprobs.append(logits.log_softmax(-1))
            token_ids.append(int(logits.argmax()))
            if len(token_ids) == num_tokens:
                return Generated(token_ids, torch.stack(logprobs))
            logits = self.step(token_ids[-1:], len(prompt) + len(token_ids) - 1)[-1]

    def score(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Log-probabilities [T, V] after each token, in one prefill."""
        return self.step(token_ids, 0).log_softmax(-1)


class Reference:
    """The same questions, answered by transformers."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def generate(self, prompt: Sequence[int], num_tokens: int) -> Generated:
        out = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.cat(out.logits).float()
        return Generated(out.sequences[0, len(prompt) :].tolist(), logits.log_softmax(-1))

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> torch.Tensor:
        logits = self.model(torch.tensor([token_ids]), use_cache=False).logits[0]
        return logits.float().log_softmax(-1)


class TinyModel:
    """A saved random model: its folder, and transformers' and our view of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def prompt(length: int) -> list[int]:
        return [(7 * i * i + 3 * i + length) % _SHARED["vocab_size"] for i in range(length)]

    def reference(self, dtype: torch.dtype = torch.float32) -> Reference:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        )
        return Reference(model.eval())

    def decoder(self, dtype: torch.dtype = torch.float32) -> Decoder:
        return load_model(
            self.folder, read_config(self.folder), dtype=dtype, device=CPU, show_progress=False
        )

    def runner(self, dtype: torch.dtype = torch.float32) -> Runner:
        return Runner(self.decoder(dtype))

    def assert_same_greedy(self, prompt_length: int, num_tokens: int) -> None:
        prompt = self.prompt(prompt_length)
        expected = self.reference().generate(prompt, num_tokens)
        found = self.runner().generate(prompt, num_tokens)
        assert found.token_ids == expected.token_ids
        torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-4, rtol=0)

    def assert_same_scores(self, num_tokens: int = 33) -> torch.Tensor:
        """fp32 log-probabilities after each of the tokens; returned to compare models."""
        token_ids = self.prompt(num_tokens)
        found = self.runner().score(token_ids)
        torch.testing.assert_close(found, self.reference().score(token_ids), atol=1e-4, rtol=0)
        return found

    def edit_config(self, **changes: Any) -> None:
        """`name=...` drops the field."""
        file = self.folder / "config.json"
        fields = json.loads(file.read_text())
        for name, value in changes.items():
            if value is ...:
                fields.pop(name, None)
            else:
                fields[name] = value
        file.write_text(json.dumps(fields))

    def edit_tensors(self, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
        file = self.folder / "model.safetensors"
        tensors = load_file(file)
        edit(tensors)
        tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(autouse=True)
def _one_thread_and_silence() -> Iterator[None]:
    """Tiny products gain nothing from threads, and wait long for them on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_tiny(tmp_path: Path) -> Callable[..., TinyModel]:
    """make_tiny(family, max_shard_size=..., **config fields) -> TinyModel, always of seed 0."""

    def make(family: str, *, max_shard_size: str = "50GB", **fields: Any) -> TinyModel:
        prefix, own = FAMILIES[family]
        config = getattr(transformers, f"{prefix}Config")(**{**_SHARED, **own, **fields})
        torch.manual_seed(0)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                # Norms of one and biases of zero would hide that they are not applied.
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        number = sum(1 for _ in tmp_path.iterdir())
        folder = tmp_path / f"{family}-{number}"
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return TinyModel(folder)

    return make


@pytest.fixture
def tiny_model() -> type[TinyModel]:
    """TinyModel(folder), for a folder that is there already."""
    return TinyModel
