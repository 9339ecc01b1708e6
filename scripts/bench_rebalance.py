"""Steps under several placements of the same experts, in turns, and what the cost model expects.

    OMP_NUM_THREADS=1 .venv/bin/python scripts/bench_rebalance.py [--rounds 9] [--ranks 2]

The built-in model over gloo ranks of one thread each, without redundant slots; prompts of its own
texts, so that its routing is the real one. Placements: hot experts all on the first ranks, linear,
and balanced by the load that the same prompts made before. Tokens must be equal under all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from moe_serve import LLM, SamplingParams
from moe_serve.experts.analysis.load_statistics import balancedness, rank_loads
from moe_serve.experts.analysis.rank_report import expert_seconds
from moe_serve.experts.placement import LayerPlacement, Placement
from moe_serve.experts.recording import Ints

TEXT = (
    "Once upon a time there was a little girl who lived with her grandmother at the edge of a "
    "great wood, and every morning she went to the well for water. One day a fox sat there. "
)
NUM_PROMPTS, PROMPT_TOKENS = 16, 120
NUM_REDUNDANT = 0


def hot_first(load_LE: Ints, num_slots: tuple[int, ...]) -> Placement:
    """The hottest experts fill rank after rank; what is left over of the slots, copies of these."""
    layers = []
    for load_E in load_LE:
        order = np.argsort(-load_E, kind="stable").tolist()
        ranks, start = [], 0
        for count in num_slots:
            own = order[start : start + count]
            own += [expert for expert in order if expert not in own][: count - len(own)]
            ranks.append(tuple(own))
            start += count
        layers.append(LayerPlacement(tuple(ranks)))
    return Placement(tuple(layers))


def move(llm: LLM, placement: Placement) -> None:
    rebalancer = llm.engine.experts.rebalancer
    assert rebalancer is not None
    rebalancer.start(placement, None)
    rebalancer.wait()
    assert rebalancer.placement == placement


def prefill(llm: LLM) -> tuple[float, list[list[int]]]:
    """Seconds of one step with all prompts, and the tokens after them."""
    ids = llm.tokenizer.encode(TEXT * 4)
    prompts = [ids[n : n + PROMPT_TOKENS] for n in range(NUM_PROMPTS)]
    started = time.perf_counter()
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1))
    seconds = time.perf_counter() - started
    return seconds, [list(result.outputs[0].token_ids) for result in results]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    config = f'{{"step_interval": 0, "num_redundant_experts": {NUM_REDUNDANT}}}'
    with LLM(
        "builtin",
        tensor_parallel_size=options.ranks,
        enable_expert_parallel=True,
        enable_eplb=True,
        eplb_config=config,
        enable_prefix_caching=False,
    ) as llm:
        prefill(llm)
        recording = llm.expert_recording
        rebalancer = llm.engine.experts.rebalancer
        assert rebalancer is not None
        load_LE, slots = recording.counts_LE, rebalancer.placement.slots_of_ranks
        placements = {
            "hot experts together": hot_first(load_LE, slots),
            "linear": rebalancer.placement,
            "balanced": rebalancer.plan(load_LE),
        }
        seconds: dict[str, list[float]] = {name: [] for name in placements}
        tokens = set()
        for _ in range(options.rounds + 1):
            for name, placement in placements.items():
                move(llm, placement)
                took, found = prefill(llm)
                seconds[name].append(took)
                tokens.add(str(found))
        assert len(tokens) == 1, "a placement changed a token"
    print(f"{options.ranks} ranks, {NUM_PROMPTS} prompts of {PROMPT_TOKENS} tokens in a step")
    print("| placement | balancedness | busiest / mean | experts, expected ms | step ms | ratio |")
    print("|---|---|---|---|---|---|")
    base = statistics.median(seconds["linear"][1:])
    for name, placement in placements.items():
        load_LR = rank_loads(load_LE, placement)
        expected_LR = expert_seconds(recording, placement)
        assert expected_LR is not None
        # The first round warms up.
        low, middle, high = statistics.quantiles(seconds[name][1:])
        print(
            f"| {name} | {balancedness(load_LR).mean():.3f} "
            f"| {(load_LR.max(1) / load_LR.mean(1)).mean():.2f} "
            f"| {expected_LR.max(1).sum() * 1e3:.1f} "
            f"| {middle * 1e3:.1f} [{low * 1e3:.1f}, {high * 1e3:.1f}] | {middle / base:.2f} |"
        )


if __name__ == "__main__":
    main()
