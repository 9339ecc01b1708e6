"""A whole MoE layer, once by the kernels and once by their twins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moe_serve.experts.load import ExpertLoad
from moe_serve.kernels.jit import triton_everywhere
from moe_serve.layers.moe import MoE, Router
from moe_serve.models.spec import MoESpec, SharedExpertSpec
from moe_serve.ranks import SINGLE_RANK
from moe_serve.routing.router import RouterSpec

NUM_EXPERTS, HIDDEN, INNER = 8, 64, 32


@pytest.fixture(params=["kernels", "twins"])
def place(request: pytest.FixtureRequest, device: torch.device) -> Iterator[torch.device]:
    """The device on which ops are the one or the other."""
    if request.param == "twins":
        yield torch.device("cpu")
    elif device.type == "cuda":
        yield device
    else:
        with triton_everywhere():
            yield device


def make_layer(device: torch.device, *, scale: float = 1.0, has_shared: bool = False) -> MoE:
    """Equal weights for equal names, whatever else the layer has."""
    shared = SharedExpertSpec(inner_size=24, has_gate=False) if has_shared else None
    router = RouterSpec(top_k=2, score="sigmoid", scale=scale)
    spec = MoESpec(num_experts=NUM_EXPERTS, inner_size=INNER, router=router, shared=shared)
    layer = MoE(spec, HIDDEN, 0, SINGLE_RANK, dtype=torch.float32, device=device)
    for index, weight in enumerate(layer.parameters()):
        rng = torch.Generator().manual_seed(index)
        weight.copy_(torch.randn(weight.shape, generator=rng) * 0.2)
    return layer


def run(layer: MoE, x_TD: Tensor, load: ExpertLoad | None = None) -> Tensor:
    out_TD: Tensor = layer(x_TD, SINGLE_RANK.step([len(x_TD)]), load)
    return out_TD


def routed_by_token(layer: MoE, x_TD: Tensor) -> Tensor:
    """Each token's experts one by one in fp64, weighed by their scores over the sum of these."""
    rows = []
    for x in x_TD.double():
        scores = (layer.router.weight_ED.double() @ x).sigmoid()
        best = scores.sort(descending=True, stable=True).indices[:2]
        total = torch.zeros_like(x)
        for score, expert in zip(scores[best] / scores[best].sum(), best, strict=True):
            gate, up = (layer.experts.gate_up_EGD[expert].double() @ x).chunk(2)
            down = layer.experts.down_EDF[expert].double()
            total += score * (down @ (torch.nn.functional.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("num_rows", [1, 8, 9, 33])
def test_experts_are_told_apart_that_bf16_would_round_together(
    place: torch.device, num_rows: int
) -> None:
    router = Router(RouterSpec(top_k=1), NUM_EXPERTS, HIDDEN, place)
    router.weight_ED.zero_()
    router.weight_ED[2:, 0] = -1.0
    router.weight_ED[:2, 0] = 1.0
    router.weight_ED[1, 1] = 2.0**-9
    x_TD = torch.zeros(num_rows, HIDDEN, dtype=torch.bfloat16, device=place)
    x_TD[:, :2] = 1.0
    logits_TE = router.logits(x_TD)
    assert logits_TE.dtype == torch.float32
    assert logits_TE[:, :2].tolist() == [[1.0, 1.001953125]] * num_rows
    assert router(x_TD).ids_TK.tolist() == [[1]] * num_rows


@pytest.mark.parametrize("has_shared", [False, True])
def test_the_scale_is_applied_once_and_to_the_routed_part_alone(
    place: torch.device, has_shared: bool
) -> None:
    x_TD = torch.randn(32, HIDDEN, generator=torch.Generator().manual_seed(0)).to(place)
    plain = make_layer(place, has_shared=has_shared)
    scaled = make_layer(place, has_shared=has_shared, scale=2.5)
    routed_TD = routed_by_token(plain, x_TD)
    shared_TD = 0.0 if plain.shared is None else plain.shared(x_TD).double()
    plain_TD, scaled_TD = (run(layer, x_TD).double() for layer in (plain, scaled))
    for told, expected in (
        (plain_TD, routed_TD + shared_TD),
        (scaled_TD, 2.5 * routed_TD + shared_TD),
        (scaled_TD - plain_TD, 1.5 * routed_TD),
    ):
        torch.testing.assert_close(told, expected, atol=1e-4, rtol=1e-4)


def test_one_token_then_none(place: torch.device) -> None:
    """Every token takes experts 0 and 1."""
    layer = make_layer(place, has_shared=True)
    layer.router.weight_ED.zero_()
    load = ExpertLoad(1, NUM_EXPERTS, place)
    x_TD = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(0)).to(place)
    assert layer.shared is not None
    expected = routed_by_token(layer, x_TD) + layer.shared(x_TD).double()
    for _ in range(2):
        out_TD = run(layer, x_TD, load)
        torch.testing.assert_close(out_TD.double(), expected, atol=1e-4, rtol=1e-4)
        assert run(layer, x_TD[:0], load).shape == (0, HIDDEN)
        # The path itself, as a rank without tokens runs it for the others.
        none = layer.router(x_TD[:0], load.counts_LCE[0])
        assert layer.path.run(x_TD[:0], none, layer.experts, 1).shape == (0, HIDDEN)
    assert load.read().counts_LE.tolist() == [[2, 2, 0, 0, 0, 0, 0, 0]]
