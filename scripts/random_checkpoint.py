#!/usr/bin/env python3
"""Write a Qwen3-MoE checkpoint with random weights, for benchmarks.

    scripts/random_checkpoint.py OUT [--layers 16] [--hidden 1024] [--experts 64] [--top-k 8]
                                     [--inner 512] [--heads 16] [--kv-heads 4] [--vocab 32000]

The defaults have 1.7 billion parameters in bfloat16, 0.3 of them active for a token. Routing by
random weights is close to uniform: the most experts are read for a batch, the worst case for a CPU.
The tokenizer is the built-in model's.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_serve.model_path import resolve_model

# Shapes: V vocabulary, D hidden, F inner.

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def config(args: argparse.Namespace) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_experts": args.experts,
        "num_experts_per_tok": args.top_k,
        "moe_intermediate_size": args.inner,
        "intermediate_size": args.inner,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.hidden // args.heads,
        "vocab_size": args.vocab,
        "max_position_embeddings": args.max_position,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def tensors(args: argparse.Namespace) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, 0.02, generator=rng)

    size, head = args.hidden, args.hidden // args.heads
    found = {
        "model.embed_tokens.weight": normal(args.vocab, size),
        "lm_head.weight": normal(args.vocab, size),
        "model.norm.weight": torch.ones(size, dtype=torch.bfloat16),
    }
    for layer in range(args.layers):
        block = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{block}{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
        for name, heads in (("q", args.heads), ("k", args.kv_heads), ("v", args.kv_heads)):
            found[f"{block}self_attn.{name}_proj.weight"] = normal(heads * head, size)
        found[f"{block}self_attn.o_proj.weight"] = normal(size, args.heads * head)
        for name in ("q_norm", "k_norm"):
            found[f"{block}self_attn.{name}.weight"] = torch.ones(head, dtype=torch.bfloat16)
        found[f"{block}mlp.gate.weight"] = normal(args.experts, size)
        for expert in range(args.experts):
            for name in ("gate_proj", "up_proj"):
                found[f"{block}mlp.experts.{expert}.{name}.weight"] = normal(args.inner, size)
            found[f"{block}mlp.experts.{expert}.down_proj.weight"] = normal(size, args.inner)
    return found


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    sizes = {"layers": 16, "hidden": 1024, "experts": 64, "top_k": 8, "inner": 512, "heads": 16,
             "kv_heads": 4, "vocab": 32000, "max_position": 16384}  # fmt: skip
    for name, size in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    builtin = resolve_model("builtin", None)
    for name in TOKENIZER_FILES:
        if (builtin / name).exists():
            shutil.copy(builtin / name, args.out)
    (args.out / "config.json").write_text(json.dumps(config(args), indent=1))
    weights = tensors(args)
    save_file(weights, args.out / "model.safetensors", metadata={"format": "pt"})
    print(
        f"{args.out}: {sum(weight.numel() for weight in weights.values()) / 1e6:.0f} M parameters"
    )


if __name__ == "__main__":
    main()
