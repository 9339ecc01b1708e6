"""The weights of one expert: all that moves when it moves, and how they come to host memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_serve.experts.bank import ExpertBank
from moe_serve.kernels.cpu.packed import PackedWeight
from moe_serve.kernels.cpu.quantized import QuantizedWeight

Bytes = npt.NDArray[np.uint8]


def expert_weights(bank: ExpertBank, slot: int) -> tuple[Tensor, Tensor]:
    """Views of the bank."""
    gate_up, down = bank.weights
    return gate_up[slot], down[slot]


def expert_kind(bank: ExpertBank) -> str:
    """Equal for banks whose experts can replace each other. Example: `float32 [8, 4], [4, 4]`."""
    gate_up, down = bank.gate_up_EGD, bank.down_EDF
    name = str(gate_up.dtype).removeprefix("torch.")
    shapes = f"{list(gate_up.shape[1:])}, {list(down.shape[1:])}"
    order = "packed " if isinstance(gate_up, PackedWeight) else ""
    if isinstance(gate_up, QuantizedWeight):
        order = f"int{gate_up.scheme.bits} by {gate_up.scheme.group} "
    return f"{order}{name} {shapes}"


def flat_bytes(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor, on its device."""
    assert tensor.is_contiguous()
    return tensor.detach().view(-1).view(torch.uint8)


def host_bytes(tensor: Tensor) -> Bytes:
    """Of a contiguous tensor: its own memory if that is the host's, else a copy."""
    # sync: the caller is no step, or waits between two.
    array: Bytes = flat_bytes(tensor).cpu().numpy()
    return array


def side_stream(banks: Sequence[ExpertBank]) -> torch.cuda.Stream | None:
    """For copies to the host that no step should wait for; None on the CPU."""
    devices = [bank.gate_up_EGD.device for bank in banks]
    if not devices or devices[0].type != "cuda":
        return None
    stream: torch.cuda.Stream = torch.cuda.Stream(devices[0])  # type: ignore[no-untyped-call]
    return stream
