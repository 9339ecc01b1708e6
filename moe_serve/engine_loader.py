"""From an `EngineConfig` to an engine that is ready to step."""

from __future__ import annotations

import logging
import time

import torch

from moe_serve.block_manager import BlockManager
from moe_serve.config import EngineConfig
from moe_serve.context import LayerKV
from moe_serve.engine import Engine
from moe_serve.errors import CheckpointError, ConfigError
from moe_serve.experts.load import ExpertLoad
from moe_serve.kv_pool import block_bytes, make_pool, pool_blocks
from moe_serve.loader import load_model, pick_dtype
from moe_serve.messages import AddRequest, EngineReady
from moe_serve.model_folder import ModelFolder, open_model_folder
from moe_serve.model_runner import ModelRunner
from moe_serve.models.decoder import Decoder
from moe_serve.models.spec import DecoderSpec
from moe_serve.parallel.cpu import available_cores
from moe_serve.sampler import Sampler
from moe_serve.sampling_params import SamplingParams
from moe_serve.scheduler import Scheduler

logger = logging.getLogger(__name__)


def load_engine(config: EngineConfig, *, show_progress: bool = False) -> Engine:
    """Load, size the KV pool and warm up. Raises `ConfigError` or `CheckpointError`."""
    started = time.monotonic()
    device = pick_device(config.device)
    torch.set_num_threads(config.num_threads or available_cores())
    folder = open_model_folder(config.model, config.revision)
    dtype = pick_dtype(folder.hf_config, config.dtype, device)
    check_max_model_len(config, folder.spec.max_position)
    model = load_model(
        folder.path, folder.hf_config, dtype=dtype, device=device, show_progress=show_progress
    )
    num_blocks = pool_blocks(config, block_bytes(model.spec, config.block_size, dtype), device)
    pool = make_pool(model.spec, num_blocks, config.block_size, dtype, device)
    runner = make_runner(model, pool, folder.eos_token_ids, device)
    max_model_len = fitting_model_len(
        config.max_model_len or model.spec.max_position, num_blocks * config.block_size
    )
    scheduler = Scheduler(
        BlockManager(num_blocks, config.block_size, config.enable_prefix_caching),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        eos_token_ids=folder.eos_token_ids,
    )
    warm_up(runner, num_blocks, config.block_size, max_model_len)
    info = describe(folder, model, pool, max_model_len, time.monotonic() - started)
    return Engine(runner, scheduler, info, config.max_logprobs)


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises `ConfigError` for CUDA where there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device; use --device cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def check_max_model_len(config: EngineConfig, max_position: int) -> None:
    """Refuse, before anything is loaded, a context that the model was not made for."""
    if config.max_model_len is not None and config.max_model_len > max_position:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} exceeds the model's own {max_position}"
        )


def fitting_model_len(wanted: int, num_kv_tokens: int) -> int:
    """The context that is promised: a request of that length must fit the pool alone.

    Raises `ConfigError` where not even one token in and one out would.
    """
    if min(wanted, num_kv_tokens) < 2:
        raise ConfigError(
            f"a context of {min(wanted, num_kv_tokens)} tokens leaves no room for a prompt and its "
            "answer; raise --max-model-len, or --kv-cache-memory"
        )
    if wanted <= num_kv_tokens:
        return wanted
    logger.warning(
        "context lowered from %d to %d tokens, all that the KV pool holds; "
        "raise --kv-cache-memory for more",
        wanted,
        num_kv_tokens,
    )
    return num_kv_tokens


def make_runner(
    model: Decoder, pool: list[LayerKV], eos_token_ids: frozenset[int], device: torch.device
) -> ModelRunner:
    moe_layers = model.spec.moe_layers
    num_experts = max((mlp.num_experts for mlp in moe_layers), default=0)
    load = ExpertLoad(len(moe_layers), num_experts, device)
    return ModelRunner(model, pool, Sampler(model.spec.vocab_size, eos_token_ids), load, device)


def warm_up(runner: ModelRunner, num_blocks: int, block_size: int, max_model_len: int) -> None:
    """One short request through a scheduler of its own: lazy set-up happens before clients wait.

    What it leaves behind, in the pool and in the expert counts, is wiped.
    """
    scheduler = Scheduler(
        BlockManager(num_blocks, block_size, False),
        max_num_seqs=1,
        max_num_batched_tokens=max_model_len,
        max_model_len=max_model_len,
        eos_token_ids=frozenset(),
    )
    prompt = [0] * max(1, min(max_model_len - 2, 300))
    sampling = SamplingParams(max_tokens=2, temperature=0)
    prompt_id = "warm-up"
    scheduler.add(AddRequest(request_id=prompt_id, prompt_token_ids=prompt, sampling=sampling))
    while (plan := scheduler.schedule()) is not None:
        outcome = runner.run(plan)
        if outcome.failures:
            raise CheckpointError(
                f"the first tokens already fail ({outcome.failures[prompt_id]}): the weights are "
                "damaged, or too large for this --dtype"
            )
        scheduler.update(plan, outcome.results)
    runner.load.counts_LE.zero_()
    for kv in runner.pool:
        blocks = -(-len(prompt) // block_size) + 1
        kv.keys_BsNh[:blocks].zero_()
        kv.values_BsNh[:blocks].zero_()


def describe(
    folder: ModelFolder,
    model: Decoder,
    pool: list[LayerKV],
    max_model_len: int,
    load_seconds: float,
) -> EngineReady:
    spec: DecoderSpec = model.spec
    num_blocks, block_size = pool[0].keys_BsNh.shape[:2]
    return EngineReady(
        architecture=folder.architecture,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        block_size=block_size,
        num_kv_blocks=num_blocks,
        kv_cache_bytes=sum(kv.keys_BsNh.nbytes + kv.values_BsNh.nbytes for kv in pool),
        num_parameters=spec.num_parameters,
        num_active_parameters=spec.num_active_parameters,
        dtype=str(pool[0].keys_BsNh.dtype).removeprefix("torch."),
        device=str(pool[0].keys_BsNh.device),
        num_threads=torch.get_num_threads(),
        load_seconds=load_seconds,
    )
