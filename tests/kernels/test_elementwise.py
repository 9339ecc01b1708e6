"""Activations give a number the same bits wherever it stands, and the values that torch gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moe_serve.kernels.elementwise import gelu, sigmoid, silu
from moe_serve.kernels.silu_mul import gated_activation

Activation = Callable[[Tensor], Tensor]
CASES: list[tuple[Activation, Activation]] = [
    (sigmoid, torch.sigmoid),
    (silu, F.silu),
    (lambda x: gelu(x, tanh=False), F.gelu),
    (lambda x: gelu(x, tanh=True), lambda x: F.gelu(x, approximate="tanh")),
]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_values_are_those_of_torch(case: int) -> None:
    ours, theirs = CASES[case]
    x = torch.tensor([-1e4, -90.0, -20.0, -1.5, -0.0, 0.0, 1e-8, 1.5, 20.0, 90.0, 1e4])
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-6, rtol=1e-6)
    assert ours(x.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("inner", [40, 96, 97])
def test_a_row_has_the_same_bits_in_any_batch(two_threads: None, kind: str, inner: int) -> None:
    torch.manual_seed(0)
    x = 3 * torch.randn(3000, 2 * inner)
    alone = torch.cat([gated_activation(row[None], kind) for row in x[:64]])
    for count in (1, 2, 7, 17, 33, 64, 129, 300, 1001, 2048, 3000):
        rows = gated_activation(x[:count], kind)
        assert torch.equal(rows[:64], alone[: len(rows[:64])]), count
        assert torch.equal(rows[-1:], gated_activation(x[count - 1 : count], kind)), count
