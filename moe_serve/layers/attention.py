"""Attention over the paged KV pool, split over the ranks of a lane by heads."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from moe_serve.context import LayerKV, StepContext
from moe_serve.kernels.attention_inputs import HeadNorms, attention_inputs, projected_inputs
from moe_serve.kernels.paged_attention import paged_attention
from moe_serve.layers.norm import RMSNorm
from moe_serve.layers.projection import Projection
from moe_serve.layers.rotary import CosSin
from moe_serve.layers.row_parallel import RowParallel
from moe_serve.models.shard import ModelShard
from moe_serve.models.spec import AttentionSpec
from moe_serve.parallel.slices import TokenSlices

# Shapes: T tokens of the lane, t rows of the token slice, D model, H own heads, N own kv heads,
# h head_dim, q and k columns of all heads.


class Attention(nn.Module):
    """Project, normalise, rotate, store K/V, attend, project back: token slice in, slice out."""

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        norm_eps: float,
        shard: ModelShard,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec = spec
        own = shard.heads(spec)
        self.num_heads = own.heads.size, own.kv_heads.size
        self.q_size = own.heads.size * spec.head_dim
        self.kv_size = own.kv_heads.size * spec.head_dim
        # Where the own columns begin among those of all heads.
        self.q_start = own.heads.start * spec.head_dim
        self.k_start = own.kv_heads.start * spec.head_dim
        self.num_kv_copies = shard.layout.tensor_size * own.kv_heads.size // spec.num_kv_heads
        self.qkv = Projection(
            hidden_size,
            self.q_size + 2 * self.kv_size,
            has_bias=spec.has_qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.output = RowParallel(
            spec.q_size,
            hidden_size,
            shard.output_columns(spec),
            has_bias=spec.has_output_bias,
            dtype=dtype,
            device=device,
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if spec.qk_norm != "none":
            self.q_norm = RMSNorm(spec.q_norm_size, norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(spec.k_norm_size, norm_eps, dtype=dtype, device=device)

    def forward(
        self,
        x_tD: Tensor,
        angles: CosSin,
        context: StepContext,
        kv: LayerKV,
        slices: TokenSlices,
    ) -> Tensor:
        spec, slots_T = self.spec, context.slots_T
        qkv_TC = self.qkv(slices.gather(x_tD))
        if spec.qk_norm == "projection" or spec.clip_qkv is not None:
            q_THh, k_TNh, v_TNh = self._prepare(qkv_TC, slices)
            q_THh = attention_inputs(q_THh, k_TNh, v_TNh, *angles, kv, slots_T, self._head_norms)
        else:
            norms = self._head_norms
            q_THh = projected_inputs(qkv_TC, *self.num_heads, *angles, kv, slots_T, norms)
        o_THh = paged_attention(q_THh, kv, context, scale=spec.scale, window=spec.window)
        y_tD: Tensor = self.output(o_THh.flatten(1), slices)
        return y_tD

    def _prepare(self, qkv_TC: Tensor, slices: TokenSlices) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, normalised over all heads and clipped as the spec has it."""
        spec = self.spec
        q, k, v = torch.split(qkv_TC, [self.q_size, self.kv_size, self.kv_size], dim=-1)
        if spec.qk_norm == "projection":
            q, k = self._normalise_all_heads(q, k, slices)
        if spec.clip_qkv is not None:
            q, k, v = (part.clamp(-spec.clip_qkv, spec.clip_qkv) for part in (q, k, v))
        size = spec.head_dim
        q_THh, k_TNh, v_TNh = (part.reshape(len(part), -1, size) for part in (q, k, v))
        return q_THh, k_TNh, v_TNh

    @functools.cached_property
    def _head_norms(self) -> HeadNorms | None:
        if self.spec.qk_norm != "head":
            return None
        assert self.q_norm is not None and self.k_norm is not None
        return HeadNorms(self.q_norm.weight_D, self.k_norm.weight_D, self.q_norm.eps)

    def _normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None and self.k_norm is not None
        return self.q_norm(q), self.k_norm(k)

    def _normalise_all_heads(
        self, q: Tensor, k: Tensor, slices: TokenSlices
    ) -> tuple[Tensor, Tensor]:
        """The norm's mean runs over the heads of all ranks, so each needs all columns."""
        if slices.group.size == 1:
            return self._normalise(q, k)
        parts = slices.group.all_gather(torch.cat((q, k), dim=-1)).chunk(slices.group.size)
        q_Tq = torch.cat([part[:, : self.q_size] for part in parts], dim=-1)
        k_Tk = torch.cat([part[:, self.q_size :] for part in parts[:: self.num_kv_copies]], dim=-1)
        q_Tq, k_Tk = self._normalise(q_Tq, k_Tk)
        q = q_Tq[:, self.q_start : self.q_start + self.q_size]
        return q, k_Tk[:, self.k_start : self.k_start + self.kv_size]
