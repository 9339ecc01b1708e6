"""Every option, defined once: flags, `MOE_SERVE_*` variables, YAML keys and `LLM(...)` arguments.

`settings` turns these dataclasses into a command line; nothing else knows an option's name.
Checked on construction: a value that cannot work raises `ConfigError` with the fix in its text.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

from moe_serve.eplb_config import EplbConfig
from moe_serve.errors import ConfigError

BUILTIN_MODEL = "builtin"
CPU_KV_CACHE_BYTES = 256 * 2**20
GPU_MEMORY_UTILIZATION = 0.9
# Seconds. Far beyond any use; torch takes no infinity.
MAX_COLLECTIVE_TIMEOUT = 86400

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
DeviceName = Literal["auto", "cpu", "cuda"]
KVCacheDTypeName = Literal["auto", "fp8"]
All2AllBackend = Literal["auto", "allgather_reducescatter", "all_to_all"]
CommBackend = Literal["auto", "gloo", "deepspeed", "shm"]
Quantization = Literal["int8", "int4"]
CPUKernels = Literal["auto", "none", "amx", "avx512_bf16", "avx512", "avx2"]
ExpertPlacementStrategy = Literal["linear", "round_robin"]

# Option -> its default, which has no effect without expert parallelism.
_EXPERT_PARALLEL_ONLY = {
    "all2all_backend": "auto",
    "expert_placement_strategy": "linear",
    "ep_num_redundant_experts": 0,
    "init_expert_location": None,
    "enable_eplb": False,
}
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}


def option(default: Any, help: str, *, aliases: tuple[str, ...] = ()) -> Any:
    """A dataclass field with the text of its flag; `aliases` are other engines' spellings."""
    return dataclasses.field(default=default, metadata={"help": help, "aliases": aliases})


def parse_bytes(name: str, text: str) -> int:
    """'256MiB', '1.5g' (binary), '2GB' (decimal) or a plain count -> bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if not match or match[2] not in _UNITS:
        raise ConfigError(f"{flag(name)} {text!r} is not a size; write for example 256MiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2]])


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine needs to know."""

    model: str = option(BUILTIN_MODEL, "folder, hub id, or 'builtin'")
    revision: str | None = option(None, "branch, tag or commit of a hub model")
    dtype: DTypeName = option("auto", "auto takes the checkpoint's (float32 becomes bfloat16)")
    device: DeviceName = option("auto", "auto takes CUDA where there is one")
    max_model_len: int | None = option(None, "prompt + output tokens; default: the model's own")
    max_num_seqs: int = option(64, "requests that run at once")
    max_num_batched_tokens: int = option(
        2048, "tokens in one step; longer prompts go in chunks", aliases=("chunked_prefill_size",)
    )
    block_size: int = option(16, "tokens in one KV block")
    gpu_memory_utilization: float = option(
        GPU_MEMORY_UTILIZATION, "share of GPU memory to use (CUDA only)"
    )
    enforce_eager: bool = option(
        False, "launch kernels one by one, without CUDA graphs (CUDA only)"
    )
    kv_cache_dtype: KVCacheDTypeName = option(
        "auto", "auto takes the model's; fp8 (e4m3) holds twice the tokens of bfloat16"
    )
    kv_cache_memory: str | None = option(None, "size of the KV pool, as 512MiB; CPU default 256MiB")
    num_kv_blocks: int | None = option(
        None, "number of KV blocks, instead of a size", aliases=("num_gpu_blocks_override",)
    )
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of equal prompt prefixes")
    max_logprobs: int = option(20, "most alternatives that a request may ask for")
    num_threads: int | None = option(
        None,
        "CPU threads of one rank; default: the cores it may use, shared with the ranks beside it",
    )
    cpu_kernels: CPUKernels = option(
        "auto",
        "instructions of the CPU kernels; auto takes the best that the CPU has, none leaves all to "
        "PyTorch",
    )
    quantization: Quantization | None = option(
        None, "round expert and linear weights to 8 or 4 bits while loading (CPU only)"
    )
    tensor_parallel_size: int | None = option(
        None,
        "ranks that split one lane's attention; default: all that a launcher started, else 1",
        aliases=("tp",),
    )
    data_parallel_size: int = option(
        1, "lanes, each with its own requests and KV pool", aliases=("dp",)
    )
    enable_expert_parallel: bool = option(
        False, "spread whole experts over all ranks, instead of splitting each within a lane"
    )
    all2all_backend: All2AllBackend = option(
        "auto", "how tokens reach experts on other ranks; auto picks by size, step by step"
    )
    comm_backend: CommBackend = option(
        "auto",
        "how ranks exchange tensors between CPUs; auto: by memory that they share where they are "
        "on one host, else by gloo",
    )
    expert_placement_strategy: ExpertPlacementStrategy = option(
        "linear", "which experts a rank holds: neighbours, or every n-th"
    )
    ep_num_redundant_experts: int = option(
        0, "slots for copies of experts, over all ranks, in each layer"
    )
    init_expert_location: str | None = option(
        None, "file with a placement of the experts, or with a load to balance them by"
    )
    enable_eplb: bool = option(
        False, "let experts move between ranks while serving, by their load and when asked"
    )
    eplb_config: str | None = option(
        None,
        "JSON: step_interval, window_size, num_redundant_experts, ...; README lists the keys",
    )
    expert_record_dir: str = option(".", "folder that recordings of expert choices are written to")
    deterministic: bool = option(
        False, "the same bits for every tensor-parallel size, for more memory and traffic"
    )
    collective_timeout: float = option(
        30.0, "seconds after which a rank that does not answer counts as dead"
    )

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "max_model_len", "max_num_seqs", "max_num_batched_tokens",
                        "block_size", "num_kv_blocks", "num_threads", "tensor_parallel_size",
                        "data_parallel_size")  # fmt: skip
        _check_at_least(self, 0, "max_logprobs", "ep_num_redundant_experts")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"--gpu-memory-utilization {self.gpu_memory_utilization} must be above 0, at most 1"
            )
        if self.num_kv_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigError("--num-kv-blocks and --kv-cache-memory both size the KV pool; "
                              "give one of them")  # fmt: skip
        if self.kv_cache_memory is not None:
            parse_bytes("kv_cache_memory", self.kv_cache_memory)
        # Not `< 1 or`: NaN fails every comparison.
        if not 1 <= self.collective_timeout <= MAX_COLLECTIVE_TIMEOUT:
            raise ConfigError(
                f"--collective-timeout {self.collective_timeout} must be between 1 and "
                f"{MAX_COLLECTIVE_TIMEOUT} (a day)"
            )
        self._check_experts()

    def _check_experts(self) -> None:
        for name, default in _EXPERT_PARALLEL_ONLY.items():
            value = getattr(self, name)
            if value != default and not self.enable_expert_parallel:
                raise ConfigError(
                    f"{flag(name)} {value} has no effect without expert parallelism; add "
                    "--enable-expert-parallel or drop it"
                )
        if self.eplb_config is not None and not self.enable_eplb:
            raise ConfigError("--eplb-config has no effect without --enable-eplb")
        if self.init_expert_location is not None and self.expert_placement_strategy != "linear":
            raise ConfigError(
                f"--expert-placement-strategy {self.expert_placement_strategy} and "
                "--init-expert-location both place the experts; give one of them"
            )
        given = self.eplb.num_redundant_experts
        if self.ep_num_redundant_experts and given not in (0, self.ep_num_redundant_experts):
            raise ConfigError(
                f"--ep-num-redundant-experts {self.ep_num_redundant_experts} and --eplb-config "
                f"num_redundant_experts {given} differ; give one of them"
            )

    @property
    def eplb(self) -> EplbConfig:
        """What `--eplb-config` says; without it the defaults."""
        return EplbConfig.parse(self.eplb_config)

    @property
    def num_redundant_experts(self) -> int:
        return self.ep_num_redundant_experts or self.eplb.num_redundant_experts

    def engine_options(self) -> dict[str, Any]:
        """The engine's options by name, without what a subclass adds."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(EngineConfig)}

    @property
    def sizes_kv_pool(self) -> bool:
        """Whether the user said how large the pool is."""
        return self.num_kv_blocks is not None or self.kv_cache_memory is not None

    @property
    def kv_cache_bytes(self) -> int | None:
        """The pool's size where the user gave one."""
        if self.kv_cache_memory is None:
            return None
        return parse_bytes("kv_cache_memory", self.kv_cache_memory)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(EngineConfig):
    """The engine's options and the HTTP server's."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = option(8000, "port to listen on; 0 picks a free one")
    served_model_name: str | None = option(
        None, "name in the API; default: the hub id or folder name"
    )
    api_key: str | None = option(None, "clients must send it as a bearer token")
    admin_api_key: str | None = option(
        None, "bearer token of routes that change the server; default: that of clients"
    )
    chat_template: str | None = option(None, "file with a Jinja template, instead of the model's")
    shutdown_timeout: float = option(30.0, "seconds that running requests get after a signal")
    step_timeout: float = option(
        300.0, "seconds that one engine step may take before it counts as hung"
    )
    max_body_bytes: str = option("16MiB", "largest request body")
    max_queue_len: int = option(1024, "requests in the server at once; more get 429")
    max_choices: int = option(128, "largest n, and most prompts in one request")
    metrics_prefix: str = option("moe_serve", "prefix of the /metrics names; vllm for its boards")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "least level to log")

    def __post_init__(self) -> None:
        # Zero-argument super() is unusable here: slots=True rebuilds the class.
        EngineConfig.__post_init__(self)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} must be between 0 and 65535")
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            raise ConfigError(f"--metrics-prefix {self.metrics_prefix!r} is not a metric name")
        # Not `< 0`: NaN fails every comparison.
        if not self.shutdown_timeout >= 0:
            raise ConfigError(f"--shutdown-timeout {self.shutdown_timeout} must be 0 or more")
        if not self.step_timeout > 0:
            raise ConfigError(f"--step-timeout {self.step_timeout} must be above 0")
        if self.enable_eplb and not self.eplb.use_async:
            # Steps wait for the transfer, and a step that takes so long counts as hung.
            if self.eplb.transfer_timeout >= self.step_timeout:
                raise ConfigError(
                    f"--eplb-config transfer_timeout {self.eplb.transfer_timeout:g} with use_async "
                    f"false must be below --step-timeout {self.step_timeout:g}"
                )
        _check_at_least(self, 1, "max_queue_len", "max_choices")
        parse_bytes("max_body_bytes", self.max_body_bytes)

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(**self.engine_options())


def _check_at_least(config: EngineConfig, low: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < low:
            raise ConfigError(f"{flag(name)} {value} must be at least {low}")
