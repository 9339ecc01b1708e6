"""Whole steps of real models: what their layers launch together, at the shapes they really have."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import transformers

from kernel_cases.case import Case
from moe_serve.batch import Batch
from moe_serve.context import LayerKV, StepContext
from moe_serve.decode_graphs import StaticBatch
from moe_serve.experts.load import ExpertLoad
from moe_serve.models.decoder import Decoder
from moe_serve.models.registry import find_family
from moe_serve.models.spec import AttentionSpec

META = torch.device("meta")
BLOCK_SIZE = 16
NUM_BLOCKS = 4096

# Fields in which the released models differ from the defaults of their config class. Two layers:
# all are alike.
QWEN3_30B_A3B = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
                 "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
                 "moe_intermediate_size": 768, "vocab_size": 151936}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "Qwen3-30B-A3B": ("Qwen3Moe", QWEN3_30B_A3B),
    "Mixtral-8x7B": ("Mixtral", {}),
    "Qwen1.5-MoE-A2.7B": ("Qwen2Moe", {"num_key_value_heads": 16}),
    "OLMoE-1B-7B": ("Olmoe", {}),
}


def make_decoder(name: str) -> Decoder:
    prefix, fields = MODELS[name]
    architectures = [f"{prefix}ForCausalLM"]
    config = getattr(transformers, f"{prefix}Config")(
        num_hidden_layers=2, architectures=architectures, **fields
    )
    return Decoder(find_family(architectures).spec(config), torch.bfloat16, META)


def run_decode(decoder: Decoder, num_sequences: int, kv_dtype: torch.dtype) -> None:
    """As it is captured: padded, with an expert load to count."""
    batch = StaticBatch(num_sequences, decoder.spec.max_position, BLOCK_SIZE, META)
    token_ids_S = batch.token_ids_S
    _run(decoder, Batch(token_ids_T=token_ids_S, context=batch.context(num_sequences)), kv_dtype)


def run_prompt(decoder: Decoder, num_tokens: int) -> None:
    context = StepContext(
        positions_T=torch.empty(num_tokens, dtype=torch.int64, device=META),
        slots_T=torch.empty(num_tokens, dtype=torch.int64, device=META),
        query_starts=[0, num_tokens],
        context_lens=[num_tokens],
        block_tables_SB=torch.empty(1, num_tokens // BLOCK_SIZE, dtype=torch.int64, device=META),
        num_decodes=0,
        block_size=BLOCK_SIZE,
    )
    _run(decoder, Batch(token_ids_T=context.positions_T, context=context), decoder.dtype)


def _run(decoder: Decoder, batch: Batch, kv_dtype: torch.dtype) -> None:
    spec = decoder.spec
    pool = [_pool(layer.attention, kv_dtype) for layer in spec.layers]
    num_experts = max(mlp.num_experts for mlp in spec.moe_layers)
    load = ExpertLoad(len(spec.moe_layers), num_experts, META)
    hidden_TD = decoder(batch.token_ids_T, batch.context, pool, load)
    decoder.logits(hidden_TD[:1])


def _pool(spec: AttentionSpec, dtype: torch.dtype) -> LayerKV:
    shape = (NUM_BLOCKS, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    keys, values = (torch.empty(shape, dtype=dtype, device=META) for _ in range(2))
    return LayerKV(keys_BsNh=keys, values_BsNh=values)


def default() -> Iterator[Case]:
    """With norms per head; with biases and a shared expert."""
    for name in ("Qwen3-30B-A3B", "Qwen1.5-MoE-A2.7B"):
        yield from cases_of(name, (64,))


def everything() -> Iterator[Case]:
    for name in MODELS:
        yield from cases_of(name, (1, 8, 64))
    decoder = make_decoder("Qwen3-30B-A3B")
    yield Case("fp8 keys, 8 decodes", lambda: run_decode(decoder, 8, torch.float8_e4m3fn))


def cases_of(name: str, sizes: tuple[int, ...]) -> Iterator[Case]:
    decoder = make_decoder(name)
    for size in sizes:
        call = functools.partial(run_decode, decoder, size, torch.bfloat16)
        yield Case(f"{name}, {size} decodes", call)
    yield Case(f"{name}, prompt of 4096", functools.partial(run_prompt, decoder, 4096))
