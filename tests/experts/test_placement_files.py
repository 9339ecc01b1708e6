from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_serve.errors import PlacementError, RecordingError
from moe_serve.experts.files.placement_files import (
    SUFFIXES,
    Style,
    is_placement,
    placement_maps,
    read_placement,
    write_placement,
)
from moe_serve.experts.placement import LayerPlacement, Placement
from tests.experts.recordings import data_file, make_recording, random_placement

ALL = [(style, suffix) for style, suffixes in SUFFIXES.items() for suffix in suffixes]


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    num_ranks, num_experts = draw(st.integers(1, 4)), draw(st.sampled_from([1, 7, 17]))
    num_redundant = draw(st.integers(0, num_experts * (num_ranks - 1)))
    return random_placement(
        draw(st.integers(0, 9)), draw(st.integers(1, 3)), num_experts, num_ranks, num_redundant
    )


@given(placements(), st.sampled_from(ALL))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_style_gives_the_placement_back(
    tmp_path: Path, placement: Placement, kind: tuple[Style, str]
) -> None:
    style, suffix = kind
    path = tmp_path / f"placement{suffix}"
    if style != "moe_serve" and len(set(placement.slots_of_ranks)) > 1:
        with pytest.raises(PlacementError, match=f"style {style} has the same number"):
            write_placement(placement, path, style)
        return
    write_placement(placement, path, style)
    assert is_placement(path)
    sizes = {"num_layers": placement.num_layers, "num_experts": placement.num_experts}
    assert read_placement(path, placement.num_ranks) == placement
    assert read_placement(path, placement.num_ranks, **sizes) == placement


def test_maps_of_a_placement() -> None:
    placement = Placement((LayerPlacement(((0, 1), (1, 2))), LayerPlacement(((2, 0), (1, 0)))))
    slots_LP, slots_of_LEX, replicas_LE = placement_maps(placement)
    assert slots_LP.tolist() == [[0, 1, 1, 2], [2, 0, 1, 0]]
    assert slots_of_LEX.tolist() == [[[0, -1], [1, 2], [3, -1]], [[1, 3], [2, -1], [0, -1]]]
    assert replicas_LE.tolist() == [[1, 2, 1], [2, 1, 1]]


def test_fields_are_those_of_the_other_engines(tmp_path: Path) -> None:
    placement = random_placement(0, 2, 7, 2, 1)
    slots = placement.slots_LP.tolist()
    write_placement(placement, tmp_path / "a.pt", "sglang")
    write_placement(placement, tmp_path / "b.json", "sglang")
    write_placement(placement, tmp_path / "c.npz", "eplb")
    write_placement(placement, tmp_path / "d.yaml", "tensorrt_llm")
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert found["physical_to_logical_map"].tolist() == slots and len(found) == 1
    assert json.loads((tmp_path / "b.json").read_text()) == {"physical_to_logical_map": slots}
    assert set(np.load(tmp_path / "c.npz")) == {"phy2log", "log2phy", "logcnt"}
    text = yaml.safe_load((tmp_path / "d.yaml").read_text())
    assert text == {"num_slots": 8, "initial_global_assignments": dict(enumerate(slots))}


def test_layers_of_tensorrt_llm_are_taken_in_order(tmp_path: Path) -> None:
    path = tmp_path / "placement.yaml"
    path.write_text("num_slots: 2\ninitial_global_assignments:\n  10: [1, 0]\n  9: [0, 1]\n")
    assert read_placement(path, 2).slots_LP.tolist() == [[0, 1], [1, 0]]


def test_the_published_placement_of_eplb(tmp_path: Path) -> None:
    example = json.loads(data_file("eplb_readme_example.json").read_text())
    (tmp_path / "eplb.json").write_text(json.dumps({"phy2log": example["expected_phy2log"]}))
    placement = read_placement(
        tmp_path / "eplb.json", example["num_gpus"], num_layers=2, num_experts=12
    )
    assert placement.slots_LP.tolist() == example["expected_phy2log"]
    assert placement.slots_of_ranks == (2,) * 8


MAP = {"physical_to_logical_map": [[0, 1, 1, 2], [2, 0, 1, 0]]}
OWN = {"format": "moe_serve.expert_placement", "version": 1, "num_experts": 3,
       "slots_of_ranks": [2, 2], "slots": [[0, 1, 1, 2], [2, 0, 1, 0]]}  # fmt: skip
EPLB = {"phy2log": MAP["physical_to_logical_map"], "logcnt": [[1, 2, 1], [2, 1, 1]],
        "log2phy": [[[0, -1], [2, 1], [3, -1]], [[1, 3], [2, -1], [0, -1]]]}  # fmt: skip
TENSORRT = {"num_slots": 4, "initial_global_assignments": {0: [0, 1, 1, 2], 3: [2, 0, 1, 0]}}


def refusal(tmp_path: Path, values: Any, num_ranks: int = 2, **sizes: int) -> str:
    path = tmp_path / "placement.yaml"  # JSON is YAML, too
    path.write_text(yaml.safe_dump(values))
    with pytest.raises((PlacementError, RecordingError)) as caught:
        read_placement(path, num_ranks, **sizes)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("values", [MAP, OWN, EPLB, TENSORRT])
def test_sizes_must_be_the_models(tmp_path: Path, values: dict[str, Any]) -> None:
    path = tmp_path / "placement.yaml"
    path.write_text(yaml.safe_dump(values))
    assert read_placement(path, 2, num_layers=2, num_experts=3).slots_LP.tolist() == [
        [0, 1, 1, 2],
        [2, 0, 1, 0],
    ]
    assert "of 2 layers; the model has 3" in refusal(tmp_path, values, num_layers=3)
    other = {4: "layer 0: expert 3 has no rank", 5: "4 slots do not hold 5 experts",
             2: "layer 0 has expert 2 in slot 3; of 2 experts the last is 1"}  # fmt: skip
    for num_experts, message in other.items():
        text = refusal(tmp_path, values, num_experts=num_experts)
        assert (f"is for 3 experts, not {num_experts}" if values is OWN else message) in text
    alone = "is for 2 ranks, not 1" if values is OWN else "layer 0: rank 0 holds expert 1 twice"
    assert alone in refusal(tmp_path, values, 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (OWN | {"num_experts": 10**12}, "4 slots do not hold 1000000000000 experts"),
        (OWN | {"num_experts": 4}, "layer 0: expert 3 has no rank"),
        (OWN | {"version": 2}, "version 2 of moe_serve.expert_placement is not known"),
        (OWN | {"slots_of_ranks": [2, 1]}, r"slots has shape \[2, 4\], not \[any, 3\]"),
        (OWN | {"slots_of_ranks": [5, -1]}, r"slots_of_ranks\[1\] is -1"),
        (OWN | {"slots": [[0, 1, 1, 3], [2, 0, 1, 0]]}, r"slots\[0, 3\] is 3; .* below 3"),
        (OWN | {"slots_of_ranks": [1, 1, 2]}, "is for 3 ranks, not 2"),
        (MAP | {"physical_to_logical_map": [[0, 1], [0]]}, "rows of differing lengths"),
        (MAP | {"physical_to_logical_map": [0, 1]}, r"has shape \[2\], not \[any, any\]"),
        (MAP | {"physical_to_logical_map": [[0, -1]]}, r"physical_to_logical_map\[0, 1\] is -1"),
        (MAP | {"physical_to_logical_map": [[0, 10**12]]}, "of 2 slots the last is 1"),
        (MAP | {"physical_to_logical_map": [[0, 2, 3, 0]]}, "layer 0: expert 1 has no rank"),
        (MAP | {"physical_to_logical_map": [[0, 1, 2, 3], [0, 1, 2, 2]]}, "layer 1: rank 1 holds"),
        (MAP | {"physical_to_logical_map": [[0, 1, 2, 3], [0, 1, 2, 0]]},
         "layer 1: expert 3 has no rank"),
        (MAP | {"logical_to_physical_map": [[[0], [1], [3]], [[1], [2], [0]]]},
         r"disagrees with the slots on expert 1 of layer 0: \[1\], not \[1, 2\]"),
        (EPLB | {"log2phy": [[[0], [1], [4]], [[1], [2], [0]]]}, r"log2phy\[0, 2, 0\] is 4"),
        (EPLB | {"logcnt": [[1, 2, 1], [1, 1, 1]]}, "logcnt says 1 slots for expert 0 of layer 1"),
        (TENSORRT | {"num_slots": 5}, r"initial_global_assignments: 0 has shape \[4\], not \[5\]"),
        (TENSORRT | {"initial_global_assignments": [[0, 1]]}, "must map layer numbers to lists"),
        (TENSORRT | {"initial_global_assignments": {"a": [0]}}, "must map layer numbers to lists"),
        ({"slots": [[0]]}, "no placement: it has neither"),
        (["slots"], "must hold names with values"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, values: Any, message: str) -> None:
    assert re.search(message, refusal(tmp_path, values))


def test_a_style_has_its_suffixes(tmp_path: Path) -> None:
    placement = Placement.make(1, 2, 2)
    for style, suffix in [("sglang", ".npz"), ("eplb", ".yaml"), ("tensorrt_llm", ".json")]:
        with pytest.raises(RecordingError, match=f"style {style} must end in"):
            write_placement(placement, tmp_path / f"placement{suffix}", style)  # type: ignore[arg-type]
    with pytest.raises(RecordingError, match="style 'deepep' must be one of moe_serve, sglang"):
        write_placement(placement, tmp_path / "placement.json", "deepep")  # type: ignore[arg-type]


def test_a_load_is_no_placement(tmp_path: Path) -> None:
    from moe_serve.experts.files.load_files import write_load

    for name in ("load.json", "load.npz", "load.pt"):
        write_load(make_recording([[1, 2]]), tmp_path / name)
        assert not is_placement(tmp_path / name)
        with pytest.raises(RecordingError, match="no placement|format 'moe_serve.expert_load'"):
            read_placement(tmp_path / name, 1)


def test_a_map_that_numbers_dense_layers_too_says_what_to_do(tmp_path: Path) -> None:
    """As SGLang's do: here of a model whose first layer is dense."""
    torch.save({"physical_to_logical_map": torch.arange(10).repeat(5, 1) % 8}, tmp_path / "map.pt")
    assert read_placement(tmp_path / "map.pt", 2, num_layers=5).num_layers == 5
    with pytest.raises(PlacementError, match="5 layers; the model has 4 MoE layers; rows of dense"):
        read_placement(tmp_path / "map.pt", 2, num_layers=4)
