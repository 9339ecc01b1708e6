from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from moe_serve.errors import PlacementError, RecordingError
from moe_serve.experts.analysis.rank_report import count_moves
from moe_serve.experts.analysis.report import build_report
from moe_serve.experts.analysis.selection import join, of_phase
from moe_serve.experts.files.load_files import read_load, write_load
from moe_serve.experts.placement import Placement
from moe_serve.experts.recording import LoadRecording
from moe_serve.experts.step_cost import StepCost
from tests.experts.recordings import data_file, make_recording, recordings

COST = StepCost(read_seconds=0.0, row_seconds=1e-3, source="measured")


def two_ranks(**changes: Any) -> LoadRecording:
    """Rows of a step: 5 | 3 in one layer, 2 | 6 in the other; each could be 4 | 4."""
    fields: dict[str, Any] = {
        "placement": Placement.make(2, 4, 2),
        "steps_W": np.array([10]),
        "seconds_W": np.array([1.0]),
        "cost": COST,
        "expert_bytes": 100,
    }
    return make_recording([[30, 20, 10, 20], [0, 20, 40, 20]], **fields | changes)


def test_a_small_load_by_hand() -> None:
    report = build_report(two_ranks())
    assert report["tokens"] == {"prefill": 80, "decode": 0, "recomputed": 0, "total": 80}
    assert report["conservation"] == {
        "holds": True, "expected": 80, "wrong_layers": [], "is_proof": True
    }  # fmt: skip
    assert report["experts"]["dead"] == [[], [0]]
    assert report["experts"]["hottest"]["layers"] == pytest.approx([1.5, 2])
    assert report["experts"]["hot_share"]["1"] == {
        "mean": pytest.approx(0.4375), "max": 0.5, "layers": [0.375, 0.5]
    }  # fmt: skip
    hot = {"layer": 1, "expert": 2, "load": 40.0, "x_mean": 2.0, "ranks": [1]}
    assert report["hot"][0] == hot and len(report["hot"]) == 7
    ranks = report["ranks"]
    assert (ranks["source"], ranks["load"]) == ("predicted", [[50, 30], [20, 60]])
    assert ranks["balancedness"]["layers"] == pytest.approx([4 / 5, 2 / 3])
    assert (ranks["balancedness"]["worst_layer"], ranks["busiest"]["rank"]) == (1, 1)
    assert ranks["busiest"]["x_mean"] == pytest.approx(11 / 8)
    cost = report["cost"]
    assert (cost["expert_ms"], cost["step_ms"]) == (pytest.approx(11), pytest.approx(100))
    assert cost["lost_ms"] == pytest.approx(3)
    assert cost["lost_ms_of_layers"] == pytest.approx([1, 2])
    assert cost["lost_share_of_experts"] == pytest.approx(3 / 11)
    assert cost["lost_share_of_step"] == pytest.approx(0.03)
    assert report["drift"] is None


def test_rebalancing_by_hand() -> None:
    now, balanced, *more, covering = build_report(two_ranks())["rebalancing"]
    assert (now["name"], now["moves"], now["moved_bytes"]) == ("now", 0, 0)
    assert now["balancedness_mean"] == pytest.approx((4 / 5 + 2 / 3) / 2)
    assert balanced["balancedness_min"] == pytest.approx(1)
    assert balanced["expert_ms"] == pytest.approx(8)
    assert (balanced["moves"], balanced["moved_bytes"]) == (4, 400)
    assert balanced["more_bytes_of_rank"] == 0
    assert [(row["num_slots"], row["num_redundant"]) for row in more] == [(6, 2), (8, 4)]
    assert [row["more_bytes_of_rank"] for row in more] == [200, 400]
    # With every expert on both ranks there is nothing left to be uneven.
    assert more[1]["balancedness_min"] == pytest.approx(1)
    assert more[1]["moves"] == 8
    # Two ranks can only lose one if each holds every expert.
    assert covering == more[1] | {"name": "each expert on 2 ranks"}


def test_only_rows_from_under_the_placement_are_its_load() -> None:
    """Experts moved between the two windows."""
    before, after = two_ranks(), two_ranks(rows_WLR=np.array([[[50, 30], [20, 60]]]))
    before = two_ranks(rows_WLR=np.array([[[80, 0], [0, 80]]]))
    both = dataclasses.replace(join([before, after]), rows_WLR=np.stack(
        [before.rows_WLR[0], after.rows_WLR[0]]), windows_placed=1)  # fmt: skip
    ranks = build_report(both)["ranks"]
    assert (ranks["source"], ranks["load"]) == ("measured", [[50, 30], [20, 60]])
    none = build_report(dataclasses.replace(both, windows_placed=0))["ranks"]
    assert (none["source"], none["load"]) == ("predicted", [[100, 60], [40, 120]])


def test_what_is_lost_with_a_rank() -> None:
    counts_LE = [[9, 1, 1, 1], [1, 1, 1, 1]]
    # Expert 0 of the first layer has a copy; the second layer has none of 3.
    slots = np.array([[0, 1, 2, 0, 3, 1], [0, 1, 2, 3, 0, 1]])
    placement = Placement.of_slots(slots, (3, 3))
    report = build_report(make_recording(counts_LE, placement=placement))
    assert report["ranks"]["sole_experts"] == [2, 2]
    covering = report["rebalancing"][-1]
    assert (covering["num_slots"], covering["name"]) == (8, "each expert on 2 ranks")


def test_moves_are_experts_that_a_rank_lacks() -> None:
    before = Placement.of_slots(np.array([[0, 1, 2, 3]]), (2, 2))
    swapped_within = Placement.of_slots(np.array([[1, 0, 3, 2]]), (2, 2))
    swapped_across = Placement.of_slots(np.array([[0, 2, 1, 3]]), (2, 2))
    assert count_moves(before, swapped_within) == 0
    assert count_moves(before, swapped_across) == 2


# Experts 0 1 2 | 2 3 0.
REDUNDANT = Placement.make(2, 4, 2, num_redundant=2)


def test_measured_rows_go_before_predicted_ones() -> None:
    rows_WLR = np.array([[[48, 32], [21, 59]]])
    measured = two_ranks(rows_WLR=rows_WLR, placement=REDUNDANT)
    report = build_report(measured)
    assert (report["ranks"]["source"], report["ranks"]["load"]) == (
        "measured",
        rows_WLR[0].tolist(),
    )
    assert report["ranks"]["balancedness"]["layers"] == pytest.approx([40 / 48, 40 / 59])
    # On other ranks than those that were measured.
    report = build_report(measured, num_ranks=2, num_redundant=4)
    assert (report["ranks"]["source"], report["ranks"]["num_slots"]) == ("predicted", 8)
    assert report["ranks"]["placement"] == "linear, assumed"


def test_rows_that_ranks_computed_with_other_experts_are_not_shown_as_the_placements() -> None:
    """Half of the load came before the experts 1 and 2 changed places."""
    rows_WLR = np.array([[[45, 35], [30, 50]]])
    report = build_report(two_ranks(rows_WLR=rows_WLR))
    assert (report["ranks"]["source"], report["ranks"]["load"]) == (
        "predicted",
        [[50, 30], [20, 60]],
    )
    assert "Experts moved while this was recorded" in " ".join(report["notes"])
    # Rank 0 is the only one with expert 1, and does not hold expert 3.
    for wrong in ([[19, 61], [21, 59]], [[61, 19], [21, 59]]):
        report = build_report(two_ranks(rows_WLR=np.array([wrong]), placement=REDUNDANT))
        assert report["ranks"]["source"] == "predicted"
    assert "Experts moved" not in " ".join(build_report(two_ranks())["notes"])


def test_replicas_that_shared_unevenly_are_told_apart_from_what_rebalancing_supposes() -> None:
    shared = two_ranks(rows_WLR=np.array([[[60, 20], [60, 20]]]), placement=REDUNDANT)
    report = build_report(shared)
    now = report["rebalancing"][0]["balancedness_mean"]
    assert report["ranks"]["balancedness"]["mean"] == pytest.approx(2 / 3) and now > 0.9
    assert f"balancedness would be {now:.2f} now" in " ".join(report["notes"])
    assert "nothing to speak of: that replicas do not share" in report["summary"][1]
    slots_LP = np.array([[0, 1, 2, 0, 3, 1], [0, 1, 2, 0, 3, 1]])
    better = dataclasses.replace(shared, placement=Placement.of_slots(slots_LP, (3, 3)))
    assert "and replicas that share evenly would raise" in build_report(better)["summary"][1]
    even = build_report(two_ranks(placement=REDUNDANT))
    assert "share" not in even["summary"][1] + " ".join(even["notes"])


def test_rebalancing_that_costs_time_is_not_sold_as_a_gain() -> None:
    """Rows 1300 | 500 become 900 | 900, but experts read in a step 2 | 2 become 1 | 3."""
    cost = StepCost(read_seconds=1.0, row_seconds=1e-9, source="measured")
    report = build_report(
        make_recording(
            [[900, 400, 300, 200, 0, 0]], placement=Placement.of_slots(
                np.array([[0, 1, 4, 2, 3, 5]]), (3, 3)
            ), steps_W=np.array([10]), cost=cost,
        )
    )  # fmt: skip
    now, balanced = report["rebalancing"][:2]
    assert now["balancedness_mean"] < balanced["balancedness_mean"]
    assert now["expert_ms"] < balanced["expert_ms"]
    # With all rows even there would still be a rank to wait for.
    assert "; waiting for the slowest rank costs about " in report["summary"][0]
    assert report["summary"][1].endswith(
        "but save no time: the weights that ranks read count for more than their rows."
    )
    assert "judged by the very load that it is made for" in report["notes"][-1]


def test_without_placement_there_are_no_ranks_unless_they_are_assumed() -> None:
    recording = two_ranks(placement=None)
    report = build_report(recording)
    assert (report["ranks"], report["cost"], report["rebalancing"]) == (None, None, [])
    assert report["hot"][0]["ranks"] == []
    assert "A number of ranks can be assumed" in report["notes"][0]
    assert build_report(recording, num_ranks=2)["cost"] == build_report(two_ranks())["cost"]
    with pytest.raises(PlacementError, match="5 redundant experts: .* room for 4"):
        build_report(recording, num_ranks=2, num_redundant=5)


def test_without_cost_or_steps_there_are_no_times() -> None:
    for changes, reason in (
        ({"cost": None}, "what rows cost"),
        ({"steps_W": np.array([0])}, "its steps"),
    ):
        report = build_report(two_ranks(**changes))
        assert report["cost"] is None and reason in report["notes"][0]
        assert report["rebalancing"][1]["expert_ms"] is None
        assert report["ranks"]["balancedness"]["min"] == pytest.approx(2 / 3)


def test_without_times_of_steps_the_share_of_a_step_is_unknown() -> None:
    cost = build_report(two_ranks(seconds_W=np.array([0.0])))["cost"]
    assert (cost["step_ms"], cost["lost_share_of_step"]) == (None, None)
    assert cost["lost_ms"] == pytest.approx(3)


def test_one_rank_is_said_to_have_no_imbalance() -> None:
    report = build_report(two_ranks(placement=Placement.make(2, 4, 1)))
    assert report["ranks"]["balancedness"]["min"] == 1 and report["rebalancing"] == []
    assert report["cost"]["lost_ms"] == 0
    assert report["summary"][0].startswith("One rank holds all experts")
    assert report["experts"]["hottest"]["max"] == 2


def test_drift_against_a_baseline() -> None:
    before = two_ranks()
    after = make_recording([[20, 30, 10, 20], [0, 20, 40, 20]], model="other")
    drift = build_report(after, baseline=before)["drift"]
    assert drift["layers"] == pytest.approx([1 / 8, 0]) and drift["max"] == pytest.approx(1 / 8)
    assert [(move["layer"], move["expert"]) for move in drift["moves"]] == [(0, 0), (0, 1)]
    assert "another model" in build_report(after, baseline=before)["notes"][-1]
    with pytest.raises(RecordingError, match="differ in experts: 4 and 3"):
        build_report(before, baseline=make_recording([[1, 1, 1]] * 2))
    with pytest.raises(RecordingError, match="differ in MoE layers: 2 and 1"):
        build_report(before, baseline=make_recording([[1, 1, 1, 1]]))


def test_counts_that_do_not_add_up_are_said() -> None:
    report = build_report(dataclasses.replace(two_ranks(), tokens_WC=np.array([[79, 0, 0]])))
    conservation = report["conservation"]
    assert (conservation["holds"], conservation["expected"]) == (False, 79)
    assert conservation["wrong_layers"] == [0, 1]
    assert "do not add up" in report["summary"][-1]


def test_tokens_told_from_choices_are_no_proof_of_them(tmp_path: Path) -> None:
    """With a wrong top-k, half of the tokens would be "accounted for" too."""
    (tmp_path / "load.json").write_text('{"counts": {"all": [[4, 2, 1, 1]]}}')
    load = read_load(tmp_path / "load.json", top_k=2)
    write_load(load, tmp_path / "own.npz")
    for recording in (load, read_load(tmp_path / "own.npz"), join([counted(load), load])):
        report = build_report(recording)
        assert report["conservation"]["holds"] and not report["conservation"]["is_proof"]
        assert "tokens, if each chose 2; the recording does not tell." in report["summary"][-1]
    assert build_report(counted(load))["summary"][-1].startswith("Every token")


def counted(load: LoadRecording) -> LoadRecording:
    return dataclasses.replace(load, has_tokens=True)


def test_an_empty_load_has_a_report() -> None:
    empty = make_recording(np.zeros((2, 4)), placement=Placement.make(2, 4, 2))
    report = build_report(empty, baseline=empty)
    assert report["summary"] == ["No token was recorded yet."]
    assert (report["hot"], report["rebalancing"]) == ([], [])
    for shape in ((0, 0), (2, 0)):
        with pytest.raises(RecordingError, match="tiny has no MoE layers with experts"):
            build_report(make_recording(np.zeros(shape)))


@given(recordings())
@settings(deadline=None, max_examples=50)
def test_sums_of_any_report(recording: LoadRecording) -> None:
    report = build_report(recording, baseline=recording)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    choices = report["tokens"]["total"] * report["top_k"]
    assert [sum(row) for row in report["load"]] == [choices] * report["num_layers"]
    assert report["conservation"]["holds"] and report["drift"]["max"] < 1e-12
    if report["ranks"] is not None and report["ranks"]["source"] == "predicted":
        assert np.sum(report["ranks"]["load"], axis=1) == pytest.approx(choices)
    for row in report["rebalancing"]:
        assert 0 < row["balancedness_min"] <= row["balancedness_mean"] <= 1 + 1e-9
    if report["rebalancing"]:
        now, balanced = report["rebalancing"][:2]
        assert balanced["balancedness_mean"] >= now["balancedness_mean"] - 1e-9


def test_recordings_taken_together_and_single_phases() -> None:
    first, second = two_ranks(), two_ranks(rows_WLR=np.array([[[48, 32], [21, 59]]]))
    both = join([first, second])
    assert (both.counts_LE == 2 * first.counts_LE).all() and both.num_steps == 20
    assert both.rows_WLR.shape == (2, 2, 0) and both.placement == second.placement
    assert join([second, second]).rows_WLR.sum() == 2 * 160
    with pytest.raises(RecordingError, match="taken together differ in experts per token: 1 and 2"):
        join([first, two_ranks(top_k=2)])
    decode = of_phase(second, "decode")
    assert decode.tokens_WC.sum() == decode.counts_LE.sum() == decode.rows_WLR.size == 0
    assert (of_phase(second, "prefill").counts_LE == second.counts_LE).all()


def test_a_published_load_on_eight_ranks() -> None:
    load = read_load(data_file("deepseek_v2_lite_esft_counts.json"))
    report = build_report(load, num_ranks=8)
    now, balanced = report["rebalancing"][:2]
    assert now["balancedness_mean"] < 0.8 < 0.97 < balanced["balancedness_mean"]
    assert report["hot"][0]["x_mean"] == pytest.approx(report["experts"]["hottest"]["max"])
