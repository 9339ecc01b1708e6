"""What kernels are compiled for: the facts about a GPU on which the choice of tiles depends."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One kind of GPU.

    - `name`: its compiler's name for it, or "interpreter": Triton's own, on the CPU.
    - `shared_memory`: the most bytes that one program may use.
    - `num_processors`: streaming multiprocessors, or compute units.
    - `has_descriptors`: copies of whole tiles by the memory engine (TMA).
    - `has_fp8`: e4m3 is a type of its own, and its dot product exists.
    """

    name: str
    shared_memory: int
    num_processors: int
    warp_size: int = 32
    has_descriptors: bool = False
    has_fp8: bool = False

    @property
    def is_amd(self) -> bool:
        return self.name.startswith("gfx")

    @property
    def has_wgmma(self) -> bool:
        """Products of four warps together, at least 64 rows each, in 16-bit types and fp8."""
        return self.name == "sm_90"


# Shared memory: CUDA C++ programming guide, table "technical specifications per compute
# capability"; CDNA 3 ISA guide. Processors: those of A100, H200, B200 and MI300X.
TARGETS = {
    target.name: target
    for target in (
        Target(name="sm_80", shared_memory=166_912, num_processors=108),
        Target(
            name="sm_90",
            shared_memory=232_448,
            num_processors=132,
            has_descriptors=True,
            has_fp8=True,
        ),
        Target(
            name="sm_100",
            shared_memory=232_448,
            num_processors=148,
            has_descriptors=True,
            has_fp8=True,
        ),
        # Its own e4m3 has another bias, so e4m3 is decoded in the kernel there.
        Target(name="gfx942", shared_memory=65_536, num_processors=304, warp_size=64),
    )
}
# Few processors, so that persistent kernels meet several tiles a program in small tests.
INTERPRETER = Target(
    name="interpreter", shared_memory=1 << 30, num_processors=3, has_descriptors=True, has_fp8=True
)


def nearest(capability: tuple[int, int]) -> Target:
    """The target whose tiles fit an NVIDIA GPU of that compute capability best.

    Its shared memory and number of processors are those of the data-centre GPU: replace them.
    """
    major, minor = capability
    if major == 9:
        return TARGETS["sm_90"]
    if major == 10:
        return TARGETS["sm_100"]
    has_fp8 = (major, minor) >= (8, 9)
    return dataclasses.replace(TARGETS["sm_80"], has_fp8=has_fp8)
