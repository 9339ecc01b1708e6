"""What the API process and the engine process tell each other.

Plain values that do not change, so that nothing but `wire` needs to know how they travel.
To the engine: `AddRequest`, `AbortRequests`, calls, `Shutdown`.
From the engine: `EngineReady` once, then `EngineOutputs` a step and `CallAnswer` a call, or
`EngineFailed` and the end.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

from moe_serve.sampling_params import SamplingParams
from moe_serve.token_routes import TokenRoutes

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """One sequence to generate (n choices are n requests).

    `priority`: lower runs sooner; equal ones in order of arrival. `arrival_time`: `time.time()`.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    arrival_time: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequests:
    """Forget these requests and free their blocks. Unknown ids are ignored; nothing is answered."""

    request_ids: list[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadCall:
    """What was counted so far: a load document, see `experts.files.load_files`."""

    call_id: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationCall:
    """What the ranks have moved so far: a document, see `reports.communication`."""

    call_id: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlacementCall:
    """Where the experts lie: a placement document, see `experts.files.placement_files`.

    `verify`: also whether all replicas of each expert have the same weights on all ranks.
    """

    call_id: int
    verify: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceCall:
    """Move experts; answered when they lie anew, or why they do not.

    `slots`: by MoE layer, the logical expert of each slot, rank after rank; None: by the load.
    """

    call_id: int
    slots: list[list[int]] | None = None
    max_moves: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordCall:
    """Record from now on, or no more, or write what was recorded to a file.

    - `mode`, to start: "counts", in windows of `window` steps, or "routes", of each token.
    - `style`, to dump: the file's suffix without its dot.
    """

    call_id: int
    action: Literal["start", "stop", "dump"]
    mode: Literal["counts", "routes"] = "counts"
    window: int = 100
    style: Literal["json", "npz", "pt"] = "npz"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Leave the loop now. Requests still in the engine are dropped: drain before."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """One position: the token there, and the likeliest alternatives, best first.

    Natural logarithms of the model's own distribution. `rank` is 1 for the likeliest token.
    """

    token_id: int
    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


class RequestUpdate(NamedTuple):
    """News of one request. `finish_reason` set: the last one for this id.

    A tuple, since it travels without the names of its fields: there is one a token.

    - `token_ids`: new tokens since the last update (a stop token is among them).
    - `logprobs`: one entry per new token, when asked for.
    - `prompt_logprobs`: sent once, with or before the first token; entry 0 is None.
    - `routes`, when asked for: of the positions computed since the last update, from the prompt's
      first on. The newest token is not among them: it has not been computed.
    - `stop_reason`: the token id that ended it, if it was one.
    - `error`: for finish_reason "error", what to tell the client; `is_client_fault`: the request
      itself cannot be served, rather than something having failed here.
    - `num_cached_tokens`: prompt tokens that came from the prefix cache.
    - times are `time.time()` seconds; 0.0 while unknown.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    routes: TokenRoutes | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    is_client_fault: bool = False
    num_cached_tokens: int = 0
    scheduled_time: float = 0.0
    first_token_time: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges now, and counters since the engine started.

    `prefix_cache_queries` / `prefix_cache_hits` count prompt tokens, as vLLM's do.
    `num_scheduled_tokens` is of the last step alone.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_recomputed_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStats:
    """How evenly the experts of the newest window are used, and how often they were moved.

    - balancedness: mean and minimum over layers, of the rows that ranks computed; 1.0 on one rank.
    - `entropy`: mean over layers; 1 where all experts get as much.
    - `hot_shares`: by k, the share of all choices that the k hottest experts of a layer get, mean
      over layers.
    - `rows_of_ranks`: since the start.
    - `rebalances`: by outcome, since the start; `rebalance_seconds` of the last one that was done.
    """

    balancedness_mean: float
    balancedness_min: float
    entropy: float
    hot_shares: dict[int, float]
    rows_of_ranks: list[int]
    is_rebalancing: bool = False
    rebalances: dict[str, int] = dataclasses.field(default_factory=dict)
    rebalance_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommTotal:
    """Of rank 0 since the start: calls of one operation in one of its groups, what left it for
    other ranks, and how long it waited (None on a GPU, where calls do not wait).
    """

    group: str
    operation: str
    calls: int
    bytes_sent: int
    seconds: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutputs:
    """`experts`, `communication`: only where they were counted anew."""

    updates: list[RequestUpdate]
    stats: EngineStats
    experts: ExpertStats | None = None
    communication: list[CommTotal] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallAnswer:
    """`body`, or why there is none: `error`; `is_client_fault`: what was asked for cannot be."""

    call_id: int
    body: dict[str, Any] | None = None
    error: str | None = None
    is_client_fault: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """What was loaded. Sent once a request would be served.

    `num_kv_blocks` of each lane; `kv_cache_bytes` on all ranks; `num_threads` of each rank.
    `num_redundant_experts` in each layer; `moves_experts`: whether they may move between ranks.
    """

    architecture: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    kv_cache_bytes: int
    num_parameters: int
    num_active_parameters: int
    dtype: str
    device: str
    num_threads: int
    load_seconds: float
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    num_redundant_experts: int = 0
    moves_experts: bool = False
    quantization: str | None = None

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def num_kv_tokens(self) -> int:
        """Of one lane."""
        return self.num_kv_blocks * self.block_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailed:
    """The engine is about to end. `is_config` tells a user's mistake from our own fault."""

    message: str
    is_config: bool = False


ExpertCall = LoadCall | PlacementCall | RebalanceCall | RecordCall
EngineCall = ExpertCall | CommunicationCall
ToEngine = AddRequest | AbortRequests | EngineCall | Shutdown
FromEngine = EngineReady | EngineOutputs | CallAnswer | EngineFailed
