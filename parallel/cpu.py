"""What this process may use of the machine: cores and memory."""

from __future__ import annotations

import os
import re
from pathlib import Path


def available_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The least of the affinity mask, the cgroup's quota (v2, or v1) and OMP_NUM_THREADS; >= 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limits = [cores or 1]
    quota = _quota(cgroup)
    if quota is not None:
        limits.append(int(quota))
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit():
        limits.append(int(wanted))
    return max(1, min(limits))


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that can still be taken without swapping, None where the system does not tell."""
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


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
