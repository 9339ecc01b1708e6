"""A kernel for the test of the report: it fits a GPU or not, by its size."""

from __future__ import annotations

import torch

from moe_serve.kernels.jit import launch, tl, triton


@triton.jit
def _product(x, y, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tile = tl.load(x + i[:, None] * SIZE + i[None, :])
    tl.store(y + i[:, None] * SIZE + i[None, :], tl.dot(tile, tile))


def product(size: int, num_warps: int) -> None:
    x = torch.empty(size, size, dtype=torch.bfloat16, device="meta")
    launch(_product, (1,), x, x.float(), SIZE=size, num_warps=num_warps)
