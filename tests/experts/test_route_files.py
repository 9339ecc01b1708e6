from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_serve.errors import RecordingError
from moe_serve.experts.files.route_files import is_routes, load_of, read_routes, write_routes
from moe_serve.experts.recording import PHASES, RouteRecording
from tests.experts.recordings import data_file, random_routes


def assert_same_routes(first: RouteRecording, second: RouteRecording) -> None:
    np.testing.assert_array_equal(second.ids_TLK, first.ids_TLK, strict=True)
    np.testing.assert_array_equal(second.phases_T, first.phases_T, strict=True)
    for name in ("model", "num_experts", "request_lengths"):
        assert getattr(second, name) == getattr(first, name)


routes_of_any_size = st.builds(
    random_routes,
    st.integers(0, 99),
    num_tokens=st.sampled_from([0, 1, 7, 17]),
    num_layers=st.integers(1, 3),
    num_experts=st.sampled_from([3, 17, 300]),
    top_k=st.integers(1, 3),
)


@given(routes_of_any_size)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_our_own_format_gives_the_same_routes_back(tmp_path: Path, routes: RouteRecording) -> None:
    write_routes(routes, tmp_path / "routes.npz")
    assert is_routes(tmp_path / "routes.npz")
    assert_same_routes(routes, read_routes(tmp_path / "routes.npz"))


@given(routes_of_any_size)
@settings(deadline=None)
def test_the_load_of_routes_counts_each_choice_once(routes: RouteRecording) -> None:
    load = load_of(routes)
    assert load.is_conserved
    assert load.counts_LE.tolist() == routes.counts_LE.tolist()
    for phase, tokens in enumerate(load.tokens_WC[0]):
        assert tokens == (routes.phases_T == phase).sum()


def test_the_load_of_a_phase() -> None:
    routes = RouteRecording(
        model="tiny",
        num_experts=4,
        ids_TLK=np.array([[[3, 0]], [[3, 1]], [[0, 1]]], dtype=np.int16),
        request_lengths=(3,),
        phases_T=np.array([0, 1, 1], dtype=np.int8),
    )
    assert load_of(routes).counts_WCLE.tolist() == [[[[1, 0, 0, 1]], [[1, 2, 0, 1]], [[0] * 4]]]


def test_the_published_routes_join_their_tasks() -> None:
    routes = read_routes(data_file("deepseek_v2_lite_esft_routes.npz"))
    assert (routes.num_tokens, routes.num_layers, routes.top_k) == (3628, 26, 6)
    assert routes.num_experts == 64 and len(routes.request_lengths) == 25
    assert routes.request_lengths[:2] != (0, 0) and load_of(routes).is_conserved
    with np.load(data_file("deepseek_v2_lite_esft_routes.npz")) as arrays:
        assert (routes.ids_TLK[993 : 993 + 937] == arrays["law_ids"]).all()


def save(path: Path, **changes: Any) -> Path:
    fields = {
        "format": "moe_serve.expert_routes",
        "version": 1,
        "model": "tiny",
        "num_experts": 4,
        "ids": np.array([[[3, 0]], [[3, 1]]]),
        "request_lengths": np.array([2]),
        "phases": np.array([0, 1]),
    }
    np.savez(path, **{k: v for k, v in (fields | changes).items() if v is not None})
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 3}, "version 3 of moe_serve.expert_routes is not known"),
        ({"num_experts": 3}, r"ids\[0, 0, 0\] is 3; it must be 0 or more and below 3"),
        ({"num_experts": 2**15 + 1}, "num_experts 32769 must be a whole number from 1 to 32768"),
        ({"ids": np.array([[[3, -1]], [[3, 1]]])}, r"ids\[0, 0, 1\] is -1"),
        ({"ids": np.array([[[3, 0]], [[1, 1]]])}, "token 1 chose expert 1 twice in layer 0"),
        ({"ids": np.array([[3, 0], [3, 1]])}, r"ids has shape \[2, 2\], not \[any, any, any\]"),
        ({"ids": np.array([[[3.0, 0.0]], [[3.0, 1.0]]])}, "ids must hold whole numbers"),
        ({"request_lengths": np.array([1])}, "request_lengths sum to 1, but there are 2 tokens"),
        ({"request_lengths": np.array([3, -1])}, r"request_lengths\[1\] is -1"),
        ({"phases": np.array([0])}, r"phases has shape \[1\], not \[2\]"),
        ({"phases": np.array([0, len(PHASES)])}, r"phases\[1\] is 3; it must be .* below 3"),
        ({"phases": None}, "phases is missing"),
        ({"format": None}, "neither format 'moe_serve.expert_routes' nor arrays <task>_ids"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert read_routes(save(tmp_path / "good.npz")).num_tokens == 2
    with pytest.raises(RecordingError, match=rf"routes\.npz: .*{message}"):
        read_routes(save(tmp_path / "routes.npz", **changes))


def test_tasks_must_agree_in_layers_and_choices(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "tasks.npz",
        a_ids=np.array([[[3, 0]]]), a_request_lengths=np.array([1]),
        b_ids=np.array([[[3, 0, 1]]]), b_request_lengths=np.array([1]),
    )  # fmt: skip
    with pytest.raises(RecordingError, match="b_ids has .1, 3. layers and choices, but a_ids has"):
        read_routes(tmp_path / "tasks.npz")


def test_the_number_of_experts_may_be_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", a_ids=np.array([[[3, 0]]]), a_request_lengths=np.array([1]))
    assert read_routes(tmp_path / "t.npz").num_experts == 4
    assert read_routes(tmp_path / "t.npz", num_experts=8).num_experts == 8
    with pytest.raises(RecordingError, match=r"a_ids\[0, 0, 0\] is 3; it must be .* below 3"):
        read_routes(tmp_path / "t.npz", num_experts=3)
    with pytest.raises(RecordingError, match="num_experts is 4 in the file, but 8 was given"):
        read_routes(save(tmp_path / "own.npz"), num_experts=8)
    with pytest.raises(RecordingError, match=r"must end in \.npz"):
        write_routes(random_routes(0, 3, 1, 3, 1), tmp_path / "routes.json")
