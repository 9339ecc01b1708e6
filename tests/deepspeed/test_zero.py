"""Models that were trained under ZeRO, against DeepSpeed's own reader and transformers."""

from __future__ import annotations

import pytest

from tests.deepspeed.checks import assert_same_bits, greedy_of_ours, greedy_of_transformers
from tests.deepspeed.conftest import Trainings

STAGES = ["mixtral-zero1", "mixtral-zero2", "mixtral-zero3", "qwen3_moe-zero1", "qwen3_moe-zero2",
          "qwen3_moe-zero3"]  # fmt: skip
pytestmark = [pytest.mark.dist]


@pytest.mark.parametrize("run", [*STAGES, "mixtral-zero0"])
def test_every_tensor_is_deepspeeds_bit_by_bit(trainings: Trainings, run: str) -> None:
    assert_same_bits(trainings.folder(run), trainings.truth(run))


@pytest.mark.parametrize("run", STAGES)
def test_tokens_are_those_of_transformers(trainings: Trainings, run: str) -> None:
    folder = trainings.folder(run)
    expected = greedy_of_transformers(folder, trainings.truth(run))
    assert greedy_of_ours(folder) == expected
