"""How much GPU memory the largest step takes, found by running it."""

from __future__ import annotations

import torch

from moe_serve.block_manager import BlockManager
from moe_serve.messages import AddRequest
from moe_serve.model_runner import ModelRunner
from moe_serve.sampling_params import SamplingParams
from moe_serve.scheduler import Scheduler
from moe_serve.step import StepPlan


def largest_step(
    *,
    num_tokens: int,
    num_sequences: int,
    max_model_len: int,
    block_size: int,
    num_lanes: int,
) -> StepPlan:
    """`num_tokens` new tokens in each lane, in `num_sequences` requests that all sample, by the
    costliest way; fewer tokens where so many sequences of `max_model_len` do not hold them.

    Example: 10 tokens in 4 sequences are prompts of 3, 3, 2 and 2.
    """
    num_sequences = min(num_sequences, num_tokens)
    num_tokens = min(num_tokens, num_sequences * (max_model_len - 1))
    share, longer = divmod(num_tokens, num_sequences)
    num_blocks = num_sequences * (-(-(share + 2) // block_size) + 1)
    scheduler = Scheduler(
        [BlockManager(num_blocks, block_size, False) for _ in range(num_lanes)],
        max_num_seqs=num_sequences,
        max_num_batched_tokens=num_tokens,
        max_model_len=share + 2,
        eos_token_ids=frozenset(),
    )
    # Filters make the sampler keep the most tensors.
    sampling = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, seed=0)
    for number in range(num_sequences * num_lanes):
        length = share + (number // num_lanes < longer)
        name = f"memory profile {number}"
        scheduler.add(AddRequest(request_id=name, prompt_token_ids=[0] * length, sampling=sampling))
    plan = scheduler.schedule()
    assert plan is not None and plan.num_tokens_of_lanes == (num_tokens,) * num_lanes
    return plan


def num_blocks_of(plan: StepPlan) -> int:
    """Blocks that a pool needs to run the plan, on the lane that needs the most."""
    return 1 + max(max(chunk.request.block_ids) for chunk in plan.chunks)


def peak_bytes(runner: ModelRunner, plan: StepPlan) -> int:
    """Bytes that running the plan takes for a while, beside what is there before and after."""
    device = runner.device
    # sync: the profile runs before any client waits.
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner.run(plan)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
