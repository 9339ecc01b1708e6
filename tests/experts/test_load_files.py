from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from moe_serve.errors import PlacementError, RecordingError
from moe_serve.experts.files.load_files import from_json, read_load, to_json, write_load
from moe_serve.experts.recording import LoadRecording
from moe_serve.experts.step_cost import StepCost
from tests.experts.recordings import (
    assert_same_recording,
    data_file,
    make_recording,
    random_placement,
    recordings,
)

own_files = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(recordings())
@own_files
def test_our_own_formats_give_the_same_recording_back(
    tmp_path: Path, recording: LoadRecording
) -> None:
    assert_same_recording(recording, from_json(json.loads(json.dumps(to_json(recording)))))
    for name in ("load.json", "load.npz"):
        write_load(recording, tmp_path / name)
        assert_same_recording(recording, read_load(tmp_path / name))


@given(recordings())
@own_files
def test_sglangs_dump_keeps_the_counts_of_windows(tmp_path: Path, recording: LoadRecording) -> None:
    write_load(recording, tmp_path / "load.pt")
    dump = torch.load(tmp_path / "load.pt", weights_only=True)
    assert dump["logical_count"].tolist() == recording.counts_WCLE.sum(1).tolist()
    found = read_load(tmp_path / "load.pt")
    assert found.top_k == recording.top_k and found.is_conserved
    assert found.num_steps == recording.num_steps
    assert found.seconds_W.sum() == pytest.approx(recording.seconds_W.sum())
    if recording.counts_LE.any():
        assert found.counts_LE.tolist() == recording.counts_LE.tolist()


def test_a_dump_of_steps_is_a_ring_with_layers_that_are_not_moe(tmp_path: Path) -> None:
    counts_NLE = torch.zeros((5, 3, 4), dtype=torch.int32)
    counts_NLE[1, 1:] = torch.tensor([[2, 0, 4, 0], [3, 3, 0, 0]])
    counts_NLE[4, 1:] = torch.tensor([[0, 0, 0, 2], [1, 1, 0, 0]])
    average = {"rank": 0, "average_utilization_rate_over_window": 0.5}
    torch.save({"logical_count": counts_NLE, **average}, tmp_path / "dump.pt")
    found = read_load(tmp_path / "dump.pt", top_k=2)
    assert found.counts_LE.tolist() == [[2, 0, 4, 2], [4, 4, 0, 0]]
    assert (found.num_steps, found.tokens_WC.tolist(), found.model) == (2, [[4, 0, 0]], "dump")
    torch.save({"logical_count": counts_NLE[1]}, tmp_path / "step.pt")
    assert read_load(tmp_path / "step.pt", top_k=1).counts_LE.tolist() == [
        [2, 0, 4, 0],
        [3, 3, 0, 0],
    ]
    with pytest.raises(RecordingError, match=r"dump\.pt: top_k is missing"):
        read_load(tmp_path / "dump.pt")


def test_a_large_load_stays_compact(tmp_path: Path) -> None:
    counts_LE = np.random.default_rng(0).integers(0, 99999, (64, 256))
    write_load(make_recording(counts_LE), tmp_path / "load.json")
    assert (tmp_path / "load.json").stat().st_size < 64 * 256 * 6.2


@pytest.mark.parametrize(
    ("name", "windows", "tokens"),
    [
        ("deepseek_v2_lite_esft_counts.json", 4, 33279),
        ("olmoe_1b_7b_counts.json", 6, 1249723),
        ("olmoe_1b_7b_sft_dpo_tulu_counts.json", 2, 410486),
        ("mixtral_8x7b_counts.json", 5, 1044480),
    ],
)
def test_published_counts_are_conserved(name: str, windows: int, tokens: int) -> None:
    load = read_load(data_file(name))
    assert len(load.steps_W) == windows and load.tokens_WC.sum() == tokens
    assert load.is_conserved and load.num_steps == 0


def good() -> dict[str, Any]:
    return to_json(
        make_recording(
            [[4, 0, 2], [3, 3, 0]],
            rows_WLR=np.array([[[4, 2], [3, 3]]]),
            placement=random_placement(0, 2, 3, 2, 1),
            cost=StepCost(read_seconds=1e-3, row_seconds=1e-6, source="measured"),
        )
    )


def changed(**fields: Any) -> dict[str, Any]:
    return good() | fields


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "must hold names with values, not list"),
        (changed(format="other"), "format 'other' must be 'moe_serve.expert_load'"),
        (changed(version=2), "version 2 of moe_serve.expert_load is not known here; 1 is"),
        (changed(version="1"), "version '1' must be a whole number"),
        (changed(top_k=0), "top_k 0 must be a whole number from 1 to"),
        (changed(top_k=True), "top_k True must be"),
        (changed(top_k=2**63), "top_k 9223372036854775808 must be"),
        (changed(model=None), "model must be text, not nothing"),
        (changed(num_experts=10**9), "num_experts 1000000000 must be .* from 0 to 32768"),
        (changed(num_layers=10**9), "num_layers 1000000000 must be .* from 0 to 4096"),
        (changed(num_experts=4), r"counts has shape \[1, 1, 2, 3\], not \[1, 1, 2, 4\]"),
        (changed(counts=[[[[1, -2, 7], [3, 3, 0]]]]), r"counts\[0, 0, 0, 1\] is -2; it must be 0"),
        (changed(counts=[[[[1, 5], [3, 3, 0]]]]), "counts has rows of differing lengths"),
        (changed(counts=[[[[1, 2.5, 2.5], [3, 3, 0]]]]), "counts must hold whole numbers"),
        (changed(counts=[[[[1, "2", 3], [3, 3, 0]]]]), "counts must hold whole numbers"),
        (changed(counts=[[[[1, 2**64, 3], [3, 3, 0]]]]), "counts must hold whole numbers"),
        (changed(counts=[[[[2**63] * 3] * 2]]), "it must be 0 or more and below"),
        (changed(counts={}), r"counts has shape \[\]"),
        (changed(phases=["prefil"]), "phases: 'prefil' must be one of prefill, decode"),
        (changed(phases=["prefill", "prefill"]), "phases must be a list of different names"),
        (changed(phases=[["prefill"]]), "phases: "),
        (changed(seconds=[float("nan")]), r"seconds\[0\] is nan; it must be 0 or more and finite"),
        (changed(seconds=[-1]), r"seconds\[0\] is -1"),
        (changed(tokens=[[6], [1]]), r"tokens has shape \[2, 1\], not \[1, 1\]"),
        (changed(rank_rows=[[[4], [3]]]), r"rank_rows has shape \[1, 2, 1\], not \[1, 2, 2\]"),
        (changed(cost={"read_seconds": 1}), "cost: row_seconds is missing"),
        (changed(cost=3), "cost must hold names with values, not int"),
        (changed(placement={"format": 1}), "placement: format 1 must be"),
        ({name: value for name, value in good().items() if name != "steps"}, "steps is missing"),
    ],
)
def test_what_is_wrong_is_named(values: Any, message: str) -> None:
    from_json(good())
    with pytest.raises(RecordingError, match=f"^that file: .*{message}|^that file {message}"):
        from_json(values, "that file")


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([[0, 1, 2, 1], [1, 1, 0, 2]], "layer 1: rank 0 holds expert 1 twice"),
        ([[0, 1, 0, 1], [0, 1, 2, 1]], "layer 0: expert 2 has no rank"),
        ([[0, 1, 2, 1]], "places the experts of 1 layers; the model has 2"),
    ],
)
def test_a_placement_inside_must_fit(slots: list[list[int]], message: str) -> None:
    values = good()
    values["placement"] |= {"slots": [[0, 1, 2, 1]] * 2, "slots_of_ranks": [2, 2]}
    from_json(values)
    values["placement"]["slots"] = slots
    with pytest.raises(PlacementError, match=f"^that file: placement:? {message}"):
        from_json(values, "that file")


def other_formats() -> dict[str, Any]:
    return {
        "nothing.json": b"",
        "text.json": b"hello",
        "deep.json": b"[" * 100_000,
        "latin.json": '{"model": "ä"}'.encode("latin-1"),
        "list.json": b"[]",
        "other.json": b'{"weights": []}',
        "records.json": b'{"records": []}',
        "text.npz": b"hello",
        "text.pt": b"hello",
        "name.txt": b"{}",
        "odd.json": b'{"counts": {"a": [[1, 2]]}, "top_k": 2}',
        "ragged.json": b'{"counts": {"a": [[1, 1]], "b": [[1, 1], [2, 2]]}, "top_k": 2}',
        "empty.json": b'{"counts": {}, "top_k": 2}',
        "no_top_k.json": b'{"counts": {"a": [[1, 1]]}}',
    }


@pytest.mark.parametrize("name", other_formats())
def test_a_file_that_is_no_load_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(other_formats()[name])
    with pytest.raises(RecordingError, match=name.replace(".", r"\.")):
        read_load(tmp_path / name)


@pytest.mark.parametrize("suffix", [".json", ".npz", ".pt"])
@pytest.mark.parametrize("cut", [1, 30, 200])
def test_a_file_cut_short_is_refused(tmp_path: Path, suffix: str, cut: int) -> None:
    path = tmp_path / f"load{suffix}"
    write_load(from_json(good()), path)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(RecordingError, match="is no readable"):
        read_load(path)


class Touch:
    """Unpickling it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_a_file_runs_no_code(tmp_path: Path) -> None:
    torch.save({"logical_count": Touch(tmp_path / "ran")}, tmp_path / "load.pt")
    np.savez(tmp_path / "load.npz", counts=np.array([Touch(tmp_path / "ran")], dtype=object))
    for name in ("load.pt", "load.npz"):
        with pytest.raises(RecordingError, match="is no readable"):
            read_load(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_a_missing_file_and_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"gone\.json cannot be read: No such file"):
        read_load(tmp_path / "gone.json")
    with pytest.raises(RecordingError, match=r"gone/load\.json cannot be written: No such file"):
        write_load(from_json(good()), tmp_path / "gone" / "load.json")
    with pytest.raises(RecordingError, match=r"must end in one of \.json"):
        write_load(from_json(good()), tmp_path / "load.csv")


def test_an_archive_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_load(from_json(good()), tmp_path / "load.npz")
    monkeypatch.setattr("moe_serve.experts.files.documents.MAX_BYTES", 1000)
    with pytest.raises(RecordingError, match=r"load\.npz unpacks to \d+ bytes; at most 1000"):
        read_load(tmp_path / "load.npz")


def test_a_small_file_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    huge = torch.zeros(1, dtype=torch.int32).expand(2**20, 2**10, 2**10)
    torch.save({"logical_count": huge}, tmp_path / "load.pt")
    with pytest.raises(RecordingError, match=rf"load\.pt unpacks to {2**42} bytes"):
        read_load(tmp_path / "load.pt", top_k=1)
    # Ten times the list above it, ten times over.
    lines = ["a0: &a0 [1]"] + [
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 11)
    ]
    (tmp_path / "load.yaml").write_text("\n".join([*lines, "counts: {all: *a10}", "top_k: 1"]))
    with pytest.raises(RecordingError, match=r"load\.yaml unpacks to \d{12} bytes"):
        read_load(tmp_path / "load.yaml")


def test_a_given_top_k_must_be_the_files(tmp_path: Path) -> None:
    write_load(from_json(good()), tmp_path / "load.npz")
    assert read_load(tmp_path / "load.npz", top_k=1).top_k == 1
    with pytest.raises(RecordingError, match="top_k is 1 in the file, but 2 was given"):
        read_load(tmp_path / "load.npz", top_k=2)
