"""The report finds what it is there to find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPILE = """
import json
from kernel_cases.case import Case
from kernel_cases.compiled import compile_case
from oversized import product

def faults(size, target, num_warps=4):
    case = Case("a product", lambda: product(size, num_warps), has_product=True)
    [compiled] = compile_case(case, target)
    assert compiled.registers > 0 and 0 <= compiled.occupancy <= 1
    return compiled.faults

print(json.dumps({
    "fits": [faults(64, target) for target in ("sm_80", "sm_90", "sm_100", "gfx942")],
    "spills": faults(128, "sm_80", num_warps=1),
    "needs memory": faults(256, "gfx942", num_warps=16),
    "lacks wgmma": faults(32, "sm_90"),
}))
"""


def test_faults_of_kernels_are_found() -> None:
    # Kernels are compiled, not interpreted: in a process of their own.
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT / 'scripts'}:{Path(__file__).parent}"
    command = [sys.executable, "-c", COMPILE]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["fits"] == [[], [], [], []]
    assert any(fault.startswith("spills") for fault in found["spills"])
    assert any("shared memory, 65536 allowed" in fault for fault in found["needs memory"])
    assert found["lacks wgmma"] == ["a product without wgmma"]
