"""The processor's name: without it, a number means little."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """As the system names it; the architecture where it does not."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
