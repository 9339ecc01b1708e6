"""Cores are counted within what the process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moe_serve.parallel.cpu import available_cores, available_memory

MASK = len(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def _no_openmp_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_without_a_quota_it_is_the_affinity_mask(tmp_path: Path) -> None:
    assert available_cores(tmp_path) == MASK
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert available_cores(tmp_path) == MASK


@pytest.mark.parametrize(("quota", "cores"), [(50_000, 1), (100_000, 1), (10_000_000, MASK)])
def test_a_quota_lowers_the_count_to_one_at_least(tmp_path: Path, quota: int, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
    assert available_cores(tmp_path) == cores


def test_the_older_cgroup_layout_counts_too(tmp_path: Path) -> None:
    folder = tmp_path / "cpu"
    folder.mkdir()
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    (folder / "cpu.cfs_quota_us").write_text("100000\n")
    assert available_cores(tmp_path) == 1
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert available_cores(tmp_path) == MASK


def test_the_openmp_variable_lowers_the_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert available_cores(tmp_path) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    assert available_cores(tmp_path) == MASK


def test_available_memory_is_read_where_the_system_tells_it(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    assert available_memory(file) is None
    file.write_text("MemTotal:  999 kB\nMemAvailable:    1234 kB\n")
    assert available_memory(file) == 1234 * 1024
    file.write_text("nothing\n")
    assert available_memory(file) is None
