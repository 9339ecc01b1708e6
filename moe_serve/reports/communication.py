"""What ranks moved between each other, as a document."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from moe_serve.messages import CommTotal
from moe_serve.parallel.comm_log import (
    CommRow,
    GroupCommunication,
    algorithm_bandwidth,
    bus_bandwidth,
)


def build(ranks: Sequence[Sequence[GroupCommunication]]) -> dict[str, Any]:
    """`ranks`: the groups of each. Times in seconds, bandwidths in bytes a second, both null on a
    GPU: see `CommRow`.
    """
    return {
        "num_ranks": len(ranks),
        "summary": _summary(ranks),
        "ranks": [
            {"rank": rank, "groups": [_group(group) for group in groups]}
            for rank, groups in enumerate(ranks)
        ],
    }


def totals(groups: Sequence[GroupCommunication]) -> list[CommTotal]:
    """One rank's, by group and operation, messages of all sizes together."""
    found = []
    for group in groups:
        for operation in sorted({row.operation for row in group.rows}):
            rows = [row for row in group.rows if row.operation == operation]
            found.append(
                CommTotal(
                    group=group.group,
                    operation=operation,
                    calls=sum(row.calls for row in rows),
                    bytes_sent=sum(row.bytes_sent for row in rows),
                    seconds=_seconds(rows),
                )
            )
    return found


def _summary(ranks: Sequence[Sequence[GroupCommunication]]) -> list[str]:
    if len(ranks) == 1:
        return ["There is one rank, which has nobody to send to."]
    if not any(ranks):
        return [f"The {len(ranks)} ranks form no groups: each serves requests of its own."]
    sentences = []
    for group in ranks[0]:
        same = [g for groups in ranks for g in groups if g.group == group.group]
        rows = [row for g in same for row in g.rows]
        calls = sum(row.calls for row in group.rows)
        text = (
            f"{group.group}: {group.size} ranks by {group.backend}, {calls:,} calls a rank, "
            f"{sum(row.bytes_sent for row in rows) / 2**20:,.1f} MiB sent by all ranks"
        )
        seconds = _seconds(rows)
        if seconds is not None and calls:
            text += f", {seconds / len(same):,.3f} s a rank on average"
        sentences.append(text + ".")
    return sentences


def _group(group: GroupCommunication) -> dict[str, Any]:
    return {
        "group": group.group,
        "backend": group.backend,
        "size": group.size,
        "operations": [
            dataclasses.asdict(row)
            | {
                "mean_seconds": None if row.seconds is None else row.seconds / row.calls,
                "algorithm_bandwidth": algorithm_bandwidth(row, group.size),
                "bus_bandwidth": bus_bandwidth(row, group.size),
            }
            for row in group.rows
        ],
    }


def _seconds(rows: Sequence[CommRow]) -> float | None:
    """None where any of them was not timed."""
    seconds = [row.seconds for row in rows if row.seconds is not None]
    return sum(seconds) if len(seconds) == len(rows) else None
