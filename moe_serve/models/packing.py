"""Brings a model's weights into the order that the CPU kernels read, and into fewer bits."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from moe_serve.experts.bank import ExpertBank
from moe_serve.kernels.cpu.calls import ACTIVATIONS
from moe_serve.kernels.cpu.library import Library
from moe_serve.kernels.cpu.packed import PackedWeight, can_pack
from moe_serve.kernels.cpu.quantized import (
    COLUMNS,
    INT4,
    INT8,
    QuantizedWeight,
    Scheme,
    can_quantize,
)
from moe_serve.layers.mlp import DenseMLP, GatedMLP
from moe_serve.layers.moe import MoE, Router
from moe_serve.layers.projection import Projection
from moe_serve.layers.row_parallel import RowParallel
from moe_serve.models.decoder import Decoder

SCHEMES = {"int8": INT8, "int4": INT4}
# Its share of the weights is small, and of the error large.
HEAD_SCHEME = INT8


def pack_weights(model: nn.Module, library: Library, quantization: str | None = None) -> None:
    """In place: a decoder, or a part of one; what is packed already stays so.

    What cannot be packed, such as rows of an odd length, stays as it is. `quantization`: "int8" or
    "int4", for all but embeddings, norms, and what routes.
    """
    packing = _Packing(library, None if quantization is None else SCHEMES[quantization])
    gated = [module for module in model.modules() if isinstance(module, GatedMLP | DenseMLP)]
    for mlp in gated:
        if mlp.activation in ACTIVATIONS:
            packing.pack(mlp.gate_up, "weight_ND", is_paired=True)
    if isinstance(model, Decoder):
        packing.pack_head(model)
    for module in model.modules():
        if isinstance(module, MoE) and module.shared_gate is not None:
            packing.as_they_are.pack(module.shared_gate, "weight_ND")
        elif isinstance(module, Router):
            packing.as_they_are.pack(module, "weight_ED")
        elif isinstance(module, ExpertBank) and module.activation in ACTIVATIONS:
            packing.pack_bank(module)
    for module in model.modules():
        if isinstance(module, Projection | RowParallel):
            packing.pack(module, "weight_ND")


def expert_bytes(
    inner_size: int, hidden_size: int, dtype: torch.dtype, quantization: str | None
) -> int:
    """Of a whole expert's weights, packed."""
    if quantization is None or inner_size % COLUMNS or hidden_size % COLUMNS:
        return 3 * inner_size * hidden_size * dtype.itemsize
    scheme = SCHEMES[quantization]
    return scheme.num_bytes(2 * inner_size, hidden_size) + scheme.num_bytes(hidden_size, inner_size)


@dataclasses.dataclass(frozen=True, slots=True)
class _Packing:
    """`scheme` None: all bits are kept."""

    library: Library
    scheme: Scheme | None

    @property
    def as_they_are(self) -> _Packing:
        return dataclasses.replace(self, scheme=None)

    def packed(self, weight: Tensor, *, is_paired: bool = False) -> PackedWeight:
        """From `weight`, in its memory or with it still there."""
        if self.scheme is None or not can_quantize(weight):
            return PackedWeight.pack(weight, self.library, is_paired=is_paired)
        return QuantizedWeight.quantize(weight, self.scheme, self.library, is_paired=is_paired)

    def pack(self, module: nn.Module, name: str, *, is_paired: bool = False) -> None:
        weight = getattr(module, name)
        if isinstance(weight, PackedWeight) or not can_pack(weight.detach()):
            return
        packed = self.packed(weight.detach(), is_paired=is_paired)
        # A parameter's name takes nothing but parameters.
        delattr(module, name)
        setattr(module, name, packed)

    def pack_bank(self, bank: ExpertBank) -> None:
        """Both weights alike: one kernel takes them together."""
        can_quantize_both = all(can_quantize(weight) for weight in bank.weights)
        packing = self if can_quantize_both else self.as_they_are
        packing.pack(bank, "gate_up_EGD", is_paired=True)
        packing.pack(bank, "down_EDF")

    def pack_head(self, model: Decoder) -> None:
        packing = self if self.scheme is None else dataclasses.replace(self, scheme=HEAD_SCHEME)
        table_VD = model.embedding.weight_VD.detach()
        if model.head is not None:
            packing.pack(model.head, "weight_ND")
        elif model.tied_head is None and can_pack(table_VD):
            is_quantized = packing.scheme is not None and can_quantize(table_VD)
            model.tied_head = packing.packed(table_VD if is_quantized else table_VD.clone())
