"""Messages arrive as they were sent, and the banner and the socket say what is so."""

from __future__ import annotations

import dataclasses
import socket
import typing

import pytest

from moe_serve import listen, wire
from moe_serve.banner import banner
from moe_serve.errors import ConfigError
from moe_serve.experts.moving.migration import ExpertCopy
from moe_serve.messages import (
    AbortRequests,
    AddRequest,
    CallAnswer,
    CommTotal,
    CommunicationCall,
    EngineFailed,
    EngineOutputs,
    EngineReady,
    EngineStats,
    ExpertStats,
    LoadCall,
    PlacementCall,
    RebalanceCall,
    RecordCall,
    RequestUpdate,
    Shutdown,
    TokenLogprobs,
)
from moe_serve.parallel.comm_log import CommRow, GroupCommunication
from moe_serve.rank_messages import (
    Checksums,
    DropStaged,
    ExpertAddresses,
    FitPool,
    ForgetWarmUp,
    LaneFailure,
    LaneResult,
    LoadProgress,
    MakePool,
    PoolFits,
    RankCommunication,
    RankFailed,
    RankHello,
    RankLoad,
    RankLoaded,
    RankReady,
    ReadChecksums,
    ReadCommunication,
    ReadLoad,
    ReadStaging,
    StageExperts,
    Staging,
    SwitchExperts,
)
from moe_serve.sampling_params import SamplingParams
from moe_serve.step import ChunkResult, SampledToken
from moe_serve.step_codec import ChunkNews, NewRequest, StepMessage
from moe_serve.token_routes import TokenRoutes

READY = EngineReady(
    architecture="Qwen3MoeForCausalLM",
    vocab_size=4096,
    max_model_len=1024,
    block_size=16,
    num_kv_blocks=5461,
    kv_cache_bytes=268_419_072,
    num_parameters=9_334_784,
    num_active_parameters=3_141_632,
    dtype="bfloat16",
    device="cpu",
    num_threads=2,
    load_seconds=1.25,
)
LOGPROBS = TokenLogprobs(
    token_id=5, logprob=-0.25, rank=2, top_token_ids=[7, 5], top_logprobs=[-0.125, -0.25]
)
SAMPLING = SamplingParams(
    stop=("x", "é"), logit_bias={3: -1.5}, seed=2**63 - 1, temperature=0, max_tokens=None
)
STEP = StepMessage(
    lane=1,
    num_tokens_of_lanes=[0, 3],
    dropped_ids=["b"],
    new_requests=[
        NewRequest(
            request_id="a", prompt_token_ids=[1, 2], sampling=SAMPLING, max_tokens=0, seed=2**64 - 1
        )
    ],
    chunks=[ChunkNews("a", 0, 2, 2, [], [7]), ChunkNews("c", 9, 1, 0, [4], [])],
    records_routes=True,
)
RESULT = LaneResult(
    results=[
        ChunkResult(sampled=SampledToken(token_id=5, logprobs=LOGPROBS)),
        ChunkResult(prompt_logprobs=[LOGPROBS, LOGPROBS]),
        ChunkResult(routes=TokenRoutes(shape=(1, 2, 2), ids=bytes(range(8)))),
        ChunkResult(),
    ],
    failures=[LaneFailure(request_id="a", message="no token", is_client_fault=True)],
)
ROW = CommRow(
    operation="all_to_all", least_bytes=2**30, calls=3, message_bytes=2**32, bytes_sent=2**31,
    seconds=1.5, longest_seconds=1.25,
)  # fmt: skip
MESSAGES: list[wire.Message] = [
    AddRequest(
        request_id="a",
        prompt_token_ids=[0, 1, 2**31],
        sampling=SAMPLING,
        priority=-3,
        arrival_time=1.5,
    ),
    AbortRequests(request_ids=["a", "b"]),
    LoadCall(call_id=1),
    CommunicationCall(call_id=5),
    PlacementCall(call_id=2, verify=True),
    RebalanceCall(call_id=3, slots=[[0, 1], [1, 0]], max_moves=4),
    RecordCall(call_id=4, action="start", mode="routes", window=7, style="pt"),
    Shutdown(),
    READY,
    EngineFailed(message="why", is_config=True),
    EngineOutputs(
        updates=[
            RequestUpdate(
                request_id="a",
                token_ids=[5],
                logprobs=[LOGPROBS],
                prompt_logprobs=[None, LOGPROBS],
                routes=TokenRoutes(shape=(0, 2, 2), ids=b""),
                finish_reason="stop",
                stop_reason=5,
            )
        ],
        stats=EngineStats(num_running=1, kv_cache_usage=0.5),
        experts=ExpertStats(
            balancedness_mean=0.5,
            balancedness_min=0.25,
            entropy=0.9,
            hot_shares={1: 0.5, 8: 1.0},
            rows_of_ranks=[2**40, 3],
            rebalances={"done": 2},
        ),
        communication=[
            CommTotal(group="lane", operation="gather", calls=1, bytes_sent=0, seconds=None)
        ],
    ),
    CallAnswer(call_id=1, body={"a": [[1, 2.5], None], "b": {"c": "d"}}),
    CallAnswer(call_id=1, error="why", is_client_fault=True),
    RankHello(),
    LoadProgress(bytes_read=1, bytes_needed=2**40),
    RankLoaded(),
    FitPool(),
    PoolFits(num_blocks=3),
    MakePool(num_blocks=2),
    RankReady(expert_address="tcp://127.0.0.1:1"),
    ExpertAddresses(addresses=["tcp://127.0.0.1:1"]),
    STEP,
    dataclasses.replace(STEP, new_requests=[], dropped_ids=[], chunks=[]),
    RESULT,
    ReadLoad(),
    RankLoad(counts=b"\x01\x00"),
    ReadCommunication(),
    RankCommunication(
        groups=[GroupCommunication(group="experts", backend="gloo", size=2, rows=[ROW])]
    ),
    ForgetWarmUp(num_blocks=4),
    StageExperts(copies=[ExpertCopy(0, 1, 2, 3)], timeout=1.5),
    ReadStaging(),
    Staging(is_done=False, num_bytes=2**40, error="why"),
    SwitchExperts(layers={3: [[0, 1], [1]]}),
    DropStaged(),
    ReadChecksums(),
    Checksums(checksums=[[2**63 - 1], [0]]),
    RankFailed(message="why", is_config=False),
]


def test_every_kind_of_message_is_tried() -> None:
    assert {type(message) for message in MESSAGES} == set(typing.get_args(wire.Message))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: wire.Message) -> None:
    assert wire.decode(wire.encode(message)) == message


def test_the_banner_tells_what_was_loaded() -> None:
    text = banner("0.1.0", "stories-moe", READY, "http://127.0.0.1:8000")
    for part in ("stories-moe", "9.3 M", "3.1 M active", "cpu, bfloat16, 2 threads", "87,376",
                 "256 MiB", "1,024", "curl http://127.0.0.1:8000/v1/completions"):  # fmt: skip
        assert part in text


def test_a_socket_knows_where_it_is_reached() -> None:
    with listen.bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert listen.url(sock) == f"http://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(ConfigError, match=f"--port {port}"):
            listen.bind("127.0.0.1", port)
    with listen.bind("0.0.0.0", 0) as sock:
        assert listen.url(sock).startswith("http://localhost:")
    with pytest.raises(ConfigError, match="--host 'no.such.host.invalid'"):
        listen.bind("no.such.host.invalid", 0)
