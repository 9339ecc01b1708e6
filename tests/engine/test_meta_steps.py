"""Whole steps of real models on tensors without memory: nothing there can look at a value, which a
captured graph must not do either; and what they launch can be counted.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_serve.kernels.jit import recorded
from moe_serve.kernels.targets import TARGETS

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
# The last norm and the head.
REST = 2


@pytest.mark.parametrize(
    ("name", "launches_of_a_layer"),
    [
        ("Mixtral-8x7B", 16),
        ("Qwen3-30B-A3B", 16),
        # Norms over all heads.
        ("OLMoE-1B-7B", 18),
        # A shared expert.
        ("Qwen1.5-MoE-A2.7B", 20),
    ],
)
def test_a_step_looks_at_no_value_and_launches_few_kernels(
    name: str, launches_of_a_layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    from kernel_cases import steps

    decoder = steps.make_decoder(name)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        with recorded(TARGETS["sm_90"]) as launches:
            steps.run_decode(decoder, 8, dtype)
        assert len(launches) == launches_of_a_layer * len(decoder.layers) + REST
    with recorded(TARGETS["sm_90"]) as launches:
        steps.run_prompt(decoder, 96)
    assert len(launches) <= launches_of_a_layer * len(decoder.layers) + REST
