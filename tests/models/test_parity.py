"""Each family against transformers, on tiny random weights."""

from __future__ import annotations

import pytest
import torch

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"]
NUM_TOKENS = 64

# Config fields beside each family's defaults, one case a line.
VARIANTS = {
    "mixtral-head-dim": ("mixtral", {"head_dim": 32}),
    "mixtral-top-1": ("mixtral", {"num_experts_per_tok": 1}),
    "mixtral-tied": ("mixtral", {"tie_word_embeddings": True}),
    "olmoe-clamped": ("olmoe", {"clip_qkv": 0.5}),
    "olmoe-biased": ("olmoe", {"attention_bias": True}),
    "qwen2-unbiased": ("qwen2_moe", {"qkv_bias": False}),
    "qwen2-dense-first": ("qwen2_moe", {"mlp_only_layers": [0]}),
    "qwen2-every-second": ("qwen2_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 3}),
    "qwen3-biased": ("qwen3_moe", {"attention_bias": True}),
    "qwen3-dense-last": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "qwen3-every-second": ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 3}),
    "qwen3-gelu": ("qwen3_moe", {"hidden_act": "gelu_pytorch_tanh"}),
    "qwen3-one-kv-head": ("qwen3_moe", {"num_key_value_heads": 1}),
}


@pytest.mark.parametrize("prompt_length", [1, 7, 33])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(make_tiny, family: str, prompt_length: int) -> None:
    make_tiny(family).assert_same_greedy(prompt_length, NUM_TOKENS)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_logprobs_stay_close_to_transformers(make_tiny, family: str) -> None:
    tiny = make_tiny(family, initializer_range=0.02)
    token_ids = tiny.prompt(NUM_TOKENS)
    found = tiny.runner(torch.bfloat16).score(token_ids)
    assert (found - tiny.reference(torch.bfloat16).score(token_ids)).abs().max() <= 5e-2


# With larger weights bf16 rounds hidden states enough to swap experts of nearly equal score, in
# transformers as here. What both are measured by then is fp32.
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_strays_from_fp32_no_further_than_transformers(make_tiny, family: str) -> None:
    tiny = make_tiny(family, initializer_range=0.05)
    token_ids = tiny.prompt(NUM_TOKENS)
    exact = tiny.reference().score(token_ids)
    ours = (tiny.runner(torch.bfloat16).score(token_ids) - exact).abs().mean()
    theirs = (tiny.reference(torch.bfloat16).score(token_ids) - exact).abs().mean()
    assert ours <= 1.1 * theirs


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_transformers(make_tiny, name: str) -> None:
    family, fields = VARIANTS[name]
    make_tiny(family, **fields).assert_same_scores()


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_as_transformers_counts_them(make_tiny, family: str) -> None:
    tiny = make_tiny(family)
    model = tiny.decoder()
    assert model.spec.num_parameters == tiny.reference().model.num_parameters()
    assert model.spec.num_parameters == sum(weight.numel() for weight in model.parameters())


def test_active_parameters_leave_out_the_experts_not_chosen(make_tiny) -> None:
    spec = make_tiny("qwen2_moe", mlp_only_layers=[0]).decoder().spec
    one_expert = 3 * 64 * 32
    assert spec.num_parameters - spec.num_active_parameters == (8 - 2) * one_expert
