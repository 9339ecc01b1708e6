"""The routed experts of one layer against a loop over tokens, with skewed routing."""

from __future__ import annotations

import pytest
import torch

from moe_serve.experts.bank import ExpertBank
from moe_serve.experts.layer import DispatchedExperts
from moe_serve.routing.local import LocalDispatcher
from moe_serve.routing.router import Routing

NUM_EXPERTS, HIDDEN, INNER = 5, 24, 12

HERE = DispatchedExperts(LocalDispatcher(NUM_EXPERTS))


@pytest.fixture
def bank() -> ExpertBank:
    torch.manual_seed(0)
    made = ExpertBank(NUM_EXPERTS, HIDDEN, INNER, "silu", torch.float32, torch.device("cpu"))
    for parameter in made.parameters():
        parameter.normal_()
    return made


def routing_for(kind: str, num_tokens: int) -> Routing:
    if kind == "one expert":
        ids = torch.tensor([[3, 1]]).repeat(num_tokens, 1)
    else:
        ids = torch.stack([torch.randperm(NUM_EXPERTS)[:2] for _ in range(num_tokens)])
    return Routing(ids, torch.rand(num_tokens, 2))


def by_token(x: torch.Tensor, routing: Routing, bank: ExpertBank) -> torch.Tensor:
    rows = []
    for token, ids, weights in zip(x, *routing, strict=True):
        total = torch.zeros(HIDDEN)
        for expert, weight in zip(ids.tolist(), weights, strict=True):
            gate, up = (bank.gate_up_EGD[expert] @ token).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            total += weight * (bank.down_EDF[expert] @ hidden)
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("kind", ["random", "one expert"])
@pytest.mark.parametrize("num_tokens", [1, 7, 17, 129, 300])
def test_experts_match_a_loop_over_tokens(bank: ExpertBank, kind: str, num_tokens: int) -> None:
    torch.manual_seed(1)
    x, routing = torch.randn(num_tokens, HIDDEN), routing_for(kind, num_tokens)
    out = HERE.run(x, routing, bank, num_tokens)
    torch.testing.assert_close(out, by_token(x, routing, bank), atol=1e-3, rtol=1e-4)
    for token in (0, num_tokens - 1):
        one = slice(token, token + 1)
        own = Routing(routing.ids_TK[one], routing.weights_TK[one])
        alone = HERE.run(x[one], own, bank, 1)
        assert torch.equal(alone[0], out[token])


def test_no_tokens_give_an_empty_result(bank: ExpertBank) -> None:
    empty = Routing(torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    assert HERE.run(torch.empty(0, HIDDEN), empty, bank, 0).shape == (0, HIDDEN)


@pytest.mark.parametrize("index_of_E", [None, torch.arange(NUM_EXPERTS)], ids=["in order", "map"])
def test_padding_goes_to_no_expert(bank: ExpertBank, index_of_E: torch.Tensor | None) -> None:
    experts = DispatchedExperts(LocalDispatcher(NUM_EXPERTS, index_of_E))
    x, routing = torch.randn(7, HIDDEN), routing_for("random", 7)
    expected = experts.run(x, routing, bank, 7)
    padded = torch.cat((x, torch.full((3, HIDDEN), float("nan"))))
    ids = torch.cat((routing.ids_TK, torch.full((3, 2), -1)))
    weights = torch.cat((routing.weights_TK, torch.zeros(3, 2)))
    out = experts.run(padded, Routing(ids, weights), bank, 10)
    assert torch.equal(out[:7], expected)
    assert torch.equal(out[7:], torch.zeros(3, HIDDEN))
