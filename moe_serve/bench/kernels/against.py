"""The MoE layer as plain PyTorch does it, to be compared with ours side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_serve.bench.kernels.rig import PlainExperts, Rig
from moe_serve.bench.ruler import Comparison, compare, difference
from moe_serve.kernels.silu_mul import gated_activation
from moe_serve.layers.moe import MoE
from moe_serve.routing.router import Routing

# Shapes: T tokens, D model, E experts, K top-k, R = T * K rows sorted by expert, F expert inner.

Contestant = Callable[[Tensor, Routing, PlainExperts, str], Tensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """`error`: how far our result is from theirs (`ruler.difference`)."""

    name: str
    tokens: int
    comparison: Comparison
    error: float


def moe_loop(x_TD: Tensor, routing: Routing, experts: PlainExperts, activation: str) -> Tensor:
    """One expert after the other: its tokens, two `F.linear`, and a weighted `index_add_`."""
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float32)
    for expert in torch.unique(routing.ids_TK).tolist():
        tokens_R, slots_R = torch.where(routing.ids_TK == expert)
        gate_up = F.linear(x_TD[tokens_R], experts.gate_up_EGD[expert])
        y_RD = F.linear(gated_activation(gate_up, activation), experts.down_EDF[expert])
        out_TD.index_add_(0, tokens_R, y_RD * routing.weights_TK[tokens_R, slots_R, None])
    return out_TD.to(x_TD.dtype)


def moe_grouped(x_TD: Tensor, routing: Routing, experts: PlainExperts, activation: str) -> Tensor:
    """All rows sorted by expert, two calls of torch's grouped product, and a weighted sum."""
    top_k, num_experts = routing.ids_TK.shape[1], experts.gate_up_EGD.shape[0]
    order_R = routing.ids_TK.flatten().argsort(stable=True)
    counts_E = torch.bincount(routing.ids_TK.flatten(), minlength=num_experts)
    ends_E = counts_E.cumsum(0).to(torch.int32)
    gate_up = F.grouped_mm(x_TD[order_R // top_k], experts.gate_up_EGD.mT, offs=ends_E)
    y_RD = F.grouped_mm(gated_activation(gate_up, activation), experts.down_EDF.mT, offs=ends_E)
    y_TKD = torch.empty_like(y_RD).index_copy_(0, order_R, y_RD).view(len(x_TD), top_k, -1)
    return (y_TKD * routing.weights_TK[..., None]).sum(1).to(x_TD.dtype)


CONTESTANTS: dict[str, Contestant] = {
    "loop of F.linear": moe_loop,
    "F.grouped_mm": moe_grouped,
}


def matches(rig: Rig, num_tokens: int, pairs: int) -> Iterator[Match]:
    """Ours against each of theirs, on the same weights and the same choice of experts."""
    x_TD = torch.randn(num_tokens, rig.spec.hidden_size).to(rig.dtype)
    routings = [rig.routing(num_tokens) for _ in rig.layers]
    layers = [layer.mlp for layer in rig.layers if isinstance(layer.mlp, MoE)]
    ours = [
        partial(layer.path.run, x_TD, routing, layer.experts, num_tokens)
        for layer, routing in zip(layers, routings, strict=True)
    ]
    activation = rig.spec.moe_layers[0].activation
    for name, contestant in CONTESTANTS.items():
        theirs = [
            partial(contestant, x_TD, routing, experts, activation)
            for experts, routing in zip(rig.plain, routings, strict=True)
        ]
        yield Match(
            name=name,
            tokens=num_tokens,
            comparison=compare(ours, theirs, pairs),
            error=difference(ours[0](), theirs[0]()),
        )
