"""From an `EngineConfig` to an engine that is ready to step: on one rank, or as the first."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from moe_serve.block_manager import BlockManager
from moe_serve.config import EngineConfig
from moe_serve.engine import Engine
from moe_serve.errors import CheckpointError, ConfigError, MoeServeError
from moe_serve.executor import Executor, LocalExecutor
from moe_serve.expert_cost import measure_cost
from moe_serve.expert_monitor import ExpertMonitor, ModelFacts
from moe_serve.expert_service import ExpertService
from moe_serve.layers.moe import MoE
from moe_serve.memory_profile import num_blocks_of
from moe_serve.messages import AddRequest, EngineReady
from moe_serve.models.packing import expert_bytes
from moe_serve.parallel.degrees import RankSeat
from moe_serve.parallel.world import ENVIRONMENT
from moe_serve.rank_setup import RankSetup
from moe_serve.rebalancer import ExpertMover
from moe_serve.sampling_params import SamplingParams
from moe_serve.scheduler import Scheduler

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 300


def load_engine(
    config: EngineConfig,
    seat: RankSeat | None = None,
    *,
    init_method: str = ENVIRONMENT,
    check_others: Callable[[], None] = lambda: None,
    on_failure: Callable[[MoeServeError], None] = lambda error: None,
    show_progress: bool = False,
) -> Engine:
    """Load, size the KV pools and warm up. Raises `ConfigError` or `CheckpointError`.

    `seat`: the place of rank 0 where a launcher started several; the others run
    `rank_worker.run`. `check_others`: see `meet`; `on_failure`: see `RankLinks`.
    """
    started = time.monotonic()
    setup = RankSetup.make(config, seat)
    if setup.layout.world_size == 1:
        executor, num_blocks = _load_alone(setup, show_progress)
    else:
        # Here, since one rank alone needs neither ZMQ nor msgspec.
        from moe_serve.ranked_executor import load_ranks

        executor, num_blocks = load_ranks(
            setup, init_method, check_others, on_failure, show_progress=show_progress
        )
    try:
        max_model_len = fitting_model_len(
            config.max_model_len or setup.folder.spec.max_position, num_blocks * config.block_size
        )
        warm_up(executor, setup, num_blocks, max_model_len)
        if not config.enforce_eager:
            capture_graphs(executor, config.max_num_seqs, max_model_len, show_progress)
    except BaseException:
        executor.close()
        raise
    scheduler = Scheduler(
        _make_block_managers(setup, num_blocks, config.enable_prefix_caching),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        eos_token_ids=setup.folder.eos_token_ids,
    )
    info = describe(setup, num_blocks, max_model_len, time.monotonic() - started)
    return Engine(
        executor, scheduler, make_expert_service(executor, setup), info, config.max_logprobs
    )


def make_expert_service(executor: Executor, setup: RankSetup) -> ExpertService:
    """Counts from here on, the warm-up being forgotten."""
    config, spec = setup.config, setup.folder.spec
    layers = [layer.mlp for layer in executor.runner.model.layers if isinstance(layer.mlp, MoE)]
    mlp = next(iter(spec.moe_layers), None)
    facts = ModelFacts(
        name=setup.folder.path.name,
        top_k=0 if mlp is None else mlp.router.top_k,
        expert_bytes=0
        if mlp is None
        else expert_bytes(mlp.inner_size, spec.hidden_size, setup.dtype, config.quantization),
        cost=measure_cost([layer.experts for layer in layers]),
        has_rows=setup.layout.expert_size > 1,
    )
    mover = executor if isinstance(executor, ExpertMover) and config.enable_eplb else None
    return ExpertService(
        ExpertMonitor(executor.read_load, facts, window_size=config.eplb.window_size),
        setup.shard.placement,
        config.eplb,
        mover,
        Path(config.expert_record_dir),
    )


def _load_alone(setup: RankSetup, show_progress: bool) -> tuple[Executor, int]:
    model = setup.load(setup.ranks(None), None, show_progress=show_progress)
    num_blocks = setup.num_fitting_blocks(model)
    return LocalExecutor(setup.make_runner(model, num_blocks)), num_blocks


def _make_block_managers(
    setup: RankSetup, num_blocks: int, enable_prefix_caching: bool
) -> list[BlockManager]:
    """One a lane."""
    return [
        BlockManager(num_blocks, setup.config.block_size, enable_prefix_caching)
        for _ in range(setup.layout.data_size)
    ]


def fitting_model_len(wanted: int, num_kv_tokens: int) -> int:
    """The context that is promised: a request of that length must fit a lane's pool alone.

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


def warm_up(executor: Executor, setup: RankSetup, num_blocks: int, max_model_len: int) -> None:
    """Short requests for each lane, through a scheduler of its own: lazy set-up happens before
    clients wait. What they leave behind, in the pools and in the expert counts, is wiped.
    """
    scheduler = Scheduler(
        _make_block_managers(setup, num_blocks, False),
        max_num_seqs=1,
        max_num_batched_tokens=max_model_len,
        max_model_len=max_model_len,
        eos_token_ids=frozenset(),
    )
    most = min(max_model_len - 2, setup.config.max_num_batched_tokens)
    for request in warm_up_requests(most, setup.device.type):
        for lane in range(setup.layout.data_size):
            name = f"{request.request_id} {lane}"
            scheduler.add(dataclasses.replace(request, request_id=name))
    num_used = 0
    while (plan := scheduler.schedule()) is not None:
        num_used = max(num_used, num_blocks_of(plan))
        outcome = executor.run(plan)
        for error in outcome.failures.values():
            raise CheckpointError(
                f"the first tokens already fail ({error}): the weights are damaged, or too large "
                "for this --dtype"
            )
        scheduler.update(plan, outcome.results)
    executor.forget_warm_up(num_used)


def warm_up_requests(most_tokens: int, device_type: str) -> list[AddRequest]:
    """One, and on a GPU some that meet each kernel it will compile: products are cut by their
    rows, most often anew where these pass a power of two.
    """
    lengths = [max(1, min(most_tokens, WARM_UP_TOKENS))]
    samplings = [SamplingParams(max_tokens=2, temperature=0)]
    if device_type == "cuda":
        lengths += [2**bits + 1 for bits in range(4, 13) if 2**bits < most_tokens]
        samplings.append(SamplingParams(max_tokens=2, top_k=9, top_p=0.9, min_p=0.01, seed=0))
    return [
        AddRequest(
            request_id=f"warm-up {number}",
            prompt_token_ids=[0] * length,
            sampling=samplings[number % len(samplings)],
        )
        for number, length in enumerate(lengths)
    ]


def capture_graphs(
    executor: Executor, max_num_seqs: int, max_model_len: int, show_progress: bool
) -> None:
    """Where the executor has any; with a bar on a terminal, and a line in the log at the end."""
    started = time.monotonic()
    console = Console(stderr=True)
    columns = (TextColumn("Capturing decode steps"), BarColumn(), TaskProgressColumn())
    is_off = not (show_progress and console.is_terminal)
    share = 0.0
    with Progress(*columns, console=console, transient=True, disable=is_off) as bar:
        task = bar.add_task("", total=1.0, visible=False)
        for share in executor.capture_graphs(max_num_seqs, max_model_len):
            bar.update(task, completed=share, visible=True)
    if share:
        seconds = time.monotonic() - started
        logger.info("captured decode steps of up to %d requests in %.1f s", max_num_seqs, seconds)


def describe(
    setup: RankSetup, num_blocks: int, max_model_len: int, load_seconds: float
) -> EngineReady:
    spec, layout, config = setup.folder.spec, setup.layout, setup.config
    return EngineReady(
        architecture=setup.folder.architecture,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_kv_blocks=num_blocks,
        kv_cache_bytes=num_blocks * setup.block_bytes * layout.world_size,
        num_parameters=spec.num_parameters,
        num_active_parameters=spec.num_active_parameters,
        dtype=str(setup.dtype).removeprefix("torch."),
        device=setup.device.type,
        num_threads=torch.get_num_threads(),
        load_seconds=load_seconds,
        tensor_parallel_size=layout.tensor_size,
        data_parallel_size=layout.data_size,
        expert_parallel_size=layout.expert_size,
        num_redundant_experts=config.num_redundant_experts,
        moves_experts=config.enable_eplb,
        quantization=config.quantization,
    )
