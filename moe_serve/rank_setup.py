"""What each rank does before it can run steps: check, load its slices, make its pool."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import partial

import torch

from moe_serve.config import EngineConfig
from moe_serve.deterministic import check_columns
from moe_serve.errors import ConfigError
from moe_serve.experts.load import ExpertLoad
from moe_serve.initial_placement import initial_placement
from moe_serve.kernels.cpu.calls import DTYPES
from moe_serve.kernels.cpu.library import AUTO, NONE, active, choose
from moe_serve.kv_pool import block_bytes, make_pool, pool_blocks
from moe_serve.loader import load_model, pick_dtype
from moe_serve.memory_profile import largest_step, num_blocks_of, peak_bytes
from moe_serve.model_folder import ModelFolder, open_model_folder
from moe_serve.model_runner import ModelRunner
from moe_serve.models.decoder import Decoder
from moe_serve.models.fit import check_deterministic, check_fit
from moe_serve.models.packing import pack_weights
from moe_serve.models.shard import ModelShard
from moe_serve.parallel.comm_backend import check_comm_backend
from moe_serve.parallel.cpu import available_cores
from moe_serve.parallel.degrees import RankSeat, resolve_degrees
from moe_serve.parallel.layout import RankLayout
from moe_serve.parallel.world import World, make_groups
from moe_serve.ranks import Ranks
from moe_serve.sampler import Sampler


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """What a rank knows before it has met the others. `seat` None: there are no others."""

    config: EngineConfig
    seat: RankSeat | None
    folder: ModelFolder
    shard: ModelShard
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def make(cls, config: EngineConfig, seat: RankSeat | None) -> RankSetup:
        """Raises `ConfigError` or `CheckpointError` for what can be told without the weights."""
        layout = plan_layout(config, seat)
        device = pick_device(config.device, seat)
        check_comm_backend(config.comm_backend, layout, device.type)
        num_threads = pick_num_threads(config, seat)
        torch.set_num_threads(num_threads)
        folder = open_model_folder(config.model, config.revision)
        check_max_model_len(config, folder.spec.max_position)
        check_fit(folder.spec, layout)
        check_deterministic(layout, device.type)
        placement = initial_placement(config, folder.spec, layout)
        shard = ModelShard(layout=layout, placement=placement)
        dtype = pick_dtype(folder.hf_config, config.dtype, device)
        if not choose_kernels(config.cpu_kernels, device, dtype, num_threads):
            check_columns(folder.spec, shard, dtype)
        check_quantization(config, device, dtype)
        return cls(config=config, seat=seat, folder=folder, shard=shard, device=device, dtype=dtype)

    @property
    def layout(self) -> RankLayout:
        return self.shard.layout

    @property
    def num_ranks_here(self) -> int:
        return 1 if self.seat is None else self.seat.local_world_size

    def ranks(self, world: World | None) -> Ranks:
        """The groups that the layers use; all ranks make them together."""
        if world is None:
            return Ranks(shard=self.shard)
        lane, experts = make_groups(world, self.layout, self.config.comm_backend)
        backend = self.config.all2all_backend
        return Ranks(shard=self.shard, lane=lane, experts=experts, all2all_backend=backend)

    def load(
        self, ranks: Ranks, on_progress: Callable[[int, int], None] | None, *, show_progress: bool
    ) -> Decoder:
        """The decoder with this rank's weights. `on_progress`: bytes read, bytes needed."""
        library = active()
        quantization = self.config.quantization
        return load_model(
            self.folder.path,
            self.folder.hf_config,
            dtype=self.dtype,
            device=self.device,
            ranks=ranks,
            on_progress=on_progress,
            show_progress=show_progress,
            finish=None
            if library is None
            else partial(pack_weights, library=library, quantization=quantization),
        )

    @property
    def kv_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.config.kv_cache_dtype == "fp8" else self.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block on this rank."""
        return block_bytes(self.folder.spec, self.shard, self.config.block_size, self.kv_dtype)

    def num_fitting_blocks(self, model: Decoder) -> int:
        """KV blocks that fit beside the weights and the largest step. All ranks call it together.

        Raises `ConfigError` where not even one fits.
        """
        is_measured = self.device.type == "cuda" and not self.config.sizes_kv_pool
        step_bytes = self._largest_step_bytes(model) if is_measured else 0
        return pool_blocks(self.config, self.block_bytes, self.device, step_bytes)

    def _largest_step_bytes(self, model: Decoder) -> int:
        """By running it on a pool of its own; and once more for the share that graphs keep.

        Raises `ConfigError` where it does not fit.
        """
        config = self.config
        plan = largest_step(
            num_tokens=config.max_num_batched_tokens,
            num_sequences=config.max_num_seqs,
            max_model_len=config.max_model_len or self.folder.spec.max_position,
            block_size=config.block_size,
            num_lanes=self.layout.data_size,
        )
        try:
            runner = self.make_runner(model, num_blocks_of(plan))
            peak = peak_bytes(runner, plan.of_lane(self.layout.lane))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a step of {config.max_num_batched_tokens} tokens does not fit beside the weights "
                f"({error}); lower --max-num-batched-tokens or --max-num-seqs"
            ) from error
        share = config.max_num_seqs / max(config.max_num_seqs, config.max_num_batched_tokens)
        return int(peak * (1 + share))

    def make_runner(self, model: Decoder, num_blocks: int) -> ModelRunner:
        spec = self.folder.spec
        pool = make_pool(
            spec,
            self.shard,
            num_blocks,
            self.config.block_size,
            self.kv_dtype,
            self.device,
            num_ranks_here=self.num_ranks_here,
        )
        num_experts = max((mlp.num_experts for mlp in spec.moe_layers), default=0)
        load = ExpertLoad(len(spec.moe_layers), num_experts, self.device)
        sampler = Sampler(spec.vocab_size, self.folder.eos_token_ids)
        return ModelRunner(model, pool, sampler, load, self.device)


def plan_layout(config: EngineConfig, seat: RankSeat | None) -> RankLayout:
    """Raises `ConfigError` where the degrees do not fit the ranks that were started."""
    degrees = resolve_degrees(
        config.tensor_parallel_size,
        config.data_parallel_size,
        None if seat is None else seat.world_size,
    )
    assert seat is not None or degrees.world_size == 1, "whoever wants ranks starts them first"
    return RankLayout(
        rank=0 if seat is None else seat.rank,
        tensor_size=degrees.tensor_size,
        data_size=degrees.data_size,
        expert_parallel=config.enable_expert_parallel,
        deterministic=config.deterministic,
    )


def pick_device(name: str, seat: RankSeat | None = None) -> torch.device:
    """`auto` is CUDA where there is one; each rank of a host has a device of its own.

    Raises `ConfigError` for CUDA where there is none, or where ranks outnumber the devices.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device; use --device cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu" or seat is None:
        return torch.device(name)
    # Not only where this rank's own is missing: all ranks meet the same error, the first too.
    if seat.local_world_size > torch.cuda.device_count():
        raise ConfigError(
            f"{seat.local_world_size} ranks on this host, but torch sees only "
            f"{torch.cuda.device_count()} CUDA devices; start fewer, or use --device cpu"
        )
    device = torch.device("cuda", seat.local_rank)
    torch.cuda.set_device(device)
    return device


def choose_kernels(name: str, device: torch.device, dtype: torch.dtype, num_threads: int) -> bool:
    """Whether the CPU kernels serve this model. Raises `ConfigError` where named ones cannot."""
    is_named = name not in (AUTO, NONE)
    obstacle = None
    if device.type != "cpu":
        obstacle = f"the model runs on {device.type}"
    elif dtype not in DTYPES:
        obstacle = f"they have no {str(dtype).removeprefix('torch.')}"
    if obstacle is None and choose(name, num_threads):
        return name != NONE
    if is_named:
        reason = obstacle or "this machine cannot run them (see the log)"
        raise ConfigError(f"--cpu-kernels {name}: {reason}; use auto")
    choose(NONE, num_threads)
    return False


def check_quantization(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
    """To be asked once kernels are chosen. Raises `ConfigError` where none take such weights."""
    name = f"--quantization {config.quantization}"
    if config.quantization is None or active() is not None:
        return
    if device.type != "cpu":
        raise ConfigError(f"{name}: the model runs on {device.type}; drop it, or use --device cpu")
    if dtype not in DTYPES:
        got = str(dtype).removeprefix("torch.")
        raise ConfigError(f"{name}: rows cannot be {got}; use --dtype bfloat16 or float32")
    if config.cpu_kernels == NONE:
        raise ConfigError(f"{name} needs the CPU kernels; drop --cpu-kernels none")
    raise ConfigError(
        f"{name} needs the CPU kernels, which could not be made here (the log says why); install a "
        "C++ compiler, for example g++, or drop it"
    )


def pick_num_threads(config: EngineConfig, seat: RankSeat | None) -> int:
    """CPU threads of this rank. Bits may depend on their number, so a promise needs a fixed one."""
    if config.num_threads is not None:
        return config.num_threads
    if config.deterministic:
        return 1
    if seat is None or os.environ.get("OMP_NUM_THREADS"):
        # The variable is meant for each process.
        return available_cores()
    return max(1, available_cores() // seat.local_world_size)


def check_max_model_len(config: EngineConfig, max_position: int) -> None:
    """Refuse, before anything is loaded, a context that the model was not made for."""
    if config.max_model_len is not None and config.max_model_len > max_position:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} exceeds the model's own {max_position}"
        )
