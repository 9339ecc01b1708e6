"""Whole models through the Triton kernels, in Triton's interpreter, and through captured steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from moe_serve import LLM, SamplingParams
from moe_serve.decode_graphs import Capture, Forward, graph_sizes
from moe_serve.executor import LocalExecutor
from moe_serve.kernels.jit import triton_everywhere

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter was not asked for"
)

PROMPTS = [[7, 3, 200], [11], [(5 * i) % 256 for i in range(9)]]
PARAMS = [
    SamplingParams(max_tokens=3, temperature=0),
    SamplingParams(max_tokens=2, temperature=0),
    SamplingParams(max_tokens=2, seed=5, temperature=1.0, top_p=0.9, top_k=40),
]


def tokens(llm: LLM) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, PARAMS)]


def load(folder: Path, **options: object) -> LLM:
    # Short, for the sake of the warm-up: the interpreter is slow.
    options = {"dtype": "float32", "num_threads": 1, "max_model_len": 14, **options}
    # Triton kernels take weights as they are.
    return LLM(str(folder), enable_prefix_caching=False, cpu_kernels="none", **options)


def test_kernels_give_the_tokens_of_their_twins(random_family: Callable[[str], Path]) -> None:
    folder = random_family("qwen2_moe")
    with load(folder) as llm:
        expected = tokens(llm), llm.expert_load
    with triton_everywhere(), load(folder, max_num_batched_tokens=6, block_size=4) as llm:
        assert (tokens(llm), llm.expert_load) == expected
        llm.engine.scheduler.check_integrity()


# Rows of padding may hold anything; in the interpreter, numpy tells of it.
@pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")
def test_captured_steps_give_the_same_and_count_no_padding(random_model: Path) -> None:
    with load(random_model) as llm:
        expected = tokens(llm), llm.expert_load
    with triton_everywhere(), load(random_model) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, LocalExecutor)
        replays: list[int] = []
        assert list(executor.runner.capture_graphs(4, 14, eager(replays)))[-1] == 1.0
        assert llm.expert_load == [[0] * len(row) for row in llm.expert_load]
        assert (tokens(llm), llm.expert_load) == expected
        # 3 running requests are padded to 4, and 1 needs no padding.
        assert replays == [4, 1]


def eager(replays: list[int]) -> Capture:
    """Stands for a capture: runs the same function on the same tensors again; notes its size."""

    def capture(forward: Forward) -> Forward:
        def replay() -> torch.Tensor:
            output = forward()
            replays.append(output.shape[0])
            return output

        return replay

    return capture


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (30, [1, 2, 4, 8, 16, 24, 30]),
        (100, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100]),
    ],
)
def test_steps_are_padded_little(most: int, sizes: list[int]) -> None:
    assert graph_sizes(most) == sizes


def test_padding_never_exceeds_the_step_itself() -> None:
    sizes = graph_sizes(1000)
    assert all(low < high <= 2 * low for low, high in pairs(sizes))
    assert sizes[-1] == 1000


def pairs(values: list[int]) -> Iterator[tuple[int, int]]:
    return zip(values, values[1:], strict=False)
