"""Shapes of real models, from their published config.json."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Options of `topk_router`."""

    score: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    has_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`experts_here`: of a rank that holds only some of them, and gets as small a share of rows.

    `num_heads` 0: its attention is of a kind that we do not have.
    """

    name: str
    hidden_size: int
    inner_size: int
    num_experts: int
    top_k: int
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    window: int | None = None
    has_sinks: bool = False
    vocab_size: int = 0
    num_layers: int = 0
    router: Router = Router()
    formats: tuple[str, ...] = ("bf16",)
    experts_here: int = 0

    @property
    def num_experts_here(self) -> int:
        return self.experts_here or self.num_experts

    @property
    def share(self) -> str:
        """Which of the experts, where not all."""
        here = self.experts_here
        return f", {here} of {self.num_experts} experts" if here else ""


MIXTRAL = Model(
    name="Mixtral-8x7B",
    hidden_size=4096,
    inner_size=14336,
    num_experts=8,
    top_k=2,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=32000,
    num_layers=32,
)
QWEN3 = Model(
    name="Qwen3-30B-A3B",
    hidden_size=2048,
    inner_size=768,
    num_experts=128,
    top_k=8,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=151936,
    num_layers=48,
    formats=("bf16", "fp8"),
)
# One rank of four: all 256 experts of a layer take 11 GB in fp8, and 23 GB more for the baseline.
DEEPSEEK = Model(
    name="DeepSeek-V3",
    hidden_size=7168,
    inner_size=2048,
    num_experts=256,
    top_k=8,
    vocab_size=129280,
    num_layers=61,
    router=Router(score="sigmoid", scale=2.5, has_bias=True, num_groups=8, top_groups=4),
    formats=("fp8",),
    experts_here=64,
)
# Windows in every other layer.
GPT_OSS = Model(
    name="gpt-oss-120b",
    hidden_size=2880,
    inner_size=2880,
    num_experts=128,
    top_k=4,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    window=128,
    has_sinks=True,
    vocab_size=201088,
    num_layers=36,
    formats=("mxfp4",),
)
MODELS = (QWEN3, MIXTRAL, DEEPSEEK, GPT_OSS)
TOKENS = (1, 8, 64, 512, 4096)
QUICK_TOKENS = (1, 64, 4096)

# For trying the scripts on a CPU.
TINY = Model(
    name="tiny",
    hidden_size=64,
    inner_size=32,
    num_experts=8,
    top_k=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    window=24,
    has_sinks=True,
    vocab_size=320,
    num_layers=2,
    router=Router(score="sigmoid", scale=2.5, has_bias=True, num_groups=4, top_groups=2),
    formats=("bf16", "fp8", "mxfp4"),
)
TINY_TOKENS = (1, 7)
