"""Whole steps of a model with random weights: decode steps, prompts, and what a step waits for."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kernel_bench.run import describe
from kernel_bench.shapes import Model
from moe_serve.bench.gpu_ruler import Ceilings
from moe_serve.bench.ruler import Spread
from moe_serve.executor import LocalExecutor
from moe_serve.experts.load import ExpertLoad
from moe_serve.kv_pool import block_bytes, make_pool
from moe_serve.model_runner import ModelRunner, StepResult
from moe_serve.models.decoder import Decoder
from moe_serve.models.shard import WHOLE_MODEL
from moe_serve.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MoESpec, RopeSpec
from moe_serve.request import Request
from moe_serve.routing.router import RouterSpec
from moe_serve.sampler import Sampler
from moe_serve.sampling_params import SamplingParams
from moe_serve.step import Chunk, StepPlan

BLOCK_SIZE = 16
# Share of the free memory that weights and keys may take; the rest is for a step's own.
_SHARE = 0.85
_NUM_STEPS = 15
_SYNC_WARNING = "called a synchronizing"
_MOST_KERNELS = 25


class Load(NamedTuple):
    """`batch` sequences whose next token sees `context` positions; one prompt of that length."""

    batch: int
    context: int
    is_prompt: bool = False

    @property
    def num_blocks(self) -> int:
        return self.batch * -(-self.context // BLOCK_SIZE)


LOADS = [Load(batch, context) for context in (1024, 8192) for batch in (1, 8, 64)] + [
    Load(1, 4096, is_prompt=True),
    Load(1, 8192, is_prompt=True),
]
QUICK_LOADS = [Load(1, 1024), Load(64, 1024), Load(1, 4096, is_prompt=True)]
TINY_LOADS = [Load(3, 40), Load(1, 40, is_prompt=True)]


def decoder_spec(model: Model, num_layers: int) -> DecoderSpec:
    rope = RopeSpec(theta=1e6, rotary_dim=model.head_dim)
    attention = AttentionSpec(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rope=rope,
        qk_norm="head",
    )
    mlp = MoESpec(
        num_experts=model.num_experts,
        inner_size=model.inner_size,
        router=RouterSpec(top_k=model.top_k),
    )
    return DecoderSpec(
        architecture=model.name,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        layers=(LayerSpec(attention=attention, mlp=mlp),) * num_layers,
        norm_eps=1e-6,
        tie_embeddings=False,
        max_position=40960,
    )


def fitting_layers(model: Model, num_blocks: int, dtype: torch.dtype, free: int) -> int:
    """How many layers the memory holds, with so many blocks of keys, and the two embeddings."""
    spec = decoder_spec(model, 1)
    heads = 2 * model.vocab_size * model.hidden_size
    layer = (spec.num_parameters - heads) * dtype.itemsize
    layer += num_blocks * block_bytes(spec, WHOLE_MODEL, BLOCK_SIZE, dtype)
    return max(1, min(model.num_layers, int((_SHARE * free - heads * dtype.itemsize) / layer)))


class Rig:
    """A runner over random weights and random keys; requests that are said to have come so far."""

    def __init__(self, model: Model, loads: list[Load], device: torch.device) -> None:
        dtype = torch.bfloat16
        self.device = device
        num_blocks = max(load.num_blocks for load in loads)
        self.num_layers = model.num_layers
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            self.num_layers = fitting_layers(model, num_blocks, dtype, free)
        spec = decoder_spec(model, self.num_layers)
        self.decoder = Decoder(spec, dtype, device).eval()
        for parameter in self.decoder.parameters():
            fill(parameter)
        pool = make_pool(spec, WHOLE_MODEL, num_blocks, BLOCK_SIZE, dtype, device)
        for kv in pool:
            fill(kv.keys_BsNh)
            fill(kv.values_BsNh)
        self.bytes_of_key = block_bytes(spec, WHOLE_MODEL, BLOCK_SIZE, dtype) // BLOCK_SIZE
        counts = ExpertLoad(self.num_layers, model.num_experts, device)
        sampler = Sampler(model.vocab_size, frozenset())
        self.runner = ModelRunner(self.decoder, pool, sampler, counts, device)

    def capture(self, loads: list[Load]) -> float:
        """Capture decode steps as the engine does -> seconds; 0 where there is nothing to do."""
        began = time.monotonic()
        most = max(load.batch for load in loads)
        longest = max(load.context for load in loads)
        shares = list(LocalExecutor(self.runner).capture_graphs(most, longest))
        return time.monotonic() - began if shares else 0.0

    def plan(self, load: Load) -> StepPlan:
        rng = torch.Generator().manual_seed(load.batch + load.context)
        ids = torch.randint(0, self.decoder.spec.vocab_size, (load.context,), generator=rng)
        # Blocks lie in any order, as after hours of serving.
        blocks = torch.randperm(load.num_blocks, generator=rng).chunk(load.batch)
        chunks = []
        for number in range(load.batch):
            request = Request(
                request_id=str(number),
                prompt_token_ids=ids.roll(number).tolist(),
                sampling=SamplingParams(temperature=0, max_tokens=1),
                max_tokens=1,
                seed=0,
                lane=0,
                block_ids=blocks[number].tolist(),
            )
            start = 0 if load.is_prompt else load.context - 1
            chunks.append(Chunk(request=request, start=start, num_tokens=load.context - start))
        return StepPlan(chunks=tuple(chunks))

    def bytes_to_read(self, load: Load) -> float:
        """By a decode step: keys and values, and each weight once, of the experts that its tokens
        choose. Run such a step before: its counts tell."""
        used = (self.runner.load.counts_LCE.sum(1) > 0).sum().item()
        spec = self.decoder.spec
        expert = 3 * spec.hidden_size * spec.moe_layers[0].inner_size
        everything = sum(p.numel() * p.element_size() for p in self.decoder.parameters())
        unused = len(spec.layers) * spec.moe_layers[0].num_experts - used
        # Of the embedding a step reads a few rows.
        embedding = spec.vocab_size * spec.hidden_size
        weights = everything - 2 * (unused * expert + embedding)
        return weights + load.batch * load.context * self.bytes_of_key


@torch.no_grad()
def fill(tensor: torch.Tensor) -> None:
    """Norms near one, matrices of a scale that keeps the stream near one."""
    if tensor.dim() == 1:
        tensor.normal_(1.0, 0.1)
    else:
        tensor.normal_(0.0, tensor.shape[-1] ** -0.5)


def measure(
    model: Model, loads: list[Load], device: torch.device, ceilings: Ceilings | None
) -> Iterator[dict[str, Any]]:
    """First a record of the set-up, then one of each load: decode steps captured, as they are
    served, and the smallest also launch by launch. `ceilings` None: run all once, time nothing.
    """
    began = time.monotonic()
    torch.manual_seed(0)
    rig = Rig(model, loads, device)
    if ceilings is not None:
        torch.cuda.synchronize()
    yield {
        "what": "set-up",
        "model": model.name,
        "num_layers": rig.num_layers,
        "num_layers_of_model": model.num_layers,
        "seconds": round(time.monotonic() - began, 1),
    }
    decodes = [load for load in loads if not load.is_prompt]
    yield _record(rig, decodes[0], ceilings, "launch by launch")
    seconds = rig.capture(decodes)
    yield {"what": "capture", "seconds": round(seconds, 1)}
    for load in loads:
        yield _record(rig, load, ceilings, "captured" if seconds and not load.is_prompt else "")


def _record(rig: Rig, load: Load, ceilings: Ceilings | None, mode: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "what": "prompt" if load.is_prompt else "decode",
        "mode": mode,
        "batch": load.batch,
        "context": load.context,
    }
    plan = rig.plan(load)
    _check(rig.runner.run(plan), load)
    if ceilings is None:
        return found
    rig.runner.load.clear()
    rig.runner.run(plan)
    spread = _step_times(rig.runner, plan)
    found |= {"us": spread, "syncs": _syncs(lambda: rig.runner.run(plan))}
    if load.is_prompt:
        found["tokens_per_second"] = load.context / spread.median * 1e6
    else:
        bound = rig.bytes_to_read(load) / ceilings.copy * 1e6
        found |= {
            "tokens_per_second": load.batch / spread.median * 1e6,
            "bound_us": bound,
            "over_bound": spread.median / bound,
        }
    try:
        found |= _profile(lambda: rig.runner.run(plan))
    except Exception as error:  # times are worth having without it
        found["profile"] = describe(error)
    return found


def _check(result: StepResult | None, load: Load) -> None:
    assert result is not None and not result.failures, f"{load} failed: {result}"
    assert all(chunk.sampled is not None for chunk in result.results)


def _step_times(runner: ModelRunner, plan: StepPlan) -> Spread:
    """By the host's clock: a step ends with its tokens there."""
    samples = []
    for _ in range(_NUM_STEPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        runner.run(plan)
        samples.append((time.perf_counter() - began) * 1e6)
    return Spread.of(samples)


def _syncs(run: Callable[[], object]) -> list[str]:
    """Where a step waits for the GPU."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [
        f"{Path(one.filename).name}:{one.lineno}"
        for one in caught
        if _SYNC_WARNING in str(one.message)
    ]


def _profile(run: Callable[[], object]) -> dict[str, Any]:
    """What the GPU does in a step: microseconds in all, and by kernel."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    times = [
        (event.key, event.count, float(event.self_device_time_total))
        for event in profile.key_averages()
        if event.self_device_time_total > 0
    ]
    times.sort(key=lambda one: -one[2])
    return {
        "gpu_us": sum(one[2] for one in times),
        "num_kernels": sum(one[1] for one in times),
        "kernels": [
            {"kernel": name[:80], "count": count, "us": round(us, 1)}
            for name, count, us in times[:_MOST_KERNELS]
        ],
    }


HEADER = (
    "| step | batch | context | us [quartiles] | GPU busy us | kernels | bound us | step / bound "
    "| tokens/s | waits |\n|" + "---|" * 10
)


def markdown(found: dict[str, Any]) -> str:
    """A row of the table; a line of text for what is no load."""
    if found["what"] == "set-up":
        return (
            f"{found['model']}, random weights in bf16, {found['num_layers']} of "
            f"{found['num_layers_of_model']} layers, set up in {found['seconds']} s\n\n{HEADER}"
        )
    if found["what"] == "capture":
        return f"| (decode steps captured in {found['seconds']} s) |" + " |" * 9
    name = f"{found['what']} {found['mode']}".strip()
    cells = [name, str(found["batch"]), str(found["context"])]
    if "us" not in found:
        return "| " + " | ".join([*cells, "not timed", *[""] * 6]) + " |"
    us = found["us"]
    cells += [
        f"{us.median:.0f} [{us.low:.0f}, {us.high:.0f}]",
        f"{found['gpu_us']:.0f}" if "gpu_us" in found else "",
        str(found.get("num_kernels", "")),
        f"{found['bound_us']:.0f}" if "bound_us" in found else "",
        f"{found['over_bound']:.2f}" if "over_bound" in found else "",
        f"{found['tokens_per_second']:.0f}",
        str(len(found["syncs"])),
    ]
    return "| " + " | ".join(cells) + " |"
