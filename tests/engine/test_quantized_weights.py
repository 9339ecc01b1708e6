"""--quantization: what it gives, alone and in company, and where it is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moe_serve import LLM, SamplingParams
from moe_serve.banner import banner
from moe_serve.config import EngineConfig
from moe_serve.errors import ConfigError
from moe_serve.executor import LocalExecutor
from moe_serve.experts.bank import ExpertBank
from moe_serve.experts.moving.weights import expert_kind, expert_weights
from moe_serve.kernels.cpu import library
from moe_serve.kernels.cpu.packed import PackedWeight
from moe_serve.kernels.cpu.quantized import QuantizedWeight
from moe_serve.layers.moe import Router
from moe_serve.layers.projection import Projection
from moe_serve.models.decoder import Decoder
from moe_serve.models.packing import expert_bytes
from moe_serve.rank_setup import check_quantization

PROMPTS = ["Once upon a time", "The", "Dorothy looked at the little girl and"]
PARAMS = SamplingParams(max_tokens=12, temperature=0, logprobs=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def _same_kernels_afterwards() -> Iterator[None]:
    before = library.active()
    yield
    library._active = before


def model_of(llm: LLM) -> Decoder:
    executor = llm.engine.executor
    assert isinstance(executor, LocalExecutor)
    return executor.runner.model


def numbers(llm: LLM, prompts: list[str]) -> list[object]:
    outputs = [one.outputs[0] for one in llm.generate(prompts, PARAMS)]
    return [(list(one.token_ids), str(one.logprobs)) for one in outputs]


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_request_has_the_same_bits_alone_and_in_company(name: str) -> None:
    if not library.choose("auto", 1):
        pytest.skip("no CPU kernels here")
    with LLM("builtin", quantization=name, num_threads=1, enable_prefix_caching=False) as llm:
        together = numbers(llm, PROMPTS)
        assert [numbers(llm, [prompt])[0] for prompt in PROMPTS] == together
        assert f"bfloat16 with {name} weights" in banner("1", "m", llm.engine.info, "http://x")
        model = model_of(llm)
        assert isinstance(model.tied_head, QuantizedWeight)
        for module in model.modules():
            if isinstance(module, ExpertBank):
                assert isinstance(module.gate_up_EGD, QuantizedWeight)
                assert isinstance(module.down_EDF, QuantizedWeight)
                assert expert_kind(module).startswith(f"{name} by ")
                whole = expert_bytes(module.inner_size, 256, model.dtype, name)
                assert sum(weight.nbytes for weight in expert_weights(module, 0)) == whole
            elif isinstance(module, Projection):
                assert isinstance(module.weight_ND, QuantizedWeight)
            elif isinstance(module, Router):
                assert type(module.weight_ED) is PackedWeight


def test_experts_take_their_bits_along() -> None:
    if not library.choose("auto", 1):
        pytest.skip("no CPU kernels here")
    with LLM("builtin", quantization="int4", num_threads=1) as llm:
        banks = [m for m in model_of(llm).modules() if isinstance(m, ExpertBank)]
    x, counts = torch.randn(5, 256).bfloat16(), torch.zeros(16, dtype=torch.int64)
    counts[3] = 5
    before = banks[0](x, counts)
    for old, new in zip(expert_weights(banks[0], 3), expert_weights(banks[1], 3), strict=True):
        new.copy_(old)
    assert torch.equal(banks[1](x, counts), before)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float16"}, "int8: rows cannot be float16; use --dtype bfloat16 or float32"),
        ({"cpu_kernels": "none"}, "int8 needs the CPU kernels; drop --cpu-kernels none"),
    ],
)
def test_it_is_refused_where_nothing_takes_such_weights(
    options: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM("builtin", quantization="int8", **options)


def test_it_is_refused_on_a_gpu_and_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(quantization="int4")
    library.choose(library.NONE, 1)
    with pytest.raises(ConfigError, match="int4: the model runs on cuda; .* --device cpu"):
        check_quantization(config, torch.device("cuda"), torch.bfloat16)
    library.load.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"int4 needs the CPU kernels, .* install a C\+\+ comp"):
        LLM("builtin", quantization="int4")
