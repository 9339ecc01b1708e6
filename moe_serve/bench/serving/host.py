"""The machine that the client ran on: without it, a number means little."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from moe_serve import __version__


def host_facts() -> dict[str, Any]:
    """No name and no address: nothing that tells whose machine it is."""
    return {
        "moe_serve": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processor": _processor(),
        "num_cpus": os.cpu_count(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
