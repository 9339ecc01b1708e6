"""What the server says when it is ready."""

from __future__ import annotations

import json
import shlex

from moe_serve.messages import EngineReady


def banner(version: str, model_name: str, info: EngineReady, url: str) -> str:
    body = json.dumps({"prompt": "Dorothy looked", "max_tokens": 32, "temperature": 0})
    curl = f"curl {url}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    lines = {
        "model": f"{model_name} ({info.architecture}), {_count(info.num_parameters)} parameters, "
        f"{_count(info.num_active_parameters)} active per token",
        "compute": f"{info.device}, {_numbers(info)}, {_threads(info)}",
        **_ranks(info),
        "KV pool": f"{_lanes(info)}{info.num_kv_tokens:,} tokens in {info.num_kv_blocks:,} blocks "
        f"of {info.block_size} ({info.kv_cache_bytes / 2**20:,.0f} MiB); "
        f"context {info.max_model_len:,}",
        "ready": f"{url} (loaded in {info.load_seconds:.1f} s)",
        "try": curl,
    }
    return "\n".join([f"moe_serve {version}", *(f"  {k:<8} {v}" for k, v in lines.items())])


def _ranks(info: EngineReady) -> dict[str, str]:
    """A line where there is more than one."""
    if info.num_ranks == 1:
        return {}
    split = f"{info.data_parallel_size} x {info.tensor_parallel_size} (lanes x tensor-parallel)"
    experts = f"spread over {info.expert_parallel_size}"
    if info.num_redundant_experts:
        experts += f" with {info.num_redundant_experts} redundant"
    if info.moves_experts:
        experts += ", which may move"
    if info.expert_parallel_size == 1:
        experts = "split within a lane" if info.tensor_parallel_size > 1 else "whole in each lane"
    return {"ranks": f"{info.num_ranks} = {split}, experts {experts}"}


def _numbers(info: EngineReady) -> str:
    return f"{info.dtype} with {info.quantization} weights" if info.quantization else info.dtype


def _threads(info: EngineReady) -> str:
    plural = "" if info.num_threads == 1 else "s"
    return f"{info.num_threads} thread{plural}{' a rank' if info.num_ranks > 1 else ''}"


def _lanes(info: EngineReady) -> str:
    return f"{info.data_parallel_size} lanes of " if info.data_parallel_size > 1 else ""


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
