"""Layers of a model's shape with made-up weights, ready as the engine's are."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from moe_serve.config import EngineConfig
from moe_serve.context import LayerKV, StepContext
from moe_serve.errors import ConfigError
from moe_serve.kernels.cpu.library import active
from moe_serve.kv_pool import make_pool
from moe_serve.layers.moe import MoE
from moe_serve.loader import pick_dtype
from moe_serve.model_folder import open_model_folder
from moe_serve.models.decoder import Decoder, DecoderLayer
from moe_serve.models.packing import pack_weights
from moe_serve.models.shard import WHOLE_MODEL
from moe_serve.models.spec import DecoderSpec, LayerSpec, MoESpec
from moe_serve.parallel.cpu import available_memory
from moe_serve.rank_setup import choose_kernels, pick_num_threads
from moe_serve.routing.router import Routing

# Shapes: T tokens, D model, E experts, F expert inner, G = 2F, K top-k, B blocks, S sequences.

CPU = torch.device("cpu")
# Of the free memory, what all layers may take.
_MEMORY_SHARE = 4
# Random numbers that all weights are made of: to draw billions would take minutes.
_NUM_DRAWN = 1 << 20


class PlainExperts(NamedTuple):
    """A layer's experts as any library takes them."""

    gate_up_EGD: torch.Tensor
    down_EDF: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What replaces sizes of the model's own; None: as they are."""

    hidden: int | None = None
    inner: int | None = None
    experts: int | None = None
    top_k: int | None = None
    layers: int | None = None

    def apply(self, spec: DecoderSpec) -> DecoderSpec:
        """The model as so many layers like its first MoE layer."""
        layer = next((one for one in spec.layers if isinstance(one.mlp, MoESpec)), None)
        if layer is None:
            raise ConfigError("--model: it has no MoE layer")
        assert isinstance(layer.mlp, MoESpec)
        mlp, top_k = layer.mlp, self.top_k or layer.mlp.router.top_k
        num_experts = self.experts or mlp.num_experts
        if top_k > num_experts:
            raise ConfigError(f"--top-k {top_k} is more than the {num_experts} experts")
        router = dataclasses.replace(mlp.router, top_k=top_k)
        mlp = dataclasses.replace(
            mlp, num_experts=num_experts, inner_size=self.inner or mlp.inner_size, router=router
        )
        layers = (LayerSpec(attention=layer.attention, mlp=mlp),) * (
            self.layers or len(spec.layers)
        )
        return dataclasses.replace(spec, hidden_size=self.hidden or spec.hidden_size, layers=layers)


class Rig:
    """`decoder` with its weights as the engine has them: packed, where the CPU kernels read them
    so. `plain`: the experts' weights of each layer before that, where they are wanted.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        dtype: torch.dtype,
        *,
        block_size: int = 16,
        keeps_plain: bool = False,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.block_size = block_size
        self.decoder = Decoder(spec, dtype, CPU).eval()
        fill(self.decoder)
        self.plain: list[PlainExperts] = []
        if keeps_plain:
            self.plain = [plain_experts(layer) for layer in self.layers]
        library = active()
        if library is not None:
            pack_weights(self.decoder, library)

    @property
    def layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.decoder.layers if isinstance(layer, DecoderLayer)]

    def pools(self, num_blocks: int, count: int) -> list[LayerKV]:
        """Random keys and values; zeros of memory never written would never leave the cache."""
        pools: list[LayerKV] = []
        one = dataclasses.replace(self.spec, layers=self.spec.layers[:1])
        for _ in range(count):
            pools += make_pool(one, WHOLE_MODEL, num_blocks, self.block_size, self.dtype, CPU)
        for pool in pools:
            for tensor in (pool.keys_BsNh, pool.values_BsNh):
                tensor.copy_(torch.randn(tensor.shape[1:]))
        return pools

    def decode_context(self, num_sequences: int, length: int) -> StepContext:
        """Each sequence gets its token number `length`; blocks lie in any order."""
        num_blocks = -(-length // self.block_size)
        tables_SB = torch.randperm(num_sequences * num_blocks).view(num_sequences, num_blocks)
        positions_T = torch.full((num_sequences,), length - 1)
        return StepContext(
            positions_T=positions_T,
            slots_T=tables_SB[:, -1] * self.block_size + (length - 1) % self.block_size,
            query_starts=list(range(num_sequences + 1)),
            context_lens=[length] * num_sequences,
            block_tables_SB=tables_SB,
            num_decodes=num_sequences,
            block_size=self.block_size,
        )

    def prefill_context(self, length: int) -> StepContext:
        """One prompt, whole."""
        table_B = torch.randperm(-(-length // self.block_size))
        positions_T = torch.arange(length)
        slots_T = table_B[positions_T // self.block_size] * self.block_size
        return StepContext(
            positions_T=positions_T,
            slots_T=slots_T + positions_T % self.block_size,
            query_starts=[0, length],
            context_lens=[length],
            block_tables_SB=table_B[None],
            num_decodes=int(length == 1),
            block_size=self.block_size,
        )

    def routing(self, num_tokens: int) -> Routing:
        """Every choice of experts as likely as any other; weights sum to 1."""
        mlp = self.spec.moe_layers[0]
        scores_TE = torch.rand(num_tokens, mlp.num_experts)
        ids_TK = scores_TE.topk(mlp.router.top_k).indices
        return Routing(ids_TK, torch.rand(ids_TK.shape).softmax(-1))


def make_rig(config: EngineConfig, sizes: Sizes, *, keeps_plain: bool) -> Rig:
    """As many layers as the model has, unless `sizes` says otherwise or memory lacks.

    Threads and kernels of this process are then those that the engine would use.
    """
    folder = open_model_folder(config.model, config.revision)
    dtype = pick_dtype(folder.hf_config, config.dtype, CPU)
    spec = sizes.apply(folder.spec)
    num_layers = fitting_layers(spec, dtype.itemsize * (1 + keeps_plain), available_memory())
    if num_layers < len(spec.layers) and sizes.layers is not None:
        raise ConfigError(f"--layers {sizes.layers}: the free memory holds {num_layers}")
    spec = dataclasses.replace(spec, layers=spec.layers[:num_layers])
    num_threads = pick_num_threads(config, None)
    torch.set_num_threads(num_threads)
    choose_kernels(config.cpu_kernels, CPU, dtype, num_threads)
    return Rig(spec, dtype, block_size=config.block_size, keeps_plain=keeps_plain)


def fitting_layers(spec: DecoderSpec, itemsize: int, free: int | None) -> int:
    """At least one. `free` None: nobody knows, so all."""
    if free is None:
        return len(spec.layers)
    layer = spec.num_parameters - dataclasses.replace(spec, layers=spec.layers[:1]).num_parameters
    per_layer = layer / max(1, len(spec.layers) - 1) * itemsize
    if not per_layer:
        return len(spec.layers)
    return max(1, min(len(spec.layers), int(free / _MEMORY_SHARE / per_layer)))


@torch.no_grad()
def fill(decoder: Decoder) -> None:
    """Matrices of a scale that keeps the stream near one, norms of ones."""
    drawn = torch.randn(_NUM_DRAWN)
    for parameter in decoder.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        some = (drawn * parameter.shape[-1] ** -0.5).to(parameter.dtype)
        for part in torch.split(parameter.view(-1), len(some)):
            part.copy_(some[: len(part)])


def plain_experts(layer: DecoderLayer) -> PlainExperts:
    assert isinstance(layer.mlp, MoE)
    gate_up, down = layer.mlp.experts.gate_up_EGD, layer.mlp.experts.down_EDF
    assert isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
    return PlainExperts(gate_up.detach().clone(), down.detach().clone())
