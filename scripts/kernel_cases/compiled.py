"""Compiles recorded launches for GPUs that are not here, and reads what became of them."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernel_cases.case import Case
from moe_serve.kernels.jit import Launch, recorded
from moe_serve.kernels.targets import TARGETS, Target

_NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Per multiprocessor (CUDA C++ programming guide, compute capability 8.0 to 10.0).
_REGISTERS, _WARPS, _RESERVED_SHARED_MEMORY = 65_536, 64, 1024
# Per SIMD unit, of which a compute unit has 4 (CDNA 3 ISA guide; AGPRs are part of the 512).
_AMD_REGISTERS, _AMD_WAVES = 512, 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """`spilled`: registers or bytes of them that went to memory; `local`: bytes of it a thread has.

    `occupancy`: the share of a processor's warps that can be resident at once.
    """

    kernel: str
    case: str
    target: str
    num_warps: int
    num_stages: int
    registers: int
    shared_memory: int
    spilled: int
    local: int
    occupancy: float
    digest: str
    faults: tuple[str, ...]


def compile_case(case: Case, target_name: str) -> list[Compiled]:
    """Each launch of the case, compiled for the target."""
    target = TARGETS[target_name]
    with recorded(target) as launches:
        case.call()
    assert launches, f"{case.name} launches nothing"
    _pretend_to_have(target)
    return [_compile(launch, case, target) for launch in launches]


class _Absent:
    """A driver that names its GPU and can do nothing with it."""

    def __init__(self, target: GPUTarget, device: int) -> None:
        self.target = target
        self.device = device

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        # Triton keeps what it compiled by device: one number for each target.
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


def _pretend_to_have(target: Target) -> None:
    kind, architecture = ("hip", target.name) if target.is_amd else ("cuda", int(target.name[3:]))
    gpu = GPUTarget(kind, architecture, target.warp_size)
    driver.set_active(_Absent(gpu, list(TARGETS).index(target.name)))


def _compile(launch: Launch, case: Case, target: Target) -> Compiled:
    binary = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)
    metadata = binary.metadata
    usage = _amd_usage(binary) if target.is_amd else _nvidia_usage(binary)
    faults = []
    if usage["spilled"]:
        faults.append(f"spills {usage['spilled']}")
    if usage["local"]:
        faults.append(f"{usage['local']} bytes of local memory")
    if metadata.shared > target.shared_memory:
        faults.append(f"{metadata.shared} bytes of shared memory, {target.shared_memory} allowed")
    if case.has_product and target.has_wgmma and _lacks_wgmma(binary):
        faults.append("a product without wgmma")
    return Compiled(
        kernel=metadata.name.strip("_"),
        case=case.name,
        target=target.name,
        num_warps=metadata.num_warps,
        num_stages=metadata.num_stages,
        registers=usage["registers"],
        shared_memory=metadata.shared,
        spilled=usage["spilled"],
        local=usage["local"],
        occupancy=_occupancy(target, usage["registers"], metadata.shared, metadata.num_warps),
        digest=metadata.hash,
        faults=tuple(faults),
    )


def _lacks_wgmma(binary: Any) -> bool:
    """Whether the kernel multiplies matrices in 16 bits or fewer, and by older instructions."""
    products = re.findall(r"\b(wgmma\.mma_async|mma\.sync\S*)", binary.asm["ptx"])
    return not any(name.startswith("wgmma") for name in products) and "tt.dot" in binary.asm["ttir"]


def _nvidia_usage(binary: Any) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        tool = [str(_NVIDIA_TOOLS / "cuobjdump"), "-res-usage", file.name]
        text = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    # ptxas spills to the stack, which is local memory.
    return {"registers": found["REG"], "spilled": found["STACK"], "local": found["LOCAL"]}


def _amd_usage(binary: Any) -> dict[str, int]:
    text = binary.asm["amdgcn"]

    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        assert found is not None, f"the assembler says no {name}"
        return int(found[1])

    # Scalars that go to lanes of vector registers never reach memory.
    return {
        "registers": field("vgpr_count"),
        "spilled": field("vgpr_spill_count"),
        "local": field("private_segment_fixed_size"),
    }


def _occupancy(target: Target, registers: int, shared_memory: int, num_warps: int) -> float:
    if target.is_amd:
        by_registers = _AMD_REGISTERS // max(1, -(-registers // 8) * 8) * 4
        by_memory = target.shared_memory // max(1, shared_memory) * num_warps
        return min(4 * _AMD_WAVES, by_registers, by_memory) / (4 * _AMD_WAVES)
    by_registers = _REGISTERS // (-(-registers // 8) * 8 * 32)
    whole = target.shared_memory + _RESERVED_SHARED_MEMORY
    by_memory = whole // (shared_memory + _RESERVED_SHARED_MEMORY) * num_warps
    resident = min(_WARPS, by_registers // num_warps * num_warps, by_memory)
    return resident / _WARPS


def unique(compiled: Iterator[Compiled]) -> Iterator[Compiled]:
    """Cases share kernels: each binary once, under the first case that has it."""
    seen = set()
    for one in compiled:
        if one.digest not in seen:
            seen.add(one.digest)
            yield one
