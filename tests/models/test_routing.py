"""Routers, shared experts and empty batches, in a whole model and as single layers."""

from __future__ import annotations

import pytest
import torch

from moe_serve.experts.load import ExpertLoad
from moe_serve.layers.moe import MoE, Router
from moe_serve.models.spec import MoESpec, SharedExpertSpec
from moe_serve.ranks import SINGLE_RANK
from moe_serve.routing.router import RouterSpec

CPU = torch.device("cpu")
NUM_EXPERTS = 8


@pytest.mark.parametrize("top_k", [1, 2, NUM_EXPERTS])
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "olmoe"])
def test_both_values_of_norm_topk_prob_equal_transformers(
    make_tiny, family: str, top_k: int
) -> None:
    fields = {"num_experts_per_tok": top_k}
    plain = make_tiny(family, norm_topk_prob=False, **fields).assert_same_scores()
    renormalised = make_tiny(family, norm_topk_prob=True, **fields).assert_same_scores()
    differs = (plain - renormalised).abs().max() > 1e-3
    assert differs == (top_k < NUM_EXPERTS)


def test_weights_of_all_experts_are_the_whole_softmax(make_router) -> None:
    router = make_router(top_k=NUM_EXPERTS, renormalize=False)
    x_TD = torch.randn(17, 64)
    routing = router(x_TD)
    expected = (x_TD @ router.weight_ED.T).softmax(-1).gather(1, routing.ids_TK)
    torch.testing.assert_close(routing.weights_TK, expected)


@pytest.mark.parametrize("num_rows", [1, 8, 9, 33])
def test_router_tells_experts_apart_that_bf16_would_round_together(num_rows: int) -> None:
    router = Router(RouterSpec(top_k=1), NUM_EXPERTS, 64, CPU)
    router.weight_ED.zero_()
    router.weight_ED[:, 0] = -1.0
    router.weight_ED[:2, 0] = 1.0
    router.weight_ED[1, 1] = 2.0**-9
    x_TD = torch.zeros(num_rows, 64, dtype=torch.bfloat16)
    x_TD[:, :2] = 1.0
    logits_TE = router.logits(x_TD)
    assert logits_TE.dtype == torch.float32
    assert logits_TE[:, 1].tolist() == [1.001953125] * num_rows
    assert router(x_TD).ids_TK.tolist() == [[1]] * num_rows


def test_router_weights_stay_fp32_in_a_bf16_model(make_tiny) -> None:
    model = make_tiny("qwen3_moe").decoder(torch.bfloat16)
    dtypes = {name: weight.dtype for name, weight in model.named_parameters()}
    assert dtypes.pop("layers.0.mlp.router.weight_ED") == torch.float32
    assert dtypes.pop("layers.1.mlp.router.weight_ED") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}


@pytest.mark.parametrize("setting", ["as made", "zero", "huge"])
def test_shared_expert_gate_equals_transformers(make_tiny, setting: str) -> None:
    tiny = make_tiny("qwen2_moe")
    before = tiny.runner().score(tiny.prompt(33))

    def set_gates(tensors) -> None:
        for name, tensor in tensors.items():
            if name.endswith("shared_expert_gate.weight") and setting != "as made":
                tensor.mul_(1e4 if setting == "huge" else 0.0)

    tiny.edit_tensors(set_gates)
    after = tiny.assert_same_scores()
    assert torch.equal(before, after) == (setting == "as made")


@pytest.mark.parametrize(("gate", "share"), [(0.0, 0.5), (-50.0, 0.0), (50.0, 1.0)])
def test_shared_expert_is_weighed_by_its_gate(make_moe, gate: float, share: float) -> None:
    layer = make_moe()
    x_TD = torch.randn(7, 64).abs()
    tokens = SINGLE_RANK.step([len(x_TD)])
    routed = make_moe(has_shared=False)(x_TD, tokens, None)
    layer.shared_gate.weight_ND.fill_(gate)
    expected = routed + share * layer.shared(x_TD)
    torch.testing.assert_close(layer(x_TD, tokens, None), expected)


@pytest.mark.parametrize("has_shared", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moe_layer_takes_no_rows(make_moe, has_shared: bool, dtype: torch.dtype) -> None:
    load = ExpertLoad(1, NUM_EXPERTS, CPU)
    layer = make_moe(has_shared=has_shared, dtype=dtype)
    out_TD = layer(torch.empty(0, 64, dtype=dtype), SINGLE_RANK.step([0]), load)
    assert (out_TD.shape, out_TD.dtype) == ((0, 64), dtype)
    assert load.counts_LCE.sum() == 0


def test_every_routed_token_is_counted_once(make_tiny) -> None:
    runner = make_tiny("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1]).runner()
    runner.generate(range(7), 5)
    assert runner.load.counts_LCE.sum((1, 2)).tolist() == [(7 + 4) * 2] * 2


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gets_the_same_bits_alone_and_among_others(
    make_tiny, family: str, dtype: torch.dtype
) -> None:
    tiny = make_tiny(family)
    token_ids = tiny.prompt(70)
    at_once, one_by_one = tiny.runner(dtype), tiny.runner(dtype)
    whole = at_once.step(token_ids, 0)
    steps = [one_by_one.step(token_ids[i : i + 1], i)[0] for i in range(70)]
    assert torch.equal(torch.stack(steps), whole)
    assert torch.equal(at_once.load.counts_LCE, one_by_one.load.counts_LCE)


@pytest.fixture
def make_router():
    def make(**fields) -> Router:
        torch.manual_seed(0)
        router = Router(RouterSpec(**fields), NUM_EXPERTS, 64, CPU)
        torch.nn.init.normal_(router.weight_ED)
        return router

    return make


@pytest.fixture
def make_moe():
    """A random MoE layer; equal seeds give equal routed experts with and without the shared one."""

    def make(*, has_shared: bool = True, dtype: torch.dtype = torch.float32) -> MoE:
        shared = SharedExpertSpec(inner_size=24, has_gate=True) if has_shared else None
        router = RouterSpec(top_k=2)
        spec = MoESpec(num_experts=NUM_EXPERTS, inner_size=32, router=router, shared=shared)
        layer = MoE(spec, 64, 0, SINGLE_RANK, dtype=dtype, device=CPU)
        for index, weight in enumerate(layer.parameters()):
            torch.manual_seed(index)
            torch.nn.init.normal_(weight, std=0.2)
        torch.manual_seed(0)
        return layer

    return make
