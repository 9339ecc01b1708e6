"""What a decoder is made of, as plain data. Nothing here allocates.

DecoderSpec
└── LayerSpec, one a layer
    ├── AttentionSpec ── RopeSpec
    └── DenseMLPSpec, or MoESpec ── RouterSpec, SharedExpertSpec
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from moe_serve.errors import CheckpointError
from moe_serve.routing.router import RouterSpec

RopeKind = Literal["default", "linear", "llama3", "yarn"]
QKNorm = Literal["none", "head", "projection"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding. The first `rotary_dim` dimensions of a head turn.

    `factor` and what follows count only for the kinds that scale. `attention_factor` multiplies
    cos and sin (yarn). `truncate`: yarn rounds the ends of its ramp to whole dimensions.
    """

    theta: float
    rotary_dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Causal attention with grouped KV heads.

    - `qk_norm`: RMS norm of queries and keys before rotation, per head or over all heads at once.
    - `window`: a token sees itself and the `window` - 1 positions before it; None: all.
    - `clip_qkv`: queries, keys and values are clamped to [-clip_qkv, clip_qkv] after the norms.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    qk_norm: QKNorm = "none"
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    window: int | None = None
    clip_qkv: float | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "num_heads", "num_kv_heads", "head_dim")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"config.json: head_dim {self.head_dim} must be even for RoPE")
        if self.window is not None and self.window < 1:
            raise CheckpointError(f"config.json: sliding_window {self.window} must be at least 1")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    @property
    def scale(self) -> float:
        """What multiplies the scores before the softmax."""
        return float(self.head_dim**-0.5)

    @property
    def q_norm_size(self) -> int:
        return {"none": 0, "head": self.head_dim, "projection": self.q_size}[self.qk_norm]

    @property
    def k_norm_size(self) -> int:
        return {"none": 0, "head": self.head_dim, "projection": self.kv_size}[self.qk_norm]

    def num_parameters(self, hidden_size: int) -> int:
        weights = hidden_size * (self.qkv_size + self.q_size)
        biases = self.qkv_size * self.has_qkv_bias + hidden_size * self.has_output_bias
        return weights + biases + self.q_norm_size + self.k_norm_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenseMLPSpec:
    """down(act(gate(x)) * up(x)); `activation` as in `kernels.silu_mul`."""

    inner_size: int
    activation: str = "silu"

    def __post_init__(self) -> None:
        _check_positive(self, "inner_size")

    def num_parameters(self, hidden_size: int) -> int:
        return 3 * hidden_size * self.inner_size

    def num_active_parameters(self, hidden_size: int) -> int:
        return self.num_parameters(hidden_size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpertSpec:
    """A dense MLP that every token passes; `has_gate`: weighed by sigmoid(gate . x)."""

    inner_size: int
    has_gate: bool

    def __post_init__(self) -> None:
        _check_positive(self, "inner_size")

    def num_parameters(self, hidden_size: int) -> int:
        return 3 * hidden_size * self.inner_size + hidden_size * self.has_gate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """A router over `num_experts` gated MLPs, and perhaps a shared expert."""

    num_experts: int
    inner_size: int
    router: RouterSpec
    shared: SharedExpertSpec | None = None
    activation: str = "silu"

    def __post_init__(self) -> None:
        _check_positive(self, "num_experts", "inner_size")
        if not 1 <= self.router.top_k <= self.num_experts:
            raise CheckpointError(
                f"config.json: num_experts_per_tok {self.router.top_k} must be between 1 and "
                f"the number of experts, {self.num_experts}"
            )

    def num_parameters(self, hidden_size: int) -> int:
        return self._num_parameters(hidden_size, self.num_experts)

    def num_active_parameters(self, hidden_size: int) -> int:
        return self._num_parameters(hidden_size, self.router.top_k)

    def _num_parameters(self, hidden_size: int, num_experts: int) -> int:
        router = self.num_experts * hidden_size
        shared = self.shared.num_parameters(hidden_size) if self.shared else 0
        return router + shared + num_experts * 3 * hidden_size * self.inner_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    attention: AttentionSpec
    mlp: DenseMLPSpec | MoESpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A whole decoder: pre-norm layers between an embedding and a language-model head.

    `max_position` counts positions. `eos_token_ids` are config.json's alone: see
    `model_folder.eos_token_ids` for all that end a text.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tie_embeddings: bool
    max_position: int
    eos_token_ids: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self, "vocab_size", "hidden_size", "max_position")
        if not self.layers:
            raise CheckpointError("config.json: num_hidden_layers must be at least 1")

    @property
    def moe_layers(self) -> tuple[MoESpec, ...]:
        return tuple(layer.mlp for layer in self.layers if isinstance(layer.mlp, MoESpec))

    @property
    def num_parameters(self) -> int:
        """Elements of all weights; tied embeddings count once."""
        return self._num_shared_parameters + sum(
            layer.mlp.num_parameters(self.hidden_size) for layer in self.layers
        )

    @property
    def num_active_parameters(self) -> int:
        """Elements that one token meets: all but the experts it is not routed to."""
        return self._num_shared_parameters + sum(
            layer.mlp.num_active_parameters(self.hidden_size) for layer in self.layers
        )

    @property
    def _num_shared_parameters(self) -> int:
        num_tables = 1 if self.tie_embeddings else 2
        norms = self.hidden_size * (2 * len(self.layers) + 1)
        attention = sum(layer.attention.num_parameters(self.hidden_size) for layer in self.layers)
        return num_tables * self.vocab_size * self.hidden_size + norms + attention


def _check_positive(spec: Any, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if value < 1:
            raise CheckpointError(
                f"config.json: {name} of {type(spec).__name__} is {value}; it must be at least 1"
            )
