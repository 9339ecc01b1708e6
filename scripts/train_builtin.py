"""Train the built-in model: a small Qwen3-MoE on public-domain children's stories.

    python scripts/train_builtin.py --corpus stories_train.txt.gz

Writes a folder that any engine can load: config, generation config, byte-level BPE
tokenizer with a chat template, bf16 safetensors, and a model card with the validation
loss per byte and the expert load of every layer on the validation text. Documents in
the corpus are separated by a line `<|endoftext|>`. About an hour on two cores; the same
seed, corpus and thread count repeat the run.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

BUILTIN = Path(__file__).resolve().parents[1] / "moe_serve" / "builtin"
END = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] | trim }}"
    "{% if not loop.last or message['role'] != 'assistant' %}{{ '\n\n' }}{% endif %}{% endfor %}"
)


def read_text(path: Path) -> str:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        return file.read()


def documents(text: str) -> list[str]:
    return [part.strip("\n") for part in text.split(END) if part.strip()]


def train_tokenizer(docs: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(docs, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=END,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, docs: list[str]) -> torch.Tensor:
    """One stream of token ids, every document followed by the end token."""
    end = tokenizer.eos_token_id
    ids: list[int] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch(docs):
        ids += [*encoding.ids, end]
    return torch.tensor(ids)


def model_config(vocab_size: int, end_id: int) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=1024,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        router_aux_loss_coef=0.01,
        use_sliding_window=False,
        attention_bias=False,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=end_id,
    )


def windows(ids: torch.Tensor, length: int, batch: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless batches [batch, length]: every epoch cuts at a new offset, in a new order."""
    rng = torch.Generator().manual_seed(seed)
    while True:
        offset = int(torch.randint(length, (1,), generator=rng))
        count = (len(ids) - offset) // length
        rows = ids[offset : offset + count * length].view(count, length)
        order = torch.randperm(count, generator=rng)
        for start in range(0, count - batch + 1, batch):
            yield rows[order[start : start + batch]]


def learning_rate(step: int, steps: int, peak: float, warmup: int = 150) -> float:
    """Linear warm-up, then a cosine down to 2 % of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def optimizer_for(model: torch.nn.Module, peak: float) -> torch.optim.AdamW:
    decay = [p for p in model.parameters() if p.dim() > 1]
    keep = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": keep, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), eps=1e-8, foreach=True)


def train(model: Qwen3MoeForCausalLM, ids: torch.Tensor, args: argparse.Namespace) -> None:
    """Short windows first (attention is cheap there), the last part at twice the length."""
    optimizer = optimizer_for(model, args.lr)
    batches = windows(ids, args.length, args.batch, args.seed)
    long_from = int(args.steps * 0.85)
    start = time.monotonic()
    model.train()
    for step in range(args.steps):
        if step == long_from:
            batches = windows(ids, 2 * args.length, args.batch // 2, args.seed + 1)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        batch = next(batches)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(input_ids=batch, labels=batch, output_router_logits=True)
        out.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0 or step == args.steps - 1:
            rate = (step + 1) * batch.numel() / (time.monotonic() - start)
            print(
                f"step {step}/{args.steps} loss {out.loss.item():.4f} "
                f"aux {out.aux_loss.item():.3f} norm {norm:.2f} {rate:.0f} tok/s",
                flush=True,
            )


def use_upstream_names(folder: Path) -> None:
    """Spell the files as published Qwen3-MoE folders do, so that older readers take them too."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["num_experts"] = config.pop("num_local_experts", config.get("num_experts"))
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = None
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings.pop("backend", None)
    path.write_text(json.dumps(settings, indent=2) + "\n")


@torch.inference_mode()
def evaluate(
    model: Qwen3MoeForCausalLM, ids: torch.Tensor, length: int
) -> tuple[float, torch.Tensor]:
    """Summed negative log-likelihood in nats, and token counts [layers, experts]."""
    model.eval()
    config = model.config
    counts = torch.zeros(config.num_hidden_layers, config.num_experts, dtype=torch.int64)
    total = 0.0
    for start in range(0, len(ids) - 1, length):
        chunk = ids[start : start + length + 1]
        out = model(input_ids=chunk[None, :-1], output_router_logits=True)
        log_probs = out.logits[0].float().log_softmax(-1)
        total -= log_probs.gather(1, chunk[1:, None]).sum().item()
        for layer, logits in enumerate(out.router_logits):
            chosen = logits.float().topk(config.num_experts_per_tok, dim=-1).indices
            counts[layer] += torch.bincount(chosen.flatten(), minlength=config.num_experts)
    return total, counts


def samples(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    texts = []
    for prompt in ("Once upon a time", "The old king said to", '"Where are you going?" asked'):
        torch.manual_seed(0)
        ids = torch.tensor([tokenizer.encode(prompt)])
        out = model.generate(ids, max_new_tokens=80, do_sample=True, temperature=0.7, top_p=0.9)
        texts.append(tokenizer.decode(out[0], skip_special_tokens=True))
    return texts


def load_table(counts: torch.Tensor) -> str:
    lines = ["| layer | hottest / mean | coldest / mean | tokens per expert |", "|---|---|---|---|"]
    for layer, row in enumerate(counts.tolist()):
        mean = sum(row) / len(row)
        cells = " ".join(str(n) for n in row)
        lines.append(f"| {layer} | {max(row) / mean:.2f} | {min(row) / mean:.2f} | {cells} |")
    return "\n".join(lines)


CARD = """# stories-moe: the built-in model

A {millions:.1f} M-parameter Qwen3-MoE language model ({active:.1f} M active per token): {layers}
layers, hidden size {hidden}, {experts} experts of inner size {inner}, top-{top_k}, context 1,024,
byte-level BPE of {vocab:,} entries, bf16. It is here so that the server can be tried and tested
with no download. It continues children's stories; it knows nothing else, and follows no
instructions.

- Data: 33 public-domain English books (Andersen, Grimm, Lang's Fairy Books, Oz, Alice, Heidi,
  Pinocchio, Peter Pan and others; Project Gutenberg texts, headers removed), {train_mb:.1f} MB,
  {train_tokens:,} tokens. Public domain in the USA.
- Training: `scripts/train_builtin.py`, {steps:,} steps of {batch} x {length} tokens ({epochs:.1f}
  epochs; the last 15 % in windows twice as long), AdamW, peak learning rate {lr}, router balance
  loss 0.01, bf16 autocast, seed {seed}, {minutes:.0f} minutes on two CPU cores.
- Validation (two whole books and the last 1.5 % of each other book, {valid_mb:.2f} MB):
  **{nats_per_byte:.4f} nats per byte** ({bits_per_byte:.4f} bits), perplexity {perplexity:.2f} per
  token of {bytes_per_token:.2f} bytes.
- The balance loss is transformers' own, taken over the gate logits of all layers together. It evens
  out an expert's number over the layers, not the experts of one layer: single layers are skewed,
  and a few experts are hardly used. That makes it a fair example for looking at imbalance.
- The chat template joins the messages with empty lines; the model goes on from there.

## Expert load on the validation text

Tokens sent to each expert, by layer (each row sums to tokens x {top_k}).

{table}

## Samples (temperature 0.7, top-p 0.9, seed 0)

{samples}
"""


def active_parameters(model: Qwen3MoeForCausalLM) -> int:
    config = model.config
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    total = sum(p.numel() for p in model.parameters())
    return total - experts + experts * config.num_experts_per_tok // config.num_experts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True, help="training text, .txt or .gz")
    parser.add_argument("--valid", type=Path, help="validation text [corpus, train -> valid]")
    parser.add_argument("--out", type=Path, default=BUILTIN, help="folder to write")
    parser.add_argument("--steps", type=int, default=3200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    valid = args.valid or args.corpus.with_name(args.corpus.name.replace("train", "valid"))
    if valid == args.corpus or not valid.is_file():
        parser.error(f"no validation text at {valid}; name one with --valid")
    torch.manual_seed(args.seed)
    train_text, valid_text = read_text(args.corpus), read_text(valid)
    tokenizer = train_tokenizer(documents(train_text), args.vocab)
    train_ids = encode(tokenizer, documents(train_text))
    valid_ids = encode(tokenizer, documents(valid_text))
    config = model_config(len(tokenizer), tokenizer.eos_token_id)
    model = Qwen3MoeForCausalLM._from_config(config, experts_implementation="grouped_mm")
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{millions:.2f} M parameters, {len(train_ids):,} training tokens", flush=True)

    began = time.monotonic()
    train(model, train_ids, args)
    minutes = (time.monotonic() - began) / 60

    model.to(torch.bfloat16)
    args.out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id
    )
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    use_upstream_names(args.out)

    nats, counts = evaluate(model.float(), valid_ids, config.max_position_embeddings)
    valid_bytes = len(valid_text.encode())
    card = CARD.format(
        millions=millions, active=active_parameters(model) / 1e6,
        layers=config.num_hidden_layers, hidden=config.hidden_size, experts=config.num_experts,
        inner=config.moe_intermediate_size, top_k=config.num_experts_per_tok, vocab=len(tokenizer),
        train_mb=len(train_text.encode()) / 1e6, train_tokens=len(train_ids), steps=args.steps,
        batch=args.batch, length=args.length, lr=args.lr, seed=args.seed, minutes=minutes,
        epochs=args.steps * args.batch * args.length / len(train_ids), valid_mb=valid_bytes / 1e6,
        nats_per_byte=nats / valid_bytes, bits_per_byte=nats / valid_bytes / math.log(2),
        perplexity=math.exp(nats / (len(valid_ids) - 1)),
        bytes_per_token=valid_bytes / len(valid_ids), table=load_table(counts),
        samples="\n\n".join("> " + t.replace("\n", "\n> ") for t in samples(model, tokenizer)),
    )  # fmt: skip
    (args.out / "README.md").write_text(card)
    print(json.dumps({"nats_per_byte": nats / valid_bytes, "minutes": minutes}))


if __name__ == "__main__":
    main()
