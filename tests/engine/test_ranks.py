"""The same tokens, and where it is promised the same bits, however many ranks there are.

One set of processes serves all cases of this file; each case joins its ranks anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_serve.config import EngineConfig
from moe_serve.engine import Engine
from moe_serve.engine_loader import load_engine
from moe_serve.experts.files.route_files import load_of
from moe_serve.messages import AddRequest
from moe_serve.parallel.degrees import local_seat
from moe_serve.parallel.group import RankGroup
from moe_serve.parallel.world import leave
from moe_serve.route_recorder import RouteRecorder
from moe_serve.sampling_params import SamplingParams
from moe_serve.token_routes import TokenRoutes
from tests.rank_pool import RankPool

pytestmark = pytest.mark.dist

VOCAB_SIZE = 320
LENGTHS = [1, 2, 17, 33, 40, 7]
# Of each prompt, in this many steps of the engine.
MAX_TOKENS = 7


def prompts() -> list[list[int]]:
    return [[(7 * i * i + 3 * i + length) % 256 for i in range(length)] for length in LENGTHS]


def sampling(index: int, num_logprobs: int) -> SamplingParams:
    """Greedy and seeded ones in turn."""
    kind = {"temperature": 0.0} if index % 2 == 0 else {"temperature": 1.0, "seed": index}
    return SamplingParams(max_tokens=MAX_TOKENS, logprobs=num_logprobs, ignore_eos=True, **kind)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Told:
    """`bits`: a hash of every logprob of the requests' distributions, exact to the last bit."""

    token_ids: list[list[int]]
    bits: str
    load: list[list[int]]
    lanes: list[int]


def complete(engine: Engine, ids: list[list[int]], num_logprobs: int) -> Told:
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(ids))}
    digests = {name: hashlib.sha256() for name in tokens}
    lanes: dict[str, int] = {}
    for index, prompt in enumerate(ids):
        engine.add(
            AddRequest(
                request_id=str(index),
                prompt_token_ids=prompt,
                sampling=sampling(index, num_logprobs),
            )
        )
    while engine.has_work:
        for update in engine.step().updates:
            assert update.error is None, update.error
            tokens[update.request_id] += update.token_ids
            for entry in update.logprobs or []:
                numbers = [entry.logprob, *entry.top_logprobs]
                digests[update.request_id].update(struct.pack(f"{len(numbers)}d", *numbers))
                digests[update.request_id].update(bytes(str(entry.top_token_ids), "ascii"))
        for lane in engine.scheduler.lanes:
            lanes |= {request.request_id: lane.index for request in lane.running}
    engine.scheduler.check_integrity()
    bits = hashlib.sha256(b"".join(digest.digest() for digest in digests.values())).hexdigest()
    used = sorted(set(lanes.values()))
    return Told(list(tokens.values()), bits, engine.executor.read_load().counts_LE.tolist(), used)


def on_ranks(
    group: RankGroup,
    world_size: int,
    port: int,
    options: dict[str, Any],
    drive: Callable[..., Any],
    *args: Any,
) -> Any:
    """Run on each rank: rank 0 returns `drive(engine, *args)`."""
    from moe_serve import rank_worker

    # Of the pool, or of a case that failed.
    leave()
    config = EngineConfig(
        **{"num_threads": 1, "num_kv_blocks": 64, "collective_timeout": 30} | options
    )
    seat = None if world_size == 1 else local_seat(group.rank, world_size)
    init_method = f"tcp://127.0.0.1:{port}"
    if group.rank > 0:
        assert seat is not None
        code = rank_worker.run(config, seat, init_method=init_method, ends_process=False)
        assert code == 0, f"rank {group.rank} ended with {code}"
        return None
    engine = load_engine(config, seat, init_method=init_method)
    try:
        return drive(engine, *args)
    finally:
        engine.close()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


class Runs:
    """Completions of one model under any options, each made once."""

    def __init__(self, pool: RankPool, folder: str, dtype: str, num_logprobs: int) -> None:
        self.pool, self.folder, self.dtype = pool, folder, dtype
        self.num_logprobs = num_logprobs
        self._made: dict[str, Told] = {}

    def __call__(self, tensor: int = 1, data: int = 1, **options: object) -> Told:
        key = json.dumps([tensor, data, options], sort_keys=True)
        if key not in self._made:
            self._made[key] = self.drive(
                complete, prompts(), self.num_logprobs, tensor=tensor, data=data, **options
            )
        return self._made[key]

    def drive(
        self, function: Callable[..., Any], *args: Any, tensor: int, data: int, **options: object
    ) -> Any:
        whole = options | {
            "model": self.folder,
            "dtype": self.dtype,
            "tensor_parallel_size": tensor,
            "data_parallel_size": data,
            "max_logprobs": self.num_logprobs,
        }
        size = tensor * data
        return self.pool.run(on_ranks, size, free_port(), whole, function, *args, size=size)[0]

    def check(self, told: Told, *, equals_bits_of: Told | None = None) -> None:
        one = self()
        assert told.token_ids == one.token_ids
        # Every routed token is counted once, wherever it was routed.
        assert told.load == one.load
        if equals_bits_of is not None:
            assert told.bits == equals_bits_of.bits


FAMILIES = ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "builtin"]
EXPERTS = {"enable_expert_parallel": True}
STATIC = EXPERTS | {"all2all_backend": "allgather_reducescatter"}
DIRECT = EXPERTS | {"all2all_backend": "all_to_all"}
SCATTERED = DIRECT | {"expert_placement_strategy": "round_robin"}
EXACT = {"deterministic": True}


@pytest.fixture(scope="module", params=FAMILIES)
def runs(
    request: pytest.FixtureRequest, pool: RankPool, random_family: Callable[[str], Path]
) -> Runs:
    if request.param == "builtin":
        return Runs(pool, "builtin", "float32", 20)
    return Runs(pool, str(random_family(request.param)), "float32", VOCAB_SIZE)


@pytest.mark.parametrize("options", [{}, STATIC, DIRECT, SCATTERED], ids=str)
def test_lanes_change_no_bit(runs: Runs, options: dict[str, object]) -> None:
    told = runs(data=2, **options)
    runs.check(told, equals_bits_of=runs())
    assert told.lanes == [0, 1]


@pytest.mark.parametrize(("tensor", "data"), [(2, 1), (2, 2), (4, 1)])
def test_tensor_parallel_ranks_give_the_tokens_of_one(runs: Runs, tensor: int, data: int) -> None:
    """With equal attention degrees, lanes, backends and placement change no bit."""
    split = runs(tensor, data)
    runs.check(split, equals_bits_of=runs(tensor))
    static = runs(tensor, data, **STATIC)
    runs.check(static, equals_bits_of=runs(tensor, **DIRECT))


@pytest.mark.parametrize(
    ("tensor", "data", "options"),
    [(2, 1, {}), (2, 1, SCATTERED), (2, 2, DIRECT), (4, 1, {})],
    ids=str,
)
def test_deterministic_ranks_give_the_bits_of_one(
    runs: Runs, tensor: int, data: int, options: dict[str, object]
) -> None:
    runs.check(runs(tensor, data, **options, **EXACT), equals_bits_of=runs())


@pytest.mark.parametrize("family", ["qwen2_moe", "builtin"])
def test_the_same_holds_in_bf16(
    pool: RankPool, random_family: Callable[[str], Path], family: str
) -> None:
    folder = "builtin" if family == "builtin" else str(random_family(family))
    runs = Runs(pool, folder, "bfloat16", 20)
    for tensor, data, options in ((1, 2, DIRECT), (2, 1, EXACT), (4, 1, EXACT | STATIC)):
        assert runs(tensor, data, **options) == dataclasses.replace(runs(), lanes=list(range(data)))


def test_the_same_holds_for_keys_in_fp8(
    pool: RankPool, random_family: Callable[[str], Path]
) -> None:
    runs = Runs(pool, str(random_family("qwen3_moe")), "bfloat16", 20)
    one = runs(kv_cache_dtype="fp8")
    assert one.bits != runs().bits
    assert runs(2, 1, kv_cache_dtype="fp8", **EXACT, **DIRECT) == one


def test_experts_that_do_not_divide_by_ranks(
    pool: RankPool, random_family: Callable[[str], Path]
) -> None:
    """8 experts on 3 ranks."""
    runs = Runs(pool, str(random_family("qwen3_moe")), "float32", VOCAB_SIZE)
    for options in (STATIC, DIRECT, SCATTERED, EXPERTS):
        runs.check(runs(data=3, **options), equals_bits_of=runs())


def in_turn(engine: Engine, num_logprobs: int) -> list[Told]:
    """One request, then nothing for longer than a collective may take, then one for each lane."""
    first = complete(engine, prompts()[3:4], num_logprobs)
    time.sleep(3)
    return [first, complete(engine, prompts()[3:5], num_logprobs)]


@pytest.mark.parametrize("backend", [STATIC, DIRECT], ids=str)
def test_idle_lanes_join_the_others(
    pool: RankPool, random_family: Callable[[str], Path], backend: dict[str, object]
) -> None:
    runs = Runs(pool, str(random_family("qwen3_moe")), "float32", VOCAB_SIZE)
    options = backend | {"collective_timeout": 2}
    first, second = runs.drive(in_turn, VOCAB_SIZE, tensor=1, data=2, **options)
    alone = runs.drive(complete, prompts()[3:4], VOCAB_SIZE, tensor=1, data=1)
    assert (first.token_ids, first.bits, first.lanes) == (alone.token_ids, alone.bits, [0])
    assert second.lanes == [0, 1] and second.token_ids[0] == alone.token_ids[0]
    assert first.load == alone.load


@pytest.fixture(scope="module")
def one_sided_model(
    tmp_path_factory: pytest.TempPathFactory, random_family: Callable[[str], Path]
) -> Path:
    """Scores of all experts are equal, so every token takes the first two."""
    folder = tmp_path_factory.mktemp("one-sided")
    source = random_family("qwen3_moe")
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(source / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("mlp.gate.weight"):
            weights[name] = torch.zeros_like(tensor)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("options", [STATIC, DIRECT, EXPERTS], ids=str)
def test_all_tokens_to_the_experts_of_one_rank(
    pool: RankPool, one_sided_model: Path, options: dict[str, object]
) -> None:
    runs = Runs(pool, str(one_sided_model), "float32", VOCAB_SIZE)
    told = runs(data=4, **options)
    runs.check(told, equals_bits_of=runs())
    assert all(row[0] == row[1] > 0 == sum(row[2:]) for row in told.load)


def test_one_token_in_the_whole_world(pool: RankPool, one_sided_model: Path) -> None:
    runs = Runs(pool, str(one_sided_model), "float32", VOCAB_SIZE)
    alone = runs.drive(complete, [[5]], VOCAB_SIZE, tensor=1, data=1)
    for tensor, data in ((4, 1), (2, 2), (1, 4)):
        for backend in (STATIC, DIRECT):
            options = backend | EXACT
            told = runs.drive(complete, [[5]], VOCAB_SIZE, tensor=tensor, data=data, **options)
            assert (told.token_ids, told.bits, told.load) == (
                alone.token_ids,
                alone.bits,
                alone.load,
            )


@pytest.mark.parametrize("options", [{}, DIRECT], ids=str)
def test_preemption_chunks_and_prefix_hits_over_ranks(
    pool: RankPool, random_family: Callable[[str], Path], options: dict[str, object]
) -> None:
    """A small pool, short chunks, and the same prompts twice: what one rank gives in a roomy one"""
    runs = Runs(pool, str(random_family("qwen3_moe")), "float32", VOCAB_SIZE)
    small = {"block_size": 4, "num_kv_blocks": 13, "max_num_batched_tokens": 9, **options}
    first, second, stats = runs.drive(
        twice_in_a_small_pool, VOCAB_SIZE, tensor=2, data=2, **small, **EXACT
    )
    assert (first.token_ids, first.bits) == (runs().token_ids, runs().bits)
    assert (second.token_ids, second.bits) == (runs().token_ids, runs().bits)
    assert stats.num_preemptions > 0 and stats.prefix_cache_hits > 0


def twice_in_a_small_pool(engine: Engine, num_logprobs: int) -> tuple[Told, Told, Any]:
    told = complete(engine, prompts(), num_logprobs), complete(engine, prompts(), num_logprobs)
    return *told, engine.stats


def routed(engine: Engine) -> tuple[dict[str, Any], Any, bool]:
    """Routes by request, those of a recording, and whether that has just what was counted."""
    recorder = RouteRecorder()
    recorder.start()
    for index, prompt in enumerate(prompts()):
        # Some ask; the recorder hears of all.
        params = dataclasses.replace(sampling(index, 0), return_routed_experts=index % 3 > 0)
        engine.add(AddRequest(request_id=str(index), prompt_token_ids=prompt, sampling=params))
    told: dict[str, Any] = {}
    while (plan := engine.scheduler.schedule(records_routes=recorder.is_recording)) is not None:
        results = engine.executor.run(plan).results
        recorder.observe(plan, results)
        for update in engine.scheduler.update(plan, results):
            if update.routes is not None:
                told.setdefault(update.request_id, []).append(update.routes)
    recording = recorder.recording("tiny", 8)
    counted_LCE = engine.executor.read_load().counts_LCE
    phases = load_of(recording).counts_WCLE[0].swapaxes(0, 1)
    ids = {name: TokenRoutes.join(parts).ids_TLK.tolist() for name, parts in told.items()}
    # In the order of first appearance, which lanes change.
    starts = itertools.accumulate(recording.request_lengths, initial=0)
    parts = sorted(recording.ids_TLK[a:b].tolist() for a, b in itertools.pairwise(starts))
    return ids, parts, bool((phases == counted_LCE).all())


def test_routes_come_home_from_all_ranks(
    pool: RankPool, random_family: Callable[[str], Path]
) -> None:
    """Prompts in chunks that do not divide by ranks, and steps with fewer tokens than ranks."""
    runs = Runs(pool, str(random_family("qwen3_moe")), "float32", 0)
    options = {"max_num_batched_tokens": 13, **EXACT}
    alone = runs.drive(routed, tensor=1, data=1, **options)
    assert sorted(alone[0]) == ["1", "2", "4", "5"] and alone[2]
    assert runs.drive(routed, tensor=2, data=2, **options, **DIRECT) == alone
