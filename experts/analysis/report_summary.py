"""A report in sentences. Pure."""

from __future__ import annotations

from typing import Any

# Differences of balancedness that are worth a word.
_TELLING = 0.005


def summary(report: dict[str, Any]) -> list[str]:
    """Of a document as in `report`; the most telling sentence first."""
    if not report["tokens"]["total"]:
        return ["No token was recorded yet."]
    parts = (_ranks, _rebalancing, _experts, _dead, _drift, _conservation)
    return [sentence for part in parts if (sentence := part(report))]


def _ranks(report: dict[str, Any]) -> str:
    ranks, cost = report["ranks"], report["cost"]
    if ranks is None:
        return ""
    if ranks["num_ranks"] == 1:
        return "One rank holds all experts: there is no imbalance over ranks."
    text = (
        f"The busiest rank of a layer gets {ranks['busiest']['x_mean']:.2f} x the mean "
        f"(balancedness {ranks['balancedness']['mean']:.2f} on average, "
        f"{ranks['balancedness']['min']:.2f} in layer {ranks['balancedness']['worst_layer']})"
    )
    if cost is None:
        return f"{text}."
    text += f"; waiting for the slowest rank costs about {_ms(cost['lost_ms'])} of "
    if cost["step_ms"] is None:
        return f"{text}{_ms(cost['expert_ms'])} of expert time a step."
    return f"{text}each {_ms(cost['step_ms'])} step."


def _rebalancing(report: dict[str, Any]) -> str:
    if len(report["rebalancing"]) < 2:
        return ""
    now, balanced = report["rebalancing"][:2]
    before, after = now["balancedness_mean"], balanced["balancedness_mean"]
    is_even = shares_evenly(report)
    if after - before < _TELLING:
        nothing = "Rebalancing with the slots there are would gain nothing to speak of"
        why = "that replicas do not share their load evenly would not change"
        return f"{nothing}." if is_even else f"{nothing}: {why}."
    condition = "" if is_even else " and replicas that share evenly"
    text = (
        f"Rebalancing with the slots there are{condition} would raise balancedness from "
        f"{before:.2f} to {after:.2f}, with {balanced['moves']:,} moves"
    )
    if now["expert_ms"] is None:
        return f"{text}."
    saved_ms = now["expert_ms"] - balanced["expert_ms"]
    if saved_ms > 0:
        return f"{text}, and save about {_ms(saved_ms)} a step."
    return f"{text}, but save no time: the weights that ranks read count for more than their rows."


def shares_evenly(report: dict[str, Any]) -> bool:
    """Whether measured rows are about as even as they would be if replicas shared theirs evenly."""
    ranks, options = report["ranks"], report["rebalancing"]
    if not options or ranks["source"] != "measured":
        return True
    difference: float = ranks["balancedness"]["mean"] - options[0]["balancedness_mean"]
    return abs(difference) < _TELLING


def _experts(report: dict[str, Any]) -> str:
    if not report["hot"]:
        return ""
    hot = report["hot"][0]
    return (
        f"The hottest expert is {hot['expert']} of layer {hot['layer']}: {hot['x_mean']:.1f} x the "
        "mean of its layer."
    )


def _dead(report: dict[str, Any]) -> str:
    dead = sum(map(len, report["experts"]["dead"]))
    of = report["num_layers"] * report["num_experts"]
    return f"{dead} of {of} experts were never chosen." if dead else ""


def _drift(report: dict[str, Any]) -> str:
    drift = report["drift"]
    if drift is None:
        return ""
    return (
        f"Since the baseline, {drift['mean']:.0%} of the load went to other experts on average, "
        f"{drift['max']:.0%} in the layer that changed most."
    )


def _conservation(report: dict[str, Any]) -> str:
    check, tokens, top_k = report["conservation"], report["tokens"]["total"], report["top_k"]
    told = f"{tokens:,} tokens x {top_k} per token = {check['expected']:,} choices"
    if check["holds"] and not check["is_proof"]:
        return (
            f"There are {check['expected']:,} choices in each layer: {tokens:,} tokens, if each "
            f"chose {top_k}; the recording does not tell."
        )
    if check["holds"]:
        return f"Every token is accounted for: {told} in each layer."
    layers = ", ".join(map(str, check["wrong_layers"]))
    return f"The counts do not add up: {told}, but not in layers {layers}."


def _ms(milliseconds: float) -> str:
    digits = 0 if milliseconds >= 100 else 1 if milliseconds >= 1 else 3
    return f"{milliseconds:.{digits}f} ms"
