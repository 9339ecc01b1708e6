"""What a checkpoint is measured by: all its tensors, and the tokens that a model of it says."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from torch import Tensor

from moe_serve import LLM, SamplingParams
from moe_serve.deepspeed_checkpoint.source import open_deepspeed
from moe_serve.parallel.shard import Span
from moe_serve.tensor_source import TensorSource

PROMPTS = [[1, 2, 3], [200], [7, 99, 301, 44, 5, 6, 8]]
NUM_TOKENS = 12


def whole_tensors(source: TensorSource) -> dict[str, Tensor]:
    boxes = {
        name: [tuple(Span(0, size) for size in info.shape)] for name, info in source.tensors.items()
    }
    return {name: tensor.clone() for name, _, tensor in source.read(boxes)}


def assert_same_bits(folder: Path, truth: dict[str, Tensor]) -> None:
    source = open_deepspeed(folder)
    found = whole_tensors(source)
    assert source.tensors.keys() == found.keys() == truth.keys()
    for name, tensor in truth.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape == source.tensors[name].shape, name
        assert torch.equal(found[name], tensor), name


def greedy_of_transformers(folder: Path, truth: dict[str, Tensor]) -> list[list[int]]:
    """With the truth as weights, in fp32."""
    config = transformers.AutoConfig.from_pretrained(folder)
    # What else it would take for the experts wants sizes that are multiples of four.
    config._experts_implementation = "eager"
    model = getattr(transformers, config.architectures[0])(config).float().eval()
    model.load_state_dict(stacked({name: one.float() for name, one in truth.items()}))
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def stacked(truth: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of single experts as transformers holds them: gate over up, all experts in one."""
    state = {name: one for name, one in truth.items() if ".mlp.experts." not in name}
    kinds = {"w1": "gate", "w3": "up", "w2": "down"}
    singles: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name in truth.keys() - state.keys():
        block, _, rest = name.partition(".experts.")
        if not rest[0].isdigit():
            state[name] = truth[name]
            continue
        expert, matrix, _ = rest.split(".")
        kind = kinds.get(matrix, matrix.removesuffix("_proj"))
        singles.setdefault(block, {})[int(expert), kind] = truth[name]
    for block, found in singles.items():
        order = range(len(found) // 3)
        gate_up = [torch.cat([found[e, "gate"], found[e, "up"]]) for e in order]
        state[f"{block}.experts.gate_up_proj"] = torch.stack(gate_up)
        state[f"{block}.experts.down_proj"] = torch.stack([found[e, "down"] for e in order])
    return state


def greedy_of_ours(folder: Path, **options: object) -> list[list[int]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    common = {"dtype": "float32", "device": "cpu", "num_threads": 1, "num_kv_blocks": 64}
    with LLM(str(folder), **common, **options) as llm:
        return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, params)]
