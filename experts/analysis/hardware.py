"""What a machine can do, and what experts and exchanges cost on it. Pure."""

from __future__ import annotations

import dataclasses

from moe_serve.experts.analysis.expert_shape import ExpertShape
from moe_serve.experts.step_cost import StepCost


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One rank's device and its link to the others.

    - `flops`: dense 16-bit products, operations a second.
    - `memory_bandwidth`: bytes a second.
    - `link_bandwidth`: bytes a second one way, to all other ranks together.
    - `message_seconds`: what an exchange takes however little it moves.
    """

    name: str
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    message_seconds: float

    def step_cost(self, shape: ExpertShape) -> StepCost:
        """An expert with rows reads its weights once, and multiplies each row with all of them."""
        return StepCost(
            read_seconds=shape.expert_bytes / self.memory_bandwidth,
            row_seconds=2 * shape.num_weights / self.flops,
            source=f"{self.name}: {self.flops:.3g} FLOP/s, {self.memory_bandwidth:.3g} B/s",
        )


# Peak figures as the makers publish them; nothing reaches them all the time, so ratios of the
# times they give mean more than the times. `flops` without sparsity; links are given there for
# both ways together, and stand here for one. `message_seconds` is in no data sheet: 20 microseconds
# are an order of magnitude for a small exchange within a node.
#   a100, h100, h200  NVIDIA A100, H100 and H200 Tensor Core GPU data sheets, SXM columns:
#                     312 / 989 / 989 TFLOPS bf16; 2,039 / 3,350 / 4,800 GB/s;
#                     NVLink 600 / 900 / 900 GB/s.
#   b200              NVIDIA DGX B200 data sheet, an eighth of it: 2.25 PFLOPS bf16, 8 TB/s,
#                     NVLink 1,800 GB/s.
#   mi300x            AMD Instinct MI300X data sheet: 1,307 TFLOPS bf16, 5.3 TB/s, 7 Infinity Fabric
#                     links of 128 GB/s, one to each other GPU of eight: on N ranks of fewer, give
#                     --link-bandwidth 64e9 x (N - 1). NVLink goes through switches and has no such
#                     limit.
#   cpu               no data sheet: round numbers for a few cores and gloo over loopback.
PRESETS = {
    hardware.name: hardware
    for hardware in (
        Hardware(name="a100-sxm", flops=312e12, memory_bandwidth=2.039e12, link_bandwidth=300e9,
                 message_seconds=20e-6),
        Hardware(name="h100-sxm", flops=989e12, memory_bandwidth=3.35e12, link_bandwidth=450e9,
                 message_seconds=20e-6),
        Hardware(name="h200", flops=989e12, memory_bandwidth=4.8e12, link_bandwidth=450e9,
                 message_seconds=20e-6),
        Hardware(name="b200", flops=2.25e15, memory_bandwidth=8e12, link_bandwidth=900e9,
                 message_seconds=20e-6),
        Hardware(name="mi300x", flops=1.307e15, memory_bandwidth=5.3e12, link_bandwidth=448e9,
                 message_seconds=20e-6),
        Hardware(name="cpu", flops=1e11, memory_bandwidth=2e10, link_bandwidth=2e9,
                 message_seconds=200e-6),
    )
}  # fmt: skip
