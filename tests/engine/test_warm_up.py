from __future__ import annotations

from pathlib import Path

import pytest

from moe_serve import engine_loader
from moe_serve.config import EngineConfig
from moe_serve.engine_loader import load_engine, warm_up_requests
from moe_serve.executor import LocalExecutor
from moe_serve.messages import AddRequest


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("most_tokens", [0, 1, 16, 17, 100, 2048, 100_000])
def test_prompts_fit_and_those_of_a_gpu_pass_each_power_of_two(
    most_tokens: int, device_type: str
) -> None:
    first, *more = [
        len(request.prompt_token_ids) for request in warm_up_requests(most_tokens, device_type)
    ]
    assert first == max(1, min(most_tokens, 300))
    wanted = [17, 33, 65, 129, 257, 513, 1025, 2049, 4097]
    assert more == [n for n in wanted if n <= most_tokens and device_type == "cuda"]


def test_nothing_is_left_of_the_warm_up(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []

    def like_a_gpu(most_tokens: int, device_type: str) -> list[AddRequest]:
        requests = warm_up_requests(most_tokens, "cuda")
        steps.extend(len(request.prompt_token_ids) for request in requests)
        return requests

    monkeypatch.setattr(engine_loader, "warm_up_requests", like_a_gpu)
    config = EngineConfig(
        model=str(random_model), num_threads=1, num_kv_blocks=9, block_size=4, max_model_len=35
    )
    engine = load_engine(config)
    assert isinstance(engine.executor, LocalExecutor)
    assert steps == [33, 17, 33]
    assert not engine.executor.read_load().counts_LCE.any()
    assert engine.communication() == {
        "num_ranks": 1,
        "summary": ["There is one rank, which has nobody to send to."],
        "ranks": [{"rank": 0, "groups": []}],
    }
    for kv in engine.executor.runner.pool:
        assert not kv.keys_BsNh.any() and not kv.values_BsNh.any()
    engine.close()
