"""Each rank reads and holds its slices: together they are the model, and nothing is read twice."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_serve import checkpoint, file_runs
from moe_serve.checkpoint import Checkpoint
from moe_serve.errors import CheckpointError, ConfigError
from moe_serve.experts.placement import Placement
from moe_serve.loader import load_model
from moe_serve.model_folder import read_config
from moe_serve.models.decoder import Decoder
from moe_serve.models.shard import ModelShard
from moe_serve.models.spec import AttentionSpec, DecoderSpec, MoESpec
from moe_serve.parallel.group import RankGroup
from moe_serve.parallel.layout import RankLayout
from moe_serve.ranks import Ranks

CPU = torch.device("cpu")
NUM_EXPERTS = 8
# A dense layer where the family can have one, biases where it can, a vocabulary that is uneven.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"vocab_size": 321},
    "qwen2_moe": {"vocab_size": 322, "mlp_only_layers": [0]},
    "qwen3_moe": {"vocab_size": 323, "mlp_only_layers": [1], "attention_bias": True},
    "olmoe": {"vocab_size": 320, "attention_bias": True},
}
# name: (tensor_size, data_size, expert_parallel, round_robin, deterministic)
ARRANGEMENTS = {
    "tp1": (1, 1, False, False, False),
    "tp2": (2, 1, False, False, False),
    "tp4": (4, 1, False, False, False),
    "tp4-deterministic": (4, 1, False, False, True),
    "tp2-dp2": (2, 2, False, False, False),
    "ep3": (1, 3, True, False, False),
    "ep3-round-robin": (1, 3, True, True, False),
    "tp4-ep": (4, 1, True, False, False),
    "tp2-dp2-ep-round-robin": (2, 2, True, True, False),
    "tp2-ep-deterministic": (2, 1, True, False, True),
}
Weights = dict[str, Tensor]


def shards(arrangement: str, num_experts: int = NUM_EXPERTS) -> list[ModelShard]:
    """One a rank."""
    tensor, data, expert_parallel, round_robin, deterministic = ARRANGEMENTS[arrangement]
    return [
        ModelShard(
            layout=RankLayout(
                rank=rank,
                tensor_size=tensor,
                data_size=data,
                expert_parallel=expert_parallel,
                deterministic=deterministic,
            ),
            placement=Placement.make(9, num_experts, tensor * data, "round_robin")
            if round_robin
            else None,
        )
        for rank in range(tensor * data)
    ]


def load(tiny: Any, shard: ModelShard, **options: Any) -> Decoder:
    """One rank's decoder; the others are not there, and nothing is sent to them."""
    layout = shard.layout
    return load_model(
        tiny.folder,
        read_config(tiny.folder),
        dtype=torch.float32,
        device=CPU,
        ranks=Ranks(
            shard=shard,
            lane=group_of(layout.lane_rank, layout.tensor_size),
            experts=group_of(layout.rank % layout.expert_size, layout.expert_size),
        ),
        show_progress=False,
        **options,
    )


def group_of(rank: int, size: int) -> RankGroup:
    group = RankGroup()
    group.rank, group.size = rank, size
    return group


def weights_of(tiny: Any, shard: ModelShard) -> Weights:
    return {name: weight.data for name, weight in load(tiny, shard).named_parameters()}


def store_experts(tiny: Any, layout: str) -> None:
    """Rewrite the checkpoint: one tensor for all experts of a layer, perhaps transposed."""
    if layout == "single":
        return
    pattern = re.compile(r"(.+\.experts\.)(\d+)\.(\w+)\.weight")

    def edit(tensors: Weights) -> None:
        found = [match for match in map(pattern.fullmatch, list(tensors)) if match]
        for block in {match[1] for match in found}:
            experts = sorted({int(match[2]) for match in found if match[1] == block})
            parts = [match[3] for match in found if match[1] == block and match[2] == "0"]
            gate, up, down = (p for p in ("gate_proj", "up_proj", "down_proj") if p in parts) \
                if "gate_proj" in parts else ("w1", "w3", "w2")  # fmt: skip
            stacks = {
                part: torch.stack([tensors.pop(f"{block}{e}.{part}.weight") for e in experts])
                for part in (gate, up, down)
            }
            joined = {
                "gate_up_proj": torch.cat((stacks[gate], stacks[up]), dim=1),
                "down_proj": stacks[down],
            }
            for name, stack in joined.items():
                tensors[f"{block}{name}"] = stack.mT if layout == "transposed" else stack

    tiny.edit_tensors(edit)


def joined(spec: DecoderSpec, ranks: list[ModelShard], parts: list[Weights]) -> Weights:
    """The whole model's weights, put together by hand from those of one lane after the other.

    Asserts that lanes hold the same, and copies are equal.
    """
    layout = ranks[0].layout
    lanes = [[parts[rank] for rank in layout.lane_ranks(lane)] for lane in range(layout.data_size)]
    wholes = [
        {name: join_lane(name, spec, layout, [part[name] for part in lane]) for name in lane[0]}
        for lane in lanes
    ]
    for name in wholes[0]:
        if layout.expert_parallel and ".experts." in name:
            everyone = [part[name] for part in parts]
            wholes[0][name] = join_experts(everyone, ranks[0].placement is None)
        else:
            assert all(torch.equal(whole[name], wholes[0][name]) for whole in wholes), name
    return wholes[0]


def join_lane(name: str, spec: DecoderSpec, layout: RankLayout, parts: list[Tensor]) -> Tensor:
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    layer = spec.layers[int(match[1])] if match else None
    kind = match[2] if match else name
    if kind in ("embedding.weight_VD", "head.weight_ND"):
        return torch.cat(parts)
    if kind in ("attention.qkv.weight_ND", "attention.qkv.bias_N"):
        assert layer is not None
        return join_qkv(layer.attention, parts)
    is_expert = kind.startswith("mlp.experts.")
    is_split = is_expert and not layout.expert_parallel
    if kind == "mlp.gate_up.weight_ND" or (is_split and "gate_up" in kind):
        halves = zip(*(part.chunk(2, dim=-2) for part in parts), strict=True)
        return torch.cat([torch.cat(half, dim=-2) for half in halves], dim=-2)
    if kind in ("attention.output.weight_ND", "mlp.down.weight_ND") or (
        is_split and "down" in kind
    ):
        if not layout.deterministic:
            return torch.cat(parts, dim=-1)
    if is_expert and layout.expert_parallel:
        return parts[0]
    assert all(torch.equal(part, parts[0]) for part in parts), f"{name} must be whole everywhere"
    return parts[0]


def join_qkv(spec: AttentionSpec, parts: list[Tensor]) -> Tensor:
    """Rank by rank q, k, v -> all q, all k, all v; of copies of a KV head, one."""
    num_copies = max(1, len(parts) // spec.num_kv_heads)
    kv_rows = spec.num_kv_heads * num_copies // len(parts) * spec.head_dim
    q_rows = spec.q_size // len(parts)
    split = [part.split((q_rows, kv_rows, kv_rows)) for part in parts]
    whole = [torch.cat([q for q, _, _ in split])]
    for kind in (1, 2):
        own = [part[kind] for part in split]
        for rank, part in enumerate(own):
            assert torch.equal(part, own[rank - rank % num_copies])
        whole.append(torch.cat(own[::num_copies]))
    return torch.cat(whole)


def join_experts(parts: list[Tensor], is_linear: bool) -> Tensor:
    """Neighbours: one rank after the other. Round robin: expert e is at e % ranks, e // ranks."""
    if is_linear:
        return torch.cat(parts)
    num_experts = sum(len(part) for part in parts)
    return torch.stack([parts[e % len(parts)][e // len(parts)] for e in range(num_experts)])


@pytest.mark.parametrize("layout", ["single", "stacked", "transposed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_slices_of_all_ranks_are_the_model(make_tiny: Any, family: str, layout: str) -> None:
    tiny = make_tiny(family, **FAMILIES[family])
    model = load(tiny, ModelShard())
    whole = dict(model.named_parameters())
    store_experts(tiny, layout)
    for arrangement in ARRANGEMENTS:
        ranks = shards(arrangement)
        found = joined(model.spec, ranks, [weights_of(tiny, shard) for shard in ranks])
        assert list(found) == list(whole)
        for name, weight in whole.items():
            assert torch.equal(found[name], weight), (arrangement, name)


class CountingFile:
    """safetensors' reader, through which pass the bytes that are not read straight into place."""

    def __init__(self, file: Any, num_bytes: Counter[str]) -> None:
        self._file = file
        self._num_bytes = num_bytes

    def __enter__(self) -> CountingFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def get_slice(self, name: str) -> Any:
        return CountingSlice(self._file.get_slice(name), name, self._num_bytes)


class CountingSlice:
    def __init__(self, tensor: Any, name: str, num_bytes: Counter[str]) -> None:
        self._tensor = tensor
        self._name = name
        self._num_bytes = num_bytes

    def __getitem__(self, part: Any) -> Tensor:
        found: Tensor = self._tensor[part]
        self._num_bytes[self._name] += found.numel() * found.element_size()
        return found


def name_of(file: Path, start: int, stop: int, tensors: dict[str, checkpoint.TensorInfo]) -> str:
    """The tensor that all these bytes belong to."""
    [name] = [
        name
        for name, info in tensors.items()
        if info.file.resolve() == file and info.start <= start < stop <= info.start + info.num_bytes
    ]
    return name


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Counter[str]]]:
    """bytes_read(tiny, shard) -> by tensor, what loading that rank took out of the files."""
    num_bytes: Counter[str] = Counter()
    real = checkpoint.safe_open
    monkeypatch.setattr(
        checkpoint, "safe_open", lambda *a, **k: CountingFile(real(*a, **k), num_bytes)
    )

    read = os.preadv
    runs: list[tuple[Path, int, int]] = []

    def preadv(descriptor: int, memories: list[memoryview], start: int) -> int:
        num_read = read(descriptor, memories, start)
        runs.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")), start, start + num_read))
        return num_read

    monkeypatch.setattr(file_runs.os, "preadv", preadv)

    def measure(tiny: Any, shard: ModelShard, **options: Any) -> Counter[str]:
        num_bytes.clear()
        runs.clear()
        load(tiny, shard, **options)
        tensors = Checkpoint.open(tiny.folder).tensors
        for file, start, stop in runs:
            num_bytes[name_of(file, start, stop, tensors)] += stop - start
        return Counter(num_bytes)

    yield measure


def num_readings(name: str, spec: DecoderSpec, layout: RankLayout) -> int:
    """How often all ranks together should read a tensor."""
    lanes, everyone = layout.data_size, layout.world_size
    if ".experts." in name and layout.expert_parallel:
        return 1
    is_down = re.search(r"\.(down_proj|w2|o_proj)(\.weight)?$", name)
    if "shared_expert" in name or re.search(r"norm\.weight$|\.gate\.weight$|o_proj\.bias$", name):
        return everyone
    if is_down and layout.deterministic:
        return everyone
    if re.search(r"\.[kv]_proj\.", name):
        copies = max(1, layout.tensor_size // spec.layers[0].attention.num_kv_heads)
        return lanes * copies
    return lanes


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
@pytest.mark.parametrize("layout", ["single", "stacked", "transposed"])
def test_nothing_is_read_but_what_is_held(
    make_tiny: Any, bytes_read: Any, family: str, layout: str
) -> None:
    tiny = make_tiny(family, **FAMILIES[family])
    store_experts(tiny, layout)
    spec = load(tiny, ModelShard()).spec
    tensors = Checkpoint.open(tiny.folder).tensors
    for arrangement in ARRANGEMENTS:
        ranks = shards(arrangement)
        total: Counter[str] = Counter()
        for shard in ranks:
            total.update(bytes_read(tiny, shard))
        expected = {
            name: info.num_bytes * num_readings(name, spec, ranks[0].layout)
            for name, info in tensors.items()
        }
        assert total == expected, arrangement


def test_a_rank_reads_a_share_of_the_experts(make_tiny: Any, bytes_read: Any) -> None:
    """The promise that decides whether a model fits: by expert, no rank opens the others'."""
    tiny = make_tiny("olmoe")
    read = [bytes_read(tiny, shard) for shard in shards("ep3")]
    names = [[name for name in one if ".layers.1.mlp.experts." in name] for one in read]
    experts = [{int(name.split(".experts.")[1].split(".")[0]) for name in own} for own in names]
    assert experts == [{0, 1, 2}, {3, 4, 5}, {6, 7}]


@pytest.mark.parametrize("arrangement", ["tp1", "tp4", "ep3-round-robin"])
def test_progress_counts_the_bytes_of_this_rank(
    make_tiny: Any,
    bytes_read: Any,
    arrangement: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    tiny = make_tiny("qwen3_moe")
    for shard in shards(arrangement):
        calls: list[tuple[int, int]] = []
        total = bytes_read(
            tiny, shard, on_progress=lambda *call, calls=calls: calls.append(call)
        ).total()
        assert calls[0] == (0, total) and calls[-1] == (total, total)
        assert calls == sorted(calls) and len(set(calls)) == len(calls) > 10
        assert (total < Checkpoint.open(tiny.folder).num_bytes) == (arrangement != "tp1")
    assert "Loading weights" not in capsys.readouterr().err


def test_deterministic_ranks_hold_down_and_output_whole(make_tiny: Any) -> None:
    tiny = make_tiny("qwen2_moe", **FAMILIES["qwen2_moe"])
    whole = weights_of(tiny, ModelShard())
    for shard in shards("tp4-deterministic"):
        own = weights_of(tiny, shard)
        for name in ("layers.0.attention.output.weight_ND", "layers.0.mlp.down.weight_ND",
                     "layers.1.mlp.experts.down_EDF"):  # fmt: skip
            assert torch.equal(own[name], whole[name])
        assert len(own["layers.0.mlp.gate_up.weight_ND"]) == 2 * 40 // 4
        assert own["layers.1.mlp.experts.gate_up_EGD"].shape == (8, 2 * 32 // 4, 64)


@pytest.mark.parametrize("num_experts", [1, 2])
def test_a_rank_may_have_no_expert(make_tiny: Any, num_experts: int) -> None:
    tiny = make_tiny("qwen3_moe", num_experts=num_experts, num_experts_per_tok=1)
    whole = weights_of(tiny, ModelShard())
    for strategy_arrangement in ("tp4-ep", "ep3-round-robin"):
        parts = [weights_of(tiny, shard) for shard in shards(strategy_arrangement, num_experts)]
        name = "layers.1.mlp.experts.gate_up_EGD"
        assert [len(part[name]) for part in parts] == [
            int(rank < num_experts) for rank in range(len(parts))
        ]
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])


@pytest.mark.parametrize("arrangement", ["ep3", "ep3-round-robin"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: None, "lacks 1 of the model's tensors: {name}"),
        (lambda tensor: tensor[:-1], "tensor {name} must have shape"),
        (lambda tensor: tensor.to(torch.int8), "tensor {name} has dtype I8"),
    ],
    ids=["absent", "wrong shape", "wrong dtype"],
)
def test_every_rank_refuses_a_damaged_expert_of_another(
    make_tiny: Any, arrangement: str, change: Any, message: str
) -> None:
    tiny = make_tiny("qwen3_moe")
    name = "model.layers.1.mlp.experts.5.up_proj.weight"

    def edit(tensors: Weights) -> None:
        tensor = change(tensors.pop(name))
        if tensor is not None:
            tensors[name] = tensor

    tiny.edit_tensors(edit)
    for shard in shards(arrangement):
        with pytest.raises(CheckpointError, match=message.format(name=re.escape(name))):
            load(tiny, shard)


@pytest.mark.parametrize("arrangement", ["tp1", "tp2"])
@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("tie", [True, False, ...], ids=["tied", "untied", "field missing"])
def test_tied_and_untied_heads(
    make_tiny: Any, bytes_read: Any, arrangement: str, has_head: bool, tie: Any
) -> None:
    """Tied: a stray head is not read. Untied, which a missing field means: it must be there."""
    tiny = make_tiny("qwen3_moe")
    tiny.edit_config(tie_word_embeddings=tie)
    tensors: Weights = {}
    tiny.edit_tensors(tensors.update)
    if not has_head:
        tiny.edit_tensors(lambda edited: edited.pop("lm_head.weight"))
    ranks = shards(arrangement)
    rows = 320 // len(ranks)
    for rank, shard in enumerate(ranks):
        if tie is not True and not has_head:
            with pytest.raises(CheckpointError, match=r"lm_head\.weight.*tie_word_embeddings"):
                load(tiny, shard)
            continue
        own = weights_of(tiny, shard)
        table = tensors["model.embed_tokens.weight"][rank * rows : (rank + 1) * rows]
        assert torch.equal(own["embedding.weight_VD"], table)
        assert ("head.weight_ND" in own) == (tie is not True)
        assert ("lm_head.weight" in bytes_read(tiny, shard)) == (tie is not True)
        if tie is not True:
            head = tensors["lm_head.weight"][rank * rows : (rank + 1) * rows]
            assert torch.equal(own["head.weight_ND"], head)


@pytest.mark.parametrize("arrangement", ["tp1", "tp2", "tp4"])
@pytest.mark.parametrize("head_dim", [32, None, ...], ids=["32", "null", "absent"])
def test_head_dim_decides_the_rows_of_heads(
    make_tiny: Any, arrangement: str, head_dim: Any
) -> None:
    """Hidden 64, 4 heads, 2 KV heads: an explicit 32 wins, null and absent mean 16."""
    size = head_dim if head_dim == 32 else 16
    tiny = make_tiny("qwen3_moe", head_dim=size)
    tiny.edit_config(head_dim=head_dim)
    ranks = shards(arrangement)
    tensors: Weights = {}
    tiny.edit_tensors(tensors.update)
    q, k, v = (tensors[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv")
    for rank, shard in enumerate(ranks):
        heads = range(4 * rank // len(ranks), 4 * (rank + 1) // len(ranks))
        kv_heads = sorted({head // 2 for head in heads})
        own = torch.cat(
            [q[head * size : (head + 1) * size] for head in heads]
            + [part[head * size : (head + 1) * size] for part in (k, v) for head in kv_heads]
        )
        weights = weights_of(tiny, shard)
        assert torch.equal(weights["layers.1.attention.qkv.weight_ND"], own)
        assert weights["layers.1.attention.output.weight_ND"].shape == (64, len(heads) * size)
        assert weights["layers.1.attention.q_norm.weight_D"].shape == (size,)


def test_degrees_that_do_not_fit_are_refused_before_the_weights_are_opened(make_tiny: Any) -> None:
    tiny = make_tiny("qwen3_moe", num_attention_heads=6, num_key_value_heads=3)
    (tiny.folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="3 KV heads"):
        load(tiny, shards("tp2")[1])


def test_the_checks_know_every_kind_of_mlp(make_tiny: Any) -> None:
    """The families above have both kinds, so that no rule goes untested."""
    kinds = {
        type(layer.mlp)
        for family, fields in FAMILIES.items()
        for layer in load(make_tiny(family, **fields), ModelShard()).spec.layers
    }
    assert MoESpec in kinds and len(kinds) == 2
