"""Where experts lie at start: by strategy, by a file, and refused where that cannot be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_serve.config import EngineConfig
from moe_serve.errors import ConfigError
from moe_serve.experts.analysis.load_statistics import balancedness, rank_loads
from moe_serve.experts.files.load_files import write_load
from moe_serve.experts.files.placement_files import Style, write_placement
from moe_serve.experts.placement import LayerPlacement, Placement
from moe_serve.initial_placement import initial_placement
from moe_serve.models.spec import (
    AttentionSpec,
    DecoderSpec,
    DenseMLPSpec,
    LayerSpec,
    MoESpec,
    RopeSpec,
)
from moe_serve.parallel.layout import RankLayout
from moe_serve.routing.router import RouterSpec
from tests.experts.recordings import make_recording

NUM_LAYERS = 3
LOAD_LE = [[90, 5, 5, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 93], [12, 12, 12, 12, 13, 13, 13, 13]]


def decoder(*num_experts: int) -> DecoderSpec:
    """A dense layer, then one with that many experts each."""
    attention = AttentionSpec(
        num_heads=8, num_kv_heads=8, head_dim=16, rope=RopeSpec(theta=1e4, rotary_dim=16)
    )
    router = RouterSpec(top_k=2, renormalize=True)
    mlps: list[DenseMLPSpec | MoESpec] = [DenseMLPSpec(inner_size=32)]
    mlps += [MoESpec(num_experts=each, inner_size=32, router=router) for each in num_experts]
    return DecoderSpec(
        architecture="TinyForCausalLM",
        vocab_size=320,
        hidden_size=64,
        max_position=256,
        norm_eps=1e-5,
        tie_embeddings=False,
        layers=tuple(LayerSpec(attention=attention, mlp=mlp) for mlp in mlps),
    )


def place(
    *,
    ranks: int = 4,
    experts: int = 8,
    eplb: dict[str, Any] | None = None,
    **options: Any,
) -> Placement:
    """The placement of `NUM_LAYERS` layers, the same on each rank."""
    if eplb is not None:
        options |= {"enable_eplb": True, "eplb_config": json.dumps(eplb)}
    config = EngineConfig(enable_expert_parallel=True, data_parallel_size=ranks, **options)
    spec = decoder(*[experts] * NUM_LAYERS)
    found = {
        initial_placement(
            config,
            spec,
            RankLayout(rank=rank, tensor_size=1, data_size=ranks, expert_parallel=True),
        )
        for rank in (0, ranks - 1)
    }
    (placement,) = found
    assert placement is not None
    return placement


def refusal(**options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        place(**options)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_without_expert_parallelism_there_is_none() -> None:
    layout = RankLayout(rank=0, tensor_size=2, data_size=1, expert_parallel=False)
    assert initial_placement(EngineConfig(), decoder(8), layout) is None


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 17])
@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
def test_a_strategy_places_the_redundant_too(ranks: int, strategy: str) -> None:
    for redundant in {0, min(1, ranks - 1), 8 * (ranks - 1)}:
        placement = place(
            ranks=ranks, expert_placement_strategy=strategy, ep_num_redundant_experts=redundant
        )
        expected = Placement.make(NUM_LAYERS, 8, ranks, strategy, redundant)
        assert placement == expected and placement.num_slots == 8 + redundant


def test_the_redundant_may_be_told_in_either_place() -> None:
    expected = place(ep_num_redundant_experts=4)
    assert place(eplb={"num_redundant_experts": 4}) == expected
    assert place(eplb={"num_redundant_experts": 4}, ep_num_redundant_experts=4) == expected


def test_more_redundant_experts_than_there_is_room_for_are_refused() -> None:
    text = refusal(ep_num_redundant_experts=25)
    assert text.startswith("25 redundant experts: 8 experts on 4 ranks leave room for 24")


def test_layers_that_differ_in_experts_are_refused() -> None:
    config = EngineConfig(enable_expert_parallel=True, data_parallel_size=2)
    layout = RankLayout(rank=0, tensor_size=1, data_size=2, expert_parallel=True)
    with pytest.raises(ConfigError, match=re.escape("differ in their experts ([4, 8])")):
        initial_placement(config, decoder(8, 4, 8), layout)


def test_experts_that_cannot_move_are_refused_with_the_fix() -> None:
    text = refusal(ranks=1, enable_eplb=True)
    assert text.startswith("--enable-eplb: all experts are on one rank")
    assert "--data-parallel-size" in text


@pytest.mark.parametrize("redundant", [8, 9, 16, 24])
def test_at_start_every_expert_outlives_a_rank_where_that_is_asked_for(redundant: int) -> None:
    placement = place(eplb={"cover_rank_loss": True, "num_redundant_experts": redundant})
    assert placement.num_slots == 8 + redundant
    for layer in placement.layers:
        assert min(layer.num_replicas) >= 2
    # Where the strategy's own will do, it stays.
    linear = Placement.make(NUM_LAYERS, 8, 4, "linear", redundant)
    if all(min(layer.num_replicas) >= 2 for layer in linear.layers):
        assert placement == linear


def test_at_start_groups_lie_on_their_nodes() -> None:
    """Redundant slots of the linear placement would hold experts of the other node."""
    goal = {"num_nodes": 2, "num_groups": 4, "num_redundant_experts": 4}
    for layer in place(eplb=goal).layers:
        nodes = [{expert for own in layer.experts[i : i + 2] for expert in own} for i in (0, 2)]
        assert not nodes[0] & nodes[1]
        assert sorted(len(node) for node in nodes) == [4, 4]
        for node in nodes:
            assert {expert ^ 1 for expert in node} == node
    plain = place(eplb={"num_nodes": 2, "num_groups": 4})
    assert plain == Placement.make(NUM_LAYERS, 8, 4)


@pytest.mark.parametrize(
    ("eplb", "message"),
    [
        ({"cover_rank_loss": True}, "cover_rank_loss: two slots for each of 8 experts are 16, and "
         "there are 8; set num_redundant_experts to 8 or more"),
        ({"cover_rank_loss": True, "num_redundant_experts": 7}, "and there are 15"),
        ({"num_nodes": 3, "num_groups": 6}, "4 ranks on 3 nodes: not a whole number"),
        ({"num_nodes": 2, "num_groups": 6}, "8 experts in 6 groups: not a whole number"),
        ({"num_nodes": 4, "num_groups": 4, "num_redundant_experts": 8, "cover_rank_loss": True},
         "node 0: 2 replicas of an expert on 1 ranks"),
        ({"num_nodes": 2, "num_groups": 2, "num_redundant_experts": 12},
         "node 0: a rank with 5 slots would hold one of 4 experts twice"),
    ],
)  # fmt: skip
def test_a_goal_that_can_never_be_met_is_refused(
    eplb: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert message in refusal(eplb=eplb) and "--eplb-config" in refusal(eplb=eplb)
    load, placement = tmp_path / "load.json", tmp_path / "placement.json"
    write_load(make_recording(LOAD_LE, top_k=2), load)
    redundant = eplb.get("num_redundant_experts", 0)
    write_placement(Placement.make(NUM_LAYERS, 8, 4, num_redundant=redundant), placement)
    for file in (load, placement):
        assert message in refusal(eplb=eplb, init_expert_location=str(file))


def test_a_strategy_that_does_not_meet_the_goal_clashes_with_it() -> None:
    goal = {"num_nodes": 2, "num_groups": 2}
    text = refusal(eplb=goal, expert_placement_strategy="round_robin")
    assert "--expert-placement-strategy round_robin does not meet the goal" in text
    both = {"cover_rank_loss": True, "num_redundant_experts": 24}
    placement = place(eplb=both, expert_placement_strategy="round_robin")
    assert placement == Placement.make(NUM_LAYERS, 8, 4, "round_robin", 24)


SHUFFLED = Placement(
    tuple(
        LayerPlacement(((i, 7, 3), ((i + 1) % 3, 4, 6), ((i + 2) % 3, 5, 7), (6, 3, 4)))
        for i in (1, 2, 1)
    )
)


@pytest.mark.parametrize(
    ("style", "name"),
    [
        ("moe_serve", "p.json"), ("moe_serve", "p.npz"), ("sglang", "p.json"), ("sglang", "p.pt"),
        ("eplb", "p.json"), ("eplb", "p.npz"), ("eplb", "p.pt"), ("tensorrt_llm", "p.yaml"),
    ],
)  # fmt: skip
def test_a_file_of_each_style_says_where_experts_lie(
    style: Style, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_placement(SHUFFLED, tmp_path / name, style)
    file = str(tmp_path / name)
    assert place(init_expert_location=file, ep_num_redundant_experts=4) == SHUFFLED
    eplb = {"num_redundant_experts": 4}
    assert place(init_expert_location=file, eplb=eplb) == SHUFFLED
    monkeypatch.setenv("HOME", str(tmp_path))
    assert place(init_expert_location=f"~/{name}", eplb=eplb) == SHUFFLED


def test_a_file_need_not_meet_the_goal_that_later_placements_keep(tmp_path: Path) -> None:
    own = ((0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2, 3, 4, 5, 6, 7))
    placement = Placement((LayerPlacement((*own, (0, 1, 2, 3, 4, 5, 6, 7))),) * NUM_LAYERS)
    write_placement(placement, tmp_path / "p.json")
    eplb = {"num_redundant_experts": 24, "cover_rank_loss": True}
    assert place(init_expert_location=str(tmp_path / "p.json"), eplb=eplb) == placement


@pytest.mark.parametrize("name", ["load.json", "load.npz", "load.pt", "sglang.pt"])
def test_a_load_is_balanced(name: str, tmp_path: Path) -> None:
    if name == "sglang.pt":
        # It does not tell how many experts a token chooses; the model does.
        torch.save({"logical_count": torch.tensor([LOAD_LE])}, tmp_path / name)
    else:
        write_load(make_recording(LOAD_LE, top_k=2), tmp_path / name)
    file = str(tmp_path / name)
    placement = place(init_expert_location=file, ep_num_redundant_experts=4)
    assert placement.num_slots == 12
    load_LE = np.array(LOAD_LE)
    linear = Placement.make(NUM_LAYERS, 8, 4, num_redundant=4)
    even_L = balancedness(rank_loads(load_LE, placement))
    assert (even_L >= balancedness(rank_loads(load_LE, linear))).all()
    assert even_L.min() > 0.9
    goal = {"num_redundant_experts": 8, "cover_rank_loss": True}
    covered = place(init_expert_location=file, eplb=goal)
    assert min(min(layer.num_replicas) for layer in covered.layers) == 2


def write(path: Path, values: Any) -> str:
    path.write_text(json.dumps(values))
    return str(path)


ROW = [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"phy2log": [ROW, ROW[:-1] + [6], ROW]}, "layer 1: rank 3 holds expert 6 twice"),
        ({"phy2log": [ROW, ROW, [0, 1, 2, 4, 3, 5, 4, 6]]}, "layer 2: expert 7 has no rank"),
        ({"phy2log": [ROW, [0, 2, 4, 6, 3, 5, 7, 2], ROW]}, "layer 1: expert 1 has no rank"),
        ({"phy2log": [ROW, ROW]}, "places the experts of 2 layers; the model has 3"),
        ({"phy2log": [[*ROW, 8]] * 3}, "layer 0 has expert 8 in slot 8"),
        ({"phy2log": [[*ROW, 0]] * 3},
         "9 slots, but 8 experts and 0 redundant ones make 8; set --ep-num-redundant-experts to 1"),
        ({"phy2log": [ROW[:4]] * 3}, "4 slots do not hold 8 experts"),
        ({"phy2log": [[0.5] * 8] * 3}, "phy2log must hold whole numbers"),
        ({"physical_to_logical_map": "here"}, "physical_to_logical_map has shape [], not"),
        ({"nothing": 1}, "no expert load"),
        ([], "must hold names with values, not list"),
        ({"counts": {"a": [[1] * 8] * 2}, "top_k": 2},
         "a load of 2 layers and 8 experts; the model has 3 and 8"),
        ({"counts": {"a": [[2] * 8] * 3}, "top_k": 1},
         "top_k is 1 in the file, but 2 was given"),
        ({"counts": {"a": [[2] * 7] * 3}, "top_k": 2},
         "a load of 3 layers and 7 experts; the model has 3 and 8"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_named_with_what_is_wrong(
    values: Any, message: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "p.json", values)
    text = refusal(init_expert_location=file)
    assert message in text and file in text


def test_a_placement_for_other_ranks_or_with_uneven_ones_is_refused(tmp_path: Path) -> None:
    file = str(tmp_path / "p.json")
    write_placement(Placement.make(NUM_LAYERS, 8, 2), file)
    assert f"{file} is for 2 ranks, not 4" in refusal(init_expert_location=file)
    uneven = Placement((LayerPlacement(((0, 1, 2, 3, 4), (5,), (6,), (7,))),) * NUM_LAYERS)
    write_placement(uneven, file)
    assert place(init_expert_location=file) == uneven
    text = refusal(init_expert_location=file, enable_eplb=True)
    assert f"{file}: [5, 1, 1, 1] slots by rank" in text


@pytest.mark.parametrize("name", ["gone.json", "gone.npz", "gone", "folder.json"])
def test_a_file_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    file = str(tmp_path / name)
    assert file in refusal(init_expert_location=file)
