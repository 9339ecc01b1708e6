"""Every routed token is counted once, whatever became of its request: in each phase and window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_serve import LLM, SamplingParams
from moe_serve.engine import Engine
from moe_serve.executor import LocalExecutor
from moe_serve.expert_monitor import COLLECT_STEPS
from moe_serve.experts.recording import LoadRecording
from moe_serve.messages import AddRequest
from tests.engine.test_ranks import free_port, on_ranks
from tests.rank_pool import RankPool

TOP_K = 2
# Chunks of every length, preemption, and blocks that the next request finds.
CRAMPED: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 14, "max_num_batched_tokens": 19}
SHARED = [(11 * i) % 250 for i in range(17)]
PROMPTS = [[7], [*SHARED, 1, 2, 3], list(range(33)), [*SHARED, 9], [5] * 2, list(range(40, 64))]


def drive(engine: Engine) -> dict[str, Any]:
    """All prompts twice, one of them aborted in the middle."""
    for turn in range(2):
        for number, prompt in enumerate(PROMPTS):
            params = SamplingParams(max_tokens=9, ignore_eos=True, seed=number)
            engine.add(
                AddRequest(request_id=f"{turn} {number}", prompt_token_ids=prompt, sampling=params)
            )
        steps = 0
        while engine.has_work:
            engine.step()
            steps += 1
            if steps == 4:
                engine.abort([f"{turn} 2"])
    monitor, stats = engine.experts.monitor, engine.stats
    monitor.collect()
    recording = monitor.recording(engine.experts.placement)
    counts = engine.executor.read_load()
    return {
        "recording": recording,
        "num_preemptions": stats.num_preemptions,
        "num_hits": stats.prefix_cache_hits,
        "num_recomputed": stats.num_recomputed_tokens,
        "equals_counters": np.array_equal(recording.counts_LE, counts.counts_LE),
    }


def check(told: dict[str, Any], *, has_rows: bool) -> LoadRecording:
    recording: LoadRecording = told["recording"]
    assert told["equals_counters"] and recording.is_conserved
    prefill, decode, recomputed = recording.tokens_WC.sum(0).tolist()
    assert recomputed == told["num_recomputed"] > 0 and told["num_preemptions"] > 0
    # What the prefix cache gave was not computed, and neither was what an abort left.
    assert prefill <= 2 * sum(map(len, PROMPTS)) - told["num_hits"] and told["num_hits"] > 0
    assert 0 < decode <= 2 * 8 * len(PROMPTS)
    total = (prefill + decode + recomputed) * TOP_K
    assert recording.counts_LE.sum(1).tolist() == [total] * recording.num_layers
    assert recording.counts_WCLE.min() >= 0
    if has_rows:
        assert recording.rows_WLR.sum((0, 2)).tolist() == [total] * recording.num_layers
    else:
        assert recording.rows_WLR.shape[2] == 0
    return recording


@pytest.fixture(scope="module")
def folder(random_family: Callable[[str], Path]) -> Path:
    return random_family("qwen2_moe")


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> LoadRecording:
    options: dict[str, Any] = CRAMPED | {"dtype": "float32", "num_threads": 1}
    with LLM(str(folder), **options) as llm:
        return check(drive(llm.engine), has_rows=False)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


EXPERTS: dict[str, Any] = {"enable_expert_parallel": True}
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "tp2": (2, 1, {}),
    "tp2 deterministic": (2, 1, {"deterministic": True}),
    "lanes": (1, 2, {}),
    "lanes, ep": (1, 3, EXPERTS | {"all2all_backend": "all_to_all"}),
    "tp2, ep, static": (2, 1, EXPERTS | {"all2all_backend": "allgather_reducescatter"}),
    "tp2, lanes, ep, replicas": (2, 2, EXPERTS | {"ep_num_redundant_experts": 5}),
}


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES)
def test_conservation_on_ranks(
    pool: RankPool, folder: Path, one_rank: LoadRecording, case: str
) -> None:
    tensor, data, options = CASES[case]
    whole = options | CRAMPED | {
        "model": str(folder), "dtype": "float32", "tensor_parallel_size": tensor,
        "data_parallel_size": data,
    }  # fmt: skip
    size = tensor * data
    told = pool.run(on_ranks, size, free_port(), whole, drive, size=size)[0]
    recording = check(told, has_rows="enable_expert_parallel" in options)
    if data == 1:
        # The same steps: so each expert gets the same in each phase, wherever it lies.
        assert np.array_equal(recording.counts_WCLE.sum(0), one_rank.counts_WCLE.sum(0))


def test_windows_slide_and_nothing_falls_out(folder: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1}
    with LLM(str(folder), **options) as llm:
        monitor = llm.engine.experts.monitor
        monitor._window_size = 2 * COLLECT_STEPS
        assert monitor.recording(None).is_conserved and monitor.recording(None).num_steps == 0
        assert monitor.stats is None
        for turn in range(5):
            llm.generate([[turn, 1, 2]], SamplingParams(max_tokens=COLLECT_STEPS, ignore_eos=True))
        recording = monitor.recording(None)
        # A prompt and 31 tokens to a turn: each turn is a collection.
        assert recording.steps_W.tolist() == [3 * COLLECT_STEPS, 2 * COLLECT_STEPS]
        assert recording.tokens_WC.tolist() == [[9, 93, 0], [6, 62, 0]]
        assert recording.is_conserved
        llm.generate([[1]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert monitor.recording(None).num_steps == 5 * COLLECT_STEPS
        monitor.collect()
        recording = monitor.recording(None)
        assert recording.num_steps == 5 * COLLECT_STEPS + 3 and recording.is_conserved
        assert recording.counts_LE.tolist() == llm.expert_load
        assert monitor.stats is not None and 0 < monitor.stats.entropy <= 1
        assert monitor.stats.hot_shares[8] == 1.0 and monitor.stats.rows_of_ranks == []


def test_recorded_windows_are_as_long_as_asked_for(folder: Path, tmp_path: Path) -> None:
    from moe_serve.experts.files.load_files import read_load
    from moe_serve.messages import RecordCall

    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1}
    with LLM(str(folder), expert_record_dir=str(tmp_path), **options) as llm:
        experts = llm.engine.experts

        def record(**fields: Any) -> dict[str, Any]:
            experts.call(RecordCall(call_id=1, **fields))
            (answer,) = experts.take_answers()
            return answer.body or {"error": answer.error}

        def generate(num_tokens: int) -> None:
            llm.generate([[1, 2]], SamplingParams(max_tokens=num_tokens, ignore_eos=True))

        assert "nothing is recorded" in record(action="dump")["error"]
        generate(5)
        assert record(action="start", window=7) == {"is_recording": True}
        assert "stop it first" in record(action="start")["error"]
        generate(17)
        told = record(action="dump")
        assert (told["num_windows"], told["is_recording"]) == (3, True)
        recording = read_load(told["path"])
        assert recording.steps_W.tolist() == [7, 7, 3] and recording.is_conserved
        assert recording.tokens_WC.sum(0).tolist() == [2, 16, 0]
        generate(4)
        assert record(action="stop") == {"is_recording": False}
        generate(4)
        assert read_load(record(action="dump", style="json")["path"]).num_steps == 4


@pytest.mark.parametrize("layer", [0, 1])
def test_a_step_that_ctrl_c_cuts_short_is_not_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "enable_prefix_caching": False}
    with LLM(str(folder), **options) as llm:
        assert isinstance(llm.engine.executor, LocalExecutor)
        model = llm.engine.executor.runner.model

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            # Behind the experts of the first layer, or of all.
            patch.setattr(model.layers[layer].mlp, "_shared", interrupt)
            llm.generate([[1, 2, 3, 4]])
        llm.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True))
        recording = llm.expert_recording
        assert recording.is_conserved and recording.tokens_WC.sum(0).tolist() == [5, 4, 0]
        assert recording.counts_LE.tolist() == llm.expert_load
