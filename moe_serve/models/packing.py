"""Brings a model's weights into the order that the CPU kernels read."""

from __future__ import annotations

from torch import nn

from moe_serve.experts.bank import ExpertBank
from moe_serve.kernels.cpu.calls import ACTIVATIONS
from moe_serve.kernels.cpu.library import Library
from moe_serve.kernels.cpu.packed import PackedWeight, can_pack
from moe_serve.layers.mlp import DenseMLP, GatedMLP
from moe_serve.layers.moe import Router
from moe_serve.layers.projection import Projection
from moe_serve.layers.row_parallel import RowParallel
from moe_serve.models.decoder import Decoder


def pack_weights(model: Decoder, library: Library) -> None:
    """In place, once. What cannot be packed, such as rows of an odd length, stays as it is."""
    gated = [module for module in model.modules() if isinstance(module, GatedMLP | DenseMLP)]
    for mlp in gated:
        if mlp.activation in ACTIVATIONS:
            _pack(mlp.gate_up, "weight_ND", library, is_paired=True)
    for module in model.modules():
        if isinstance(module, Projection | RowParallel):
            _pack(module, "weight_ND", library)
        elif isinstance(module, Router):
            _pack(module, "weight_ED", library)
        elif isinstance(module, ExpertBank) and module.activation in ACTIVATIONS:
            _pack(module, "gate_up_EGD", library, is_paired=True)
            _pack(module, "down_EDF", library)
    table_VD = model.embedding.weight_VD.detach()
    if model.head is None and can_pack(table_VD):
        model.tied_head = PackedWeight.pack(table_VD.clone(), library)


def _pack(module: nn.Module, name: str, library: Library, *, is_paired: bool = False) -> None:
    weight = getattr(module, name)
    if isinstance(weight, PackedWeight) or not can_pack(weight.detach()):
        return
    packed = PackedWeight.pack(weight.detach(), library, is_paired=is_paired)
    # A parameter's name takes nothing but parameters.
    delattr(module, name)
    setattr(module, name, packed)
