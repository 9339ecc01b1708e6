"""What is probed in an engine, and which part of a step it counts for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from moe_serve import model_runner
from moe_serve.bench.step.probes import Target
from moe_serve.engine import Engine
from moe_serve.layers import attention
from moe_serve.layers.moe import MoE
from moe_serve.layers.norm import RMSNorm

STEP = "step: the rest"
# What the name of a module ends with, within its layer.
_MODULE_PARTS = {
    "embedding": "embedding",
    "attention.qkv": "attention: qkv",
    "attention.output": "attention: output",
    "attention": "attention: the rest",
    "mlp.router": "MoE: router",
    "mlp.experts": "MoE: experts",
    "mlp.shared": "MoE: shared expert",
    "mlp": "MLP: the rest",
}
_ATTENTION_PARTS = {
    "attention_inputs": "attention: inputs",
    "projected_inputs": "attention: inputs",
    "paged_attention": "attention: scores",
}
_DISPATCHER_PARTS = {"dispatch": "MoE: dispatch", "combine": "MoE: combine"}
# Dispatch and combine in one with the experts.
_BANK_PARTS = {"run_all": "MoE: experts"}
NORMS, HEAD, MODEL = "norms", "head", "model: the rest"
# In the order of a step.
PARTS = (
    "schedule",
    "batch",
    "embedding",
    NORMS,
    "attention: qkv",
    "attention: inputs",
    "attention: scores",
    "attention: output",
    "attention: the rest",
    "MoE: router",
    "MoE: dispatch",
    "MoE: experts",
    "MoE: combine",
    "MoE: shared expert",
    "MLP: the rest",
    MODEL,
    HEAD,
    "sampling",
    "update",
    "expert counts",
    "runner: the rest",
    STEP,
)


def engine_targets(engine: Engine) -> list[Target]:
    """Of one rank that computes on the host: a GPU's time is not the time of the call."""
    runner = engine.executor.runner
    return [
        Target(engine, "step", STEP, "step"),
        *(Target(engine.experts, name, "expert counts", f"experts.{name}")
          for name in ("before_step", "after_step", "take_stats")),
        Target(engine.scheduler, "schedule", "schedule"),
        Target(engine.scheduler, "update", "update"),
        Target(engine.executor, "run", "runner: the rest", "run"),
        Target(model_runner, "build_batch", "batch"),
        Target(runner, "sampler", "sampling"),
        Target(runner.model, "logits", HEAD),
        *model_targets(runner.model),
    ]  # fmt: skip


def model_targets(model: nn.Module) -> Iterator[Target]:
    """The model as a whole, and what of it is a module that is called."""
    yield Target(model, "forward", MODEL, "model")
    yield from _present(attention, "attention", _ATTENTION_PARTS)
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm):
            yield Target(module, "forward", NORMS, name)
            yield Target(module, "add_and_norm", NORMS, name)
        elif (part := _part_of(name)) is not None:
            yield Target(module, "forward", part, name)
        if isinstance(module, MoE):
            yield from _present(getattr(module.path, "dispatcher", None), name, _DISPATCHER_PARTS)
            yield from _present(module.experts, f"{name}.experts", _BANK_PARTS)


def _present(owner: Any, name: str, parts: dict[str, str]) -> Iterator[Target]:
    """Of functions that a faster way to do the same may go without, those that are there."""
    for attribute, part in parts.items():
        if hasattr(owner, attribute):
            yield Target(owner, attribute, part, f"{name}.{attribute}")


def _part_of(name: str) -> str | None:
    """layers.3.attention.qkv -> attention: qkv; None for what is inside another part."""
    pieces = name.split(".")
    return _MODULE_PARTS.get(".".join(pieces[2:] if pieces[0] == "layers" else pieces))
