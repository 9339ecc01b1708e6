"""The trainings that make the tests' checkpoints: two ranks of DeepSpeed on CPU, over gloo.

    DS_ACCELERATOR=cpu MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python training.py FOLDER

For each run, FOLDER/<run>/ gets what a trainer leaves: config.json, `latest`, global_step<n>/.
Beside it FOLDER/<run>.safetensors is the truth that a reader is measured by: for ZeRO what
DeepSpeed's own `zero_to_fp32` makes of the files, for its MoE layers what the live model holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import multiprocessing
import os
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file
from torch import Tensor, nn

NUM_RANKS = 2
EXPERTS = 4
# Odd sizes, so that partitions need padding.
FIELDS: dict[str, Any] = {
    "vocab_size": 323, "hidden_size": 33, "head_dim": 8, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
    "max_position_embeddings": 128, "initializer_range": 0.15, "eos_token_id": None,
    "bos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": EXPERTS, "intermediate_size": 20}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": EXPERTS, "moe_intermediate_size": 20,
                               "intermediate_size": 40, "norm_topk_prob": True}),
}  # fmt: skip
BF16 = {"bf16": {"enabled": True}}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`settings`: of DeepSpeed's configuration. `frozen`: ends of names that are not trained."""

    family: str
    stage: int
    steps: int = 2
    has_moe_layers: bool = False
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    zero: dict[str, Any] = dataclasses.field(default_factory=dict)
    frozen: tuple[str, ...] = ()


TIED = {"tie_word_embeddings": True}
FROZEN = ("model.norm.weight", "0.self_attn.k_proj.weight", "lm_head.weight")
RUNS = {
    "mixtral-zero1": Run(family="mixtral", stage=1),
    "mixtral-zero2": Run(
        family="mixtral", stage=2, frozen=FROZEN, zero={"round_robin_gradients": True}
    ),
    "mixtral-zero3": Run(family="mixtral", stage=3, frozen=FROZEN, zero={"sub_group_size": 1500}),
    "mixtral-zero1-frozen": Run(family="mixtral", stage=1, frozen=FROZEN, settings=BF16),
    "mixtral-zero0": Run(family="mixtral", stage=0),
    "qwen3_moe-zero1": Run(family="qwen3_moe", stage=1, fields=TIED, settings=BF16),
    "qwen3_moe-zero2": Run(family="qwen3_moe", stage=2, settings=BF16),
    "qwen3_moe-zero3": Run(family="qwen3_moe", stage=3, steps=3, fields=TIED, settings=BF16),
    "mixtral-moe": Run(family="mixtral", stage=0, has_moe_layers=True),
    "qwen3_moe-moe-zero2": Run(family="qwen3_moe", stage=2, has_moe_layers=True, settings=BF16),
}  # fmt: skip


class MixtralExpert(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(size, inner, bias=False)
        self.w2 = nn.Linear(inner, size, bias=False)
        self.w3 = nn.Linear(size, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class QwenExpert(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(MoE):
    """Where transformers expects the output alone."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states)[0]


def put_moe_layers(model: nn.Module, config: Any) -> None:
    """DeepSpeed's layer in place of each MoE block, two experts a rank, each with its own seed."""
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    kind = MixtralExpert if config.model_type == "mixtral" else QwenExpert
    for index, layer in enumerate(model.model.layers):
        layer.mlp = Block(
            config.hidden_size, kind(config.hidden_size, inner), num_experts=EXPERTS,
            ep_size=NUM_RANKS, k=2, drop_tokens=False, top2_2nd_expert_sampling=False,
        )  # fmt: skip
        experts = layer.mlp.deepspeed_moe.experts.deepspeed_experts
        for local, expert in enumerate(experts):
            torch.manual_seed(100 * index + dist.get_rank() * len(experts) + local)
            for parameter in expert.parameters():
                nn.init.normal_(parameter, std=0.2)


def parameter_groups(model: nn.Module, run: Run) -> list[dict[str, Any]]:
    """With weight decay and without, as trainers have them."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1, "name": "decay"},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0, "name": "plain"},
    ]
    if run.has_moe_layers:
        return split_params_into_different_moe_groups_for_optimizer(groups)
    return groups


def start(run: Run, folder: Path) -> Any:
    prefix, own = FAMILIES[run.family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**(FIELDS | own | run.fields))
    # The grouped product of the other one wants sizes that are multiples of four.
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    if dist.get_rank() == 0:
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
    if run.has_moe_layers:
        put_moe_layers(model, config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(run.frozen) if run.frozen else True)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": run.stage, **run.zero},
        "zero_allow_untested_optimizer": True,
        **run.settings,
    }
    groups = parameter_groups(model, run)
    return deepspeed.initialize(model=model, model_parameters=groups, config=settings)[0]


def train(engine: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        ids = torch.randint(0, FIELDS["vocab_size"], (2, 12), generator=generator)
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        engine.step()


def live_truth(engine: Any, run: Run) -> dict[str, Tensor]:
    """Experts as the layers hold them, all else as the optimizer does, where ZeRO has it."""
    own: dict[str, Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        name = name.replace(".deepspeed_moe.gate.wg.", ".gate.")
        is_expert = ".deepspeed_experts." in name
        if is_expert:
            block, rest = name.split(".deepspeed_moe.experts.deepspeed_experts.")
            local, matrix = rest.split(".", 1)
            name = f"{block}.experts.{int(local) + EXPERTS // NUM_RANKS * dist.get_rank()}.{matrix}"
        full = None if is_expert or not run.stage else safe_get_full_fp32_param(parameter)
        own[name] = (parameter.detach() if full is None else full).clone()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return {name: tensor for part in reversed(parts) for name, tensor in part.items()}


def make(name: str, run: Run, top: Path) -> None:
    folder = top / name
    folder.mkdir(exist_ok=True)
    engine = start(run, folder)
    train(engine, run.steps)
    engine.save_checkpoint(str(folder))
    if run.has_moe_layers or not run.stage:
        truth = live_truth(engine, run)
    elif dist.get_rank() == 0:
        with contextlib.redirect_stdout(io.StringIO()):
            truth = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    if dist.get_rank() == 0:
        save_file({key: tensor.clone() for key, tensor in truth.items()}, f"{folder}.safetensors")
    engine.destroy()


def run_rank(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
    torch.set_num_threads(1)
    # Else it compiles a library of its own for sums among ranks, in a minute or two.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    for name, run in RUNS.items():
        print(f"--- {name}, rank {rank}", flush=True)
        make(name, run, Path(sys.argv[1]))
    dist.destroy_process_group()


def main() -> None:
    # Forked, as imports are the half of the time. The first that fails ends all.
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank,)) for rank in range(NUM_RANKS)]
    for rank in ranks:
        rank.start()
    left = list(ranks)
    while left and not any(rank.exitcode for rank in ranks):
        wait([rank.sentinel for rank in left])
        left = [rank for rank in left if rank.exitcode is None]
    for rank in left:
        rank.kill()
    sys.exit(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main()
