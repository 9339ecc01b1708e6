"""What experts cost is measured by a clock of the test: it never depends on the machine."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_serve import expert_cost
from moe_serve.experts.bank import ExpertBank

READ, ROW = 2e-4, 5e-6


class Machine:
    """Its clock goes on only while experts run: each takes READ and ROW a row.

    The first passes take `slow_seconds` more each, as where kernels are compiled for them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow_seconds: float = 0.0) -> None:
        self.now = 0.0
        self.passes: list[tuple[int, int]] = []
        self._slow_seconds = slow_seconds
        clock = types.SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(expert_cost, "time", clock)

    def bank(self, number: int, num_experts: int, **sizes: Any) -> ExpertBank:
        machine = self

        class Timed(ExpertBank):
            def activate(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
                assert len(rows_RD) == counts_E.sum()
                (rows,) = set(counts_E.tolist())
                if len(machine.passes) < 2:
                    machine.now += machine._slow_seconds
                machine.passes.append((number, rows))
                machine.now += num_experts * (READ + ROW * rows)
                return super().activate(rows_RD, counts_E)

        sizes = {"hidden_size": 8, "inner_size": 4} | sizes
        return Timed(
            num_experts,
            activation="silu",
            dtype=torch.float32,
            device=torch.device("cpu"),
            **sizes,
        )


def test_both_numbers_are_found_and_the_start_is_not_slowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    cost = expert_cost.measure_cost([machine.bank(number, 7) for number in range(3)])
    assert cost is not None
    assert (cost.read_seconds, cost.row_seconds) == pytest.approx((READ, ROW))
    one_sample = 7 * (2 * READ + 33 * ROW)
    assert expert_cost.MOST_SECONDS <= machine.now < expert_cost.MOST_SECONDS + one_sample
    # Layers take turns, each with one row and with many.
    assert machine.passes[:8] == [(n % 3, rows) for n in range(4) for rows in (1, 32)]


def test_kernels_that_are_compiled_first_are_not_what_experts_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, slow_seconds=3.0)
    cost = expert_cost.measure_cost([machine.bank(0, 128)])
    assert cost is not None and len(machine.passes) == 6
    assert (cost.read_seconds, cost.row_seconds) == pytest.approx((READ, ROW))


def test_ranks_that_hold_no_expert_or_a_part_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    assert expert_cost.measure_cost([]) is None
    assert expert_cost.measure_cost([machine.bank(0, 0)] * 2) is None
    # Gate and up of another part of the inner size than the down projection.
    cost = expert_cost.measure_cost([machine.bank(0, 0), machine.bank(1, 3, down_inner_size=9)])
    assert cost is not None and cost.row_seconds == pytest.approx(ROW)
    assert {number for number, _ in machine.passes} == {1}
