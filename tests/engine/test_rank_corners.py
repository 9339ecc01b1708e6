"""What the matrix of test_ranks.py leaves out: odd models, odd requests, and who shares a step.

Each model is as odd as its family allows, with no weight at its usual start value; what a run tells
is held against one rank that has nothing else to do.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moe_serve.engine import Engine
from moe_serve.messages import AddRequest, RequestUpdate, TokenLogprobs
from moe_serve.models import registry
from moe_serve.models.spec import DecoderSpec, LayerSpec, MoESpec
from moe_serve.parallel.group import RankGroup
from moe_serve.sampling_params import SamplingParams
from tests.conftest import FAMILIES, FIELDS
from tests.engine.test_ranks import free_port, on_ranks
from tests.rank_pool import RankPool

pytestmark = pytest.mark.dist

# Divides by no number of ranks here.
VOCAB_SIZE = 323
TOP_K = 3
# Its embedding is NaN.
POISON = 7
EXPERTS: dict[str, Any] = {"enable_expert_parallel": True}
DIRECT: dict[str, Any] = EXPERTS | {"all2all_backend": "all_to_all"}
STATIC: dict[str, Any] = EXPERTS | {
    "all2all_backend": "allgather_reducescatter",
    "expert_placement_strategy": "round_robin",
}
EXACT: dict[str, Any] = {"deterministic": True}
# Chunks of every length, preemption, and blocks that the next request finds.
CRAMPED: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 10, "max_num_batched_tokens": 19}

ODD_FIELDS: dict[str, Any] = FIELDS | {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "eos_token_id": [5, 30],
}
ODD: dict[str, dict[str, Any]] = {
    # A dense layer between two with experts; biases; a window shorter than prompts.
    "qwen2_moe": {"num_experts": 5, "moe_intermediate_size": 36, "intermediate_size": 44,
                  "shared_expert_intermediate_size": 50, "qkv_bias": True, "mlp_only_layers": [1],
                  "use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1,
                  "norm_topk_prob": False},
    "qwen3_moe": {"num_experts": 11, "moe_intermediate_size": 20, "intermediate_size": 28,
                  "head_dim": 24, "attention_bias": True, "mlp_only_layers": [0],
                  "tie_word_embeddings": True, "hidden_act": "gelu"},
    # One KV head, of which each of four ranks has a copy, and norms over all heads.
    "olmoe": {"num_experts": 3, "intermediate_size": 12, "num_key_value_heads": 1,
              "clip_qkv": 0.9, "attention_bias": True},
    # Heads wider than the hidden size; fewer than 12 columns of the router.
    "mixtral": {"num_local_experts": 8, "intermediate_size": 52, "head_dim": 16,
                "sliding_window": 9},
}  # fmt: skip


def save_odd_model(folder: Path, family: str, **changes: object) -> Path:
    torch.manual_seed(1)
    prefix, own = FAMILIES[family]
    fields = ODD_FIELDS | own | ODD[family] | changes
    config = getattr(transformers, f"{prefix}Config")(**fields)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in name:
                parameter.normal_(1.0, 0.2)
        if not config.tie_word_embeddings:
            model.model.embed_tokens.weight[POISON] = float("nan")
    model.save_pretrained(folder)
    return folder


@dataclasses.dataclass(frozen=True)
class Asked:
    prompt: list[int]
    params: SamplingParams
    priority: int = 0


def ids(length: int, *, seed: int) -> list[int]:
    """Never `POISON`."""
    return [8 + (7 * i * i + 31 * seed * (i + 1)) % (VOCAB_SIZE - 8) for i in range(length)]


def ask(prompt: list[int], priority: int = 0, **fields: Any) -> Asked:
    plain: dict[str, Any] = {"temperature": 0.0, "logprobs": 9, "seed": len(prompt)}
    return Asked(prompt, SamplingParams(**plain | {"max_tokens": 6} | fields), priority)


def requests_of_every_kind() -> list[Asked]:
    """Two begin alike; one sees NaN. Lengths of 1 and more: fewer tokens than ranks, and slices
    that end within the padding."""
    some = ids(17, seed=3)
    return [
        ask(some, frequency_penalty=1.5, presence_penalty=-0.5, repetition_penalty=1.4),
        ask(ids(1, seed=4), temperature=1.0, top_k=9, priority=2, max_tokens=14),
        ask([*some, *ids(13, seed=5)], temperature=1.3, top_p=0.8, prompt_logprobs=3),
        ask([9, 9, POISON, 9]),
        ask(ids(33, seed=6), logit_bias={5: 40.0, 30: 39.0, 12: 38.0, 11: -50.0}, min_tokens=4),
        ask(ids(5, seed=7), max_tokens=0, prompt_logprobs=0, priority=-1),
        ask(ids(2, seed=8), temperature=0.7, min_p=0.05, stop_token_ids=tuple(range(0, 300, 3))),
        ask(ids(24, seed=9), repetition_penalty=0.6, ignore_eos=True, max_tokens=14),
    ]


@dataclasses.dataclass
class Heard:
    """All that the client of one request is told; `bits`: every logprob, exact."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    bits: bytes = b""
    ending: tuple[str | None, ...] = ()

    def hear(self, update: RequestUpdate) -> None:
        self.token_ids += update.token_ids
        for entry in [*(update.logprobs or []), *(update.prompt_logprobs or [])]:
            if entry is not None:
                self.logprobs.append(entry.logprob)
                self.bits += _exact(entry)
        if update.finish_reason is not None:
            self.ending = (update.finish_reason, str(update.stop_reason), update.error)


def _exact(entry: TokenLogprobs) -> bytes:
    whole, real = [entry.token_id, entry.rank, *entry.top_token_ids], [entry.logprob]
    real += entry.top_logprobs
    return struct.pack(f"{len(whole)}q{len(real)}d", *whole, *real)


@dataclasses.dataclass
class Told:
    together: list[Heard]
    num_preemptions: int
    num_hits: int
    lanes: set[int]


def drive(engine: Engine, asked: list[Asked], num_alone: int, twice: bool) -> Told:
    """All at once, and the first of them aborted and asked again under its id. Then some alone, and
    all once more, last first: which must not differ."""
    driver = _Driver(engine)
    together = driver.answers(asked, aborts=len(asked) > 1)
    for one, heard in zip(asked[:num_alone], together, strict=False):
        assert driver.answers([one]) == [heard]
    assert not twice or driver.answers(asked[::-1]) == together[::-1]
    told = Told(
        together=together,
        num_preemptions=engine.stats.num_preemptions,
        num_hits=engine.stats.prefix_cache_hits,
        lanes=driver.lanes,
    )
    load = engine.executor.read_load().counts_LE.tolist()
    assert [sum(row) for row in load] == [driver.num_tokens * TOP_K] * len(load)
    return told


class _Driver:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_tokens = 0
        self.lanes: set[int] = set()

    def answers(self, asked: list[Asked], *, aborts: bool = False) -> list[Heard]:
        heard = {str(index): Heard() for index in range(len(asked))}
        for name in heard:
            self._add(name, asked[int(name)])
        num_steps = 0
        while self.engine.has_work:
            outputs = self.engine.step()
            self.num_tokens += outputs.stats.num_scheduled_tokens
            for update in outputs.updates:
                heard[update.request_id].hear(update)
            for lane in self.engine.scheduler.lanes:
                self.lanes |= {lane.index} if lane.running else set()
            num_steps += 1
            if aborts and num_steps == 3 and "0" in self.engine.scheduler.request_ids:
                self.engine.abort(["0"])
                heard["0"] = Heard()
                self._add("0", asked[0])
        self.engine.scheduler.check_integrity()
        return list(heard.values())

    def _add(self, name: str, one: Asked) -> None:
        self.engine.add(
            AddRequest(
                request_id=name,
                prompt_token_ids=one.prompt,
                sampling=one.params,
                priority=one.priority,
            )
        )


def drive_changed(
    group: RankGroup, size: int, port: int, options: dict[str, Any], changes: Changes, *args: Any
) -> Any:
    """`on_ranks` with what no family of today can say of its models."""
    families = dict(registry.FAMILIES)
    try:
        for name, family in families.items():
            registry.FAMILIES[name] = dataclasses.replace(family, spec=changes.after(family.spec))
        return on_ranks(group, size, port, options, drive, *args)
    finally:
        registry.FAMILIES.update(families)


@dataclasses.dataclass(frozen=True)
class Changes:
    """To a model's spec; `shared_gate` False: the shared expert counts in full."""

    decoder: dict[str, Any] = dataclasses.field(default_factory=dict)
    router: dict[str, Any] = dataclasses.field(default_factory=dict)
    shared_gate: bool = True

    def after(self, spec: Callable[[Any], DecoderSpec]) -> Callable[[Any], DecoderSpec]:
        def changed(config: Any) -> DecoderSpec:
            whole = spec(config)
            layers = tuple(map(self._layer, whole.layers))
            return dataclasses.replace(whole, layers=layers, **self.decoder)

        return changed

    def _layer(self, layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer.mlp, MoESpec):
            return layer
        router = dataclasses.replace(layer.mlp.router, **self.router)
        shared = layer.mlp.shared
        if shared is not None:
            shared = dataclasses.replace(shared, has_gate=self.shared_gate)
        mlp = dataclasses.replace(layer.mlp, router=router, shared=shared)
        return dataclasses.replace(layer, mlp=mlp)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@dataclasses.dataclass
class Runs:
    pool: RankPool
    folder: Path
    asked: list[Asked]
    dtype: str = "float32"
    changes: Changes = Changes()

    def __call__(
        self,
        tensor: int = 1,
        data: int = 1,
        *,
        num_alone: int = 0,
        twice: bool = False,
        **options: Any,
    ) -> Told:
        whole = {"model": str(self.folder), "dtype": self.dtype, "max_model_len": 40} | options
        whole |= {"tensor_parallel_size": tensor, "data_parallel_size": data}
        size = tensor * data
        args = (size, free_port(), whole, self.changes, self.asked, num_alone, twice)
        told: Told = self.pool.run(drive_changed, *args, size=size)[0]
        return told


def check_close(told: Told, one: Told) -> None:
    """Fp32 noise at most. NaN stays where it is."""
    for heard, wanted in zip(told.together, one.together, strict=True):
        assert (heard.token_ids, heard.ending) == (wanted.token_ids, wanted.ending)
        assert heard.logprobs == pytest.approx(wanted.logprobs, abs=1e-3)


@pytest.mark.parametrize("family", list(ODD))
def test_odd_models_and_requests(pool: RankPool, tmp_path: Path, family: str) -> None:
    runs = Runs(pool, save_odd_model(tmp_path, family), requests_of_every_kind())
    one = runs()
    endings = [heard.ending[0] for heard in one.together]
    assert {"stop", "length"} <= set(endings)
    assert (endings[3] == "error") == (family != "qwen3_moe")
    assert runs(4, **EXACT).together == one.together
    check_close(runs(4), one)


def test_requests_of_every_kind_in_cramped_lanes(pool: RankPool, tmp_path: Path) -> None:
    """What other ranks know of a request is what the scheduler knows: output, seed, bias, blocks"""
    runs = Runs(pool, save_odd_model(tmp_path, "qwen2_moe"), requests_of_every_kind())
    one = runs()
    lanes = runs(data=3, **DIRECT, **CRAMPED)
    assert lanes.together == one.together and lanes.lanes == {0, 1, 2}
    both = runs(2, 2, twice=True, **STATIC, **EXACT, **CRAMPED)
    assert both.together == one.together and both.lanes == {0, 1}
    assert both.num_hits > 0


@pytest.mark.parametrize(
    ("tensor", "dtype", "options"), [(2, "bfloat16", STATIC), (4, "float32", {})], ids=str
)
def test_company_changes_no_bit_where_ranks_add_their_parts(
    pool: RankPool, tmp_path: Path, tensor: int, dtype: str, options: dict[str, Any]
) -> None:
    """Sums cross ranks here, so one rank gives other bits; a roomy or cramped lane does not."""
    runs = Runs(pool, save_odd_model(tmp_path, "qwen2_moe"), requests_of_every_kind(), dtype)
    roomy = runs(tensor, num_alone=3, enable_prefix_caching=False, **options)
    cramped = runs(tensor, twice=True, **options, **CRAMPED)
    assert cramped.together == roomy.together
    assert cramped.num_preemptions > 0 and cramped.num_hits > 0


@pytest.mark.parametrize(
    "changes",
    [
        Changes(decoder={"embedding_scale": 9.8, "logit_scale": 0.3}, shared_gate=False),
        Changes(router={"score": "sigmoid", "scale": 2.5, "num_groups": 3, "top_groups": 2}),
    ],
    ids=["scales", "groups"],
)
def test_what_a_spec_can_say_and_no_family_does(
    pool: RankPool, tmp_path: Path, changes: Changes
) -> None:
    folder = save_odd_model(tmp_path, "qwen2_moe", num_experts=6)
    if not changes.shared_gate:
        weights = load_file(folder / "model.safetensors")
        weights = {name: w for name, w in weights.items() if "shared_expert_gate" not in name}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    runs = Runs(pool, folder, requests_of_every_kind(), changes=changes)
    one = runs()
    assert runs(2, **DIRECT, **EXACT).together == one.together
    check_close(runs(2, 2), one)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_prompts_and_wide_layers(pool: RankPool, tmp_path: Path, dtype: str) -> None:
    """Products of many rows and of odd columns, in one chunk and in several."""
    folder = save_odd_model(
        tmp_path, "qwen2_moe", hidden_size=320, moe_intermediate_size=108, intermediate_size=260,
        initializer_range=0.06, sliding_window=140,
    )  # fmt: skip
    asked = [ask(ids(length, seed=length), prompt_logprobs=1) for length in (210, 1, 45)]
    runs = Runs(pool, folder, asked, dtype)
    one = runs(max_model_len=256)
    assert runs(4, max_model_len=256, **EXACT).together == one.together
    exact = runs(2, max_model_len=256, max_num_batched_tokens=97, **EXACT, **STATIC)
    assert exact.together == one.together


def test_two_threads_a_rank(pool: RankPool, tmp_path: Path) -> None:
    asked = [ask(ids(33, seed=1), max_tokens=2), ask(ids(4, seed=2), max_tokens=2)]
    runs = Runs(pool, save_odd_model(tmp_path, "qwen2_moe"), asked, "bfloat16")
    one = runs(num_threads=2)
    assert runs(2, num_threads=2, **EXACT).together == one.together


@pytest.fixture(scope="module")
def shared_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By what is done to the weights of a model whose shared expert has a gate."""

    def make(change: str) -> Path:
        folder = save_odd_model(tmp_path_factory.mktemp("shared"), "qwen2_moe")
        weights = load_file(folder / "model.safetensors")
        for name, weight in weights.items():
            is_shared = ".shared_expert." in name
            if name.endswith("shared_expert_gate.weight"):
                weight.mul_({"gate half open": 0.0, "gate steeper": 8.0}.get(change, 1.0))
            if name.endswith("down_proj.weight") and (
                (change == "no shared expert" and is_shared)
                or (change == "shared expert alone" and not is_shared)
            ):
                weight.zero_()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def test_the_shared_expert_counts_once_and_through_its_gate(
    pool: RankPool, shared_models: Callable[[str], Path]
) -> None:
    asked = [ask(ids(20, seed=1), prompt_logprobs=0, max_tokens=1)]
    seen = []
    for change in ("none", "gate half open", "gate steeper", "no shared expert",
                   "shared expert alone"):  # fmt: skip
        runs = Runs(pool, shared_models(change), asked)
        one = runs()
        check_close(runs(2), one)
        check_close(runs(2, **EXPERTS), one)
        seen.append(one.together[0].logprobs)
    for index, logprobs in enumerate(seen):
        for other in seen[:index]:
            assert logprobs != pytest.approx(other, abs=1e-2)
