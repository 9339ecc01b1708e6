"""The memory that holds keys and values: how many blocks fit, and the tensors themselves."""

from __future__ import annotations

import torch

from moe_serve.config import CPU_KV_CACHE_BYTES, GPU_MEMORY_UTILIZATION, EngineConfig
from moe_serve.context import LayerKV
from moe_serve.errors import ConfigError
from moe_serve.kernels.cpu.memory import prefer_huge_pages
from moe_serve.models.shard import ModelShard
from moe_serve.models.spec import DecoderSpec
from moe_serve.parallel.cpu import available_memory


def block_bytes(spec: DecoderSpec, shard: ModelShard, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers: this rank's keys and values of `block_size` tokens."""
    per_token = sum(
        2 * shard.heads(layer.attention).kv_heads.size * layer.attention.head_dim
        for layer in spec.layers
    )
    return per_token * dtype.itemsize * block_size


def pool_blocks(
    config: EngineConfig, bytes_per_block: int, device: torch.device, step_bytes: int = 0
) -> int:
    """How many blocks the configuration, or else the free memory, allows.

    `step_bytes`: GPU memory to keep for the largest step. Raises `ConfigError` where not even one
    block fits.
    """
    if device.type != "cuda":
        _refuse_gpu_options(config, device)
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    budget = config.kv_cache_bytes
    if budget is None:
        budget = CPU_KV_CACHE_BYTES
        if device.type == "cuda":
            # What torch keeps of memory that was freed is free, too.
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(device)
            budget = gpu_budget(free, total, step_bytes, config.gpu_memory_utilization)
    num_blocks = budget // bytes_per_block
    if num_blocks < 1:
        raise ConfigError(
            f"the KV pool of {budget} bytes holds no block of {bytes_per_block} bytes; "
            f"raise {_more_memory(config, device)} or lower --block-size"
        )
    return num_blocks


def gpu_budget(free: int, total: int, step_bytes: int, utilization: float) -> int:
    """What the wanted share of the GPU leaves after all that is there by now, and a step, in bytes.

    Example: of 100, 60 free, a share of 0.9 and steps of 10 leave 40.
    """
    return max(0, int(total * utilization) - (total - free) - step_bytes)


def _more_memory(config: EngineConfig, device: torch.device) -> str:
    if device.type == "cuda" and not config.sizes_kv_pool:
        return "--gpu-memory-utilization"
    return "--kv-cache-memory"


def _refuse_gpu_options(config: EngineConfig, device: torch.device) -> None:
    if config.gpu_memory_utilization != GPU_MEMORY_UTILIZATION:
        raise ConfigError(
            f"--gpu-memory-utilization {config.gpu_memory_utilization} has no effect on "
            f"{device.type}; size the KV pool with --kv-cache-memory"
        )
    if config.enforce_eager:
        raise ConfigError(f"--enforce-eager has no effect on {device.type}; drop it")


def make_pool(
    spec: DecoderSpec,
    shard: ModelShard,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_ranks_here: int = 1,
) -> list[LayerKV]:
    """Zeroed tensors [blocks, block_size, own kv heads, head_dim] for every layer.

    Raises `ConfigError` if the memory is not there, for all `num_ranks_here` ranks of this host.
    """

    def tensor(num_heads: int, head_dim: int) -> torch.Tensor:
        shape = (num_blocks, block_size, num_heads, head_dim)
        return prefer_huge_pages(torch.zeros(shape, dtype=dtype, device=device))

    wanted = num_blocks * block_bytes(spec, shard, block_size, dtype) * num_ranks_here
    # Memory is handed out before it is there: asking is the only way not to be killed later.
    available = available_memory() if device.type == "cpu" else None
    if available is not None and wanted > available:
        raise ConfigError(
            f"the KV pool of {wanted} bytes does not fit into the {available} bytes of memory "
            "that are free; lower --kv-cache-memory or --num-kv-blocks"
        )
    pool = []
    for layer in spec.layers:
        shape = (shard.heads(layer.attention).kv_heads.size, layer.attention.head_dim)
        pool.append(LayerKV(keys_BsNh=tensor(*shape), values_BsNh=tensor(*shape)))
    return pool
