"""From the events of many steps to a table: what each part takes, and what the probes do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from moe_serve.bench.ruler import Spread
from moe_serve.bench.step.probes import Event
from moe_serve.bench.table import Table


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartTime:
    """`us`: a step's own time in the part. `share`: of the time of all steps."""

    part: str
    calls_per_step: float
    us: Spread
    share: float


def part_times(steps: Sequence[Sequence[Event]], total_ns: float | None = None) -> list[PartTime]:
    """Of each part that occurs, in the order in which parts first end.

    `steps`: the events of each. `total_ns`: what shares refer to; None: all that is recorded, so
    that they add up to 1.
    """
    parts = list(dict.fromkeys(event.part for events in steps for event in events))
    if total_ns is None:
        total_ns = sum(event.own_ns for events in steps for event in events)
    found = []
    for part in parts:
        own = [[event.own_ns for event in events if event.part == part] for events in steps]
        found.append(
            PartTime(
                part=part,
                calls_per_step=sum(map(len, own)) / len(steps),
                us=Spread.of([sum(times) / 1e3 for times in own]),
                share=sum(map(sum, own)) / total_ns if total_ns else 0.0,
            )
        )
    return found


def in_order(times: Sequence[PartTime], order: Sequence[str]) -> list[PartTime]:
    """As `order` has the parts; what it lacks comes last."""
    place = {part: index for index, part in enumerate(order)}
    return sorted(times, key=lambda one: place.get(one.part, len(place)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Steps without and with probes, in pairs: microseconds, and the ratio of each pair.

    `num_probes` of a step, each of which takes `probe_us` where nothing disturbs it.
    """

    plain: Spread
    probed: Spread
    ratio: Spread
    num_probes: float
    probe_us: float

    @classmethod
    def of(
        cls, pairs: Sequence[tuple[float, float]], *, num_probes: float, probe_us: float
    ) -> Overhead:
        """(without, with) of each pair, in microseconds."""
        return cls(
            plain=Spread.of([pair[0] for pair in pairs]),
            probed=Spread.of([pair[1] for pair in pairs]),
            ratio=Spread.of([pair[1] / pair[0] for pair in pairs]),
            num_probes=num_probes,
            probe_us=probe_us,
        )

    def __str__(self) -> str:
        low, middle, high = sorted(100 * (share - 1) for share in self.ratio)
        return (
            f"step without probes {self.plain} us, with probes {self.probed} us: probes add "
            f"{middle:.1f} % [{low:.1f}, {high:.1f}]\n{self.num_probes:.0f} probes of "
            f"{self.probe_us:.2f} us: {self.num_probes * self.probe_us / self.plain.median:.1%} "
            "of a step"
        )


def parts_table(title: str, times: Sequence[PartTime], has_sum: bool = True) -> str:
    """`has_sum`: the parts make up the whole, which the last row gives."""
    table = Table([title, "calls", "median us", "quartiles", "share"])
    for one in times:
        quartiles = f"{one.us.low:.1f} to {one.us.high:.1f}"
        table.add(
            one.part, f"{one.calls_per_step:g}", f"{one.us.median:.1f}", quartiles,
            f"{one.share:.1%}",
        )  # fmt: skip
    if has_sum:
        total, share = sum(one.us.median for one in times), sum(one.share for one in times)
        table.add("sum", "", f"{total:.1f}", "", f"{share:.1%}")
    return str(table)


def values(times: Sequence[PartTime]) -> list[dict[str, Any]]:
    """For JSON."""
    return [dataclasses.asdict(one) | {"us": one.us._asdict()} for one in times]
