"""The machine that the client ran on: without it, a number means little."""

from __future__ import annotations

import os
import platform
from typing import Any

from moe_serve import __version__
from moe_serve.bench.processor import processor_name


def host_facts() -> dict[str, Any]:
    """No name and no address: nothing that tells whose machine it is."""
    return {
        "moe_serve": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processor": processor_name(),
        "num_cpus": os.cpu_count(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }
