"""How many cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path


def available_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The least of the affinity mask and the cgroup's quota (v2, or v1), at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _quota(cgroup)
    return max(1, min(cores or 1, int(quota) if quota is not None else cores or 1))


def _quota(cgroup: Path) -> float | None:
    """CPU time per wall time that the cgroup allows, None where it sets no limit."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not limit.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return int(limit) / int(period)
