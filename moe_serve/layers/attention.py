"""Attention over the paged KV pool."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_serve.context import LayerKV, StepContext
from moe_serve.kernels.kv_store import kv_store
from moe_serve.kernels.paged_attention import paged_attention
from moe_serve.kernels.rotary import rotary
from moe_serve.layers.norm import RMSNorm
from moe_serve.layers.projection import Projection
from moe_serve.layers.rotary import CosSin
from moe_serve.models.spec import AttentionSpec

# Shapes: T tokens, D model, H heads, N kv heads, h head_dim.


class Attention(nn.Module):
    """Project, normalise, rotate, store K/V, attend, project back."""

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        norm_eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.qkv = Projection(
            hidden_size, spec.qkv_size, has_bias=spec.has_qkv_bias, dtype=dtype, device=device
        )
        self.output = Projection(
            spec.q_size, hidden_size, has_bias=spec.has_output_bias, dtype=dtype, device=device
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if spec.qk_norm != "none":
            self.q_norm = RMSNorm(spec.q_norm_size, norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(spec.k_norm_size, norm_eps, dtype=dtype, device=device)

    def forward(self, x_TD: Tensor, angles: CosSin, context: StepContext, kv: LayerKV) -> Tensor:
        spec = self.spec
        q_THh, k_TNh, v_TNh = self._project(x_TD)
        q_THh = rotary(q_THh, *angles)
        kv_store(rotary(k_TNh, *angles), v_TNh, kv, context.slots_T)
        o_THh = paged_attention(q_THh, kv, context, scale=spec.scale, window=spec.window)
        y_TD: Tensor = self.output(o_THh.flatten(1))
        return y_TD

    def _project(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.spec
        q, k, v = self.qkv(x_TD).split((spec.q_size, spec.kv_size, spec.kv_size), dim=-1)
        if spec.qk_norm == "projection":
            q, k = self._normalise(q, k)
        if spec.clip_qkv is not None:
            q, k, v = (part.clamp(-spec.clip_qkv, spec.clip_qkv) for part in (q, k, v))
        heads = (-1, spec.head_dim)
        q, k, v = q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, heads)
        if spec.qk_norm == "head":
            q, k = self._normalise(q, k)
        return q, k, v

    def _normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None and self.k_norm is not None
        return self.q_norm(q), self.k_norm(k)
