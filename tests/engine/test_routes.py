"""Which experts tokens chose: as transformers' routers choose, however requests are run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from moe_serve import LLM, SamplingParams
from moe_serve.errors import RecordingError
from moe_serve.executor import LocalExecutor
from moe_serve.experts.recording import RouteRecording
from moe_serve.messages import AddRequest
from moe_serve.output import SequenceOutput
from moe_serve.route_recorder import RouteRecorder
from moe_serve.step import StepPlan

# Shapes: T tokens, L MoE layers, K top-k, C phases, E experts.

Ids = npt.NDArray[np.int16]
NUM_EXPERTS = 8
LENGTHS = [1, 2, 7, 17, 33, 40]
PROMPTS = [[(7 * i * i + 3 * i + length) % 256 for i in range(length)] for length in LENGTHS]
SMALL = {"num_kv_blocks": 15, "block_size": 4, "max_num_batched_tokens": 9}


class Routers:
    """Those of transformers."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._known: dict[tuple[int, ...], Ids] = {}

    @torch.inference_mode()
    def ids_TLK(self, token_ids: list[int]) -> Ids:
        if tuple(token_ids) not in self._known:
            out = self.model(torch.tensor([token_ids]), output_router_logits=True, use_cache=False)
            ids = [logits_TE.topk(2).indices for logits_TE in out.router_logits]
            self._known[tuple(token_ids)] = torch.stack(ids, 1).to(torch.int16).numpy()
        return self._known[tuple(token_ids)]

    def check(self, prompt: list[int], output: SequenceOutput) -> None:
        ids_TLK = output.routed_experts
        assert ids_TLK is not None and ids_TLK.dtype == np.int16
        assert np.array_equal(ids_TLK, self.ids_TLK([*prompt, *output.token_ids[:-1]]))


@pytest.fixture(scope="module")
def routers(random_model: Path) -> Routers:
    return Routers(random_model)


@pytest.fixture(scope="module")
def llm(random_model: Path) -> Iterator[LLM]:
    """A pool so small that requests are preempted, and short chunks."""
    with LLM(str(random_model), dtype="float32", num_threads=1, **SMALL) as llm:
        yield llm


def params(**fields: Any) -> SamplingParams:
    fields = {"max_tokens": 9, "temperature": 0, "ignore_eos": True} | fields
    return SamplingParams(return_routed_experts=True, **fields)


@pytest.mark.parametrize(
    "options", [{}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 7}], ids=["batch", "one", "7"]
)
def test_each_request_is_told_its_own(
    random_model: Path, routers: Routers, options: dict[str, int]
) -> None:
    with LLM(str(random_model), dtype="float32", num_threads=1, **options) as llm:
        for prompt, told in zip(PROMPTS, llm.generate(PROMPTS, params()), strict=True):
            routers.check(prompt, told.outputs[0])


def test_preemption_and_the_prefix_cache_hide_none_and_double_none(
    llm: LLM, routers: Routers
) -> None:
    stats = llm.engine.stats
    llm.generate(PROMPTS, SamplingParams(max_tokens=1))
    for prompt, told in zip(PROMPTS, llm.generate(PROMPTS, params(max_tokens=20)), strict=True):
        routers.check(prompt, told.outputs[0])
        assert told.outputs[0].num_cached_tokens == 0
    assert llm.engine.stats.num_recomputed_tokens > stats.num_recomputed_tokens
    llm.engine.scheduler.check_integrity()
    # The blocks of a prompt that was told in full serve the next one.
    (told,) = llm.generate([PROMPTS[-1]], SamplingParams(max_tokens=1))
    assert told.outputs[0].num_cached_tokens > 0 and told.outputs[0].routed_experts is None


def test_choices_that_stop_early_are_told_up_to_their_ends(llm: LLM, routers: Routers) -> None:
    (told,) = llm.generate(PROMPTS[2], params(n=3, temperature=1.0, seed=3, max_tokens=30))
    assert len({tuple(output.token_ids) for output in told.outputs}) == 3
    for output in told.outputs:
        routers.check(PROMPTS[2], output)
    text = told.outputs[0].text
    (told,) = llm.generate(PROMPTS[2], params(temperature=1.0, seed=3, max_tokens=30, stop=text[5]))
    assert told.outputs[0].finish_reason == "stop" and len(told.outputs[0].token_ids) < 30
    routers.check(PROMPTS[2], told.outputs[0])


def test_a_prompt_alone_is_told_whole(llm: LLM, routers: Routers) -> None:
    (told,) = llm.generate(PROMPTS[4], params(max_tokens=0))
    assert np.array_equal(told.outputs[0].routed_experts, routers.ids_TLK(PROMPTS[4]))  # type: ignore[arg-type]


def test_who_does_not_ask_is_told_nothing_and_gets_the_same_bits(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=9, seed=1, logprobs=20)
    alone = [told.outputs[0] for told in llm.generate(PROMPTS[:3], plain)]
    some = [plain] * 3 + [params()]
    beside = [told.outputs[0] for told in llm.generate(PROMPTS[:4], some)]
    assert [one.logprobs for one in beside[:3]] == [one.logprobs for one in alone]
    assert [one.routed_experts is None for one in beside] == [True, True, True, False]


def test_a_captured_step_is_not_replayed_where_routes_are_wanted(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Graphs:
        num_calls = 0

        def run(self, _: object) -> None:
            self.num_calls += 1

    graphs = Graphs()
    assert isinstance(llm.engine.executor, LocalExecutor)
    monkeypatch.setattr(llm.engine.executor.runner, "graphs", graphs)
    llm.generate(PROMPTS[1], params(max_tokens=4))
    assert graphs.num_calls == 0
    llm.generate(PROMPTS[1], SamplingParams(max_tokens=4, ignore_eos=True))
    assert graphs.num_calls == 4


class Recorder:
    """Steps an engine with a recorder beside it; notes which positions it computed, and how."""

    def __init__(self, llm: LLM, max_tokens: int = 10_000) -> None:
        self.executor, self.scheduler = llm.engine.executor, llm.engine.scheduler
        self.recorder = RouteRecorder(max_tokens)
        self.before = self.after = self.executor.read_load().counts_LCE
        self.tokens: dict[str, list[int]] = {}
        self.first: dict[str, list[int]] = {}
        self.again: dict[str, list[int]] = {}

    def add(self, prompts: list[list[int]], **fields: Any) -> None:
        for prompt in prompts:
            name = f"recorded {len(self.tokens)}"
            sampling = SamplingParams(**({"max_tokens": 20, "temperature": 0} | fields))
            self.tokens[name] = list(prompt)
            self.scheduler.add(
                AddRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)
            )

    def start(self) -> None:
        self.recorder.start()
        self.before = self.executor.read_load().counts_LCE
        self.first, self.again = {}, {}

    def run(self, num_steps: int = 10_000) -> None:
        for _ in range(num_steps):
            plan = self.scheduler.schedule(records_routes=self.recorder.is_recording)
            if plan is None:
                break
            results = self.executor.run(plan).results
            self.recorder.observe(plan, results)
            if self.recorder.is_recording:
                self._note(plan)
                self.after = self.executor.read_load().counts_LCE
            for update in self.scheduler.update(plan, results):
                self.tokens[update.request_id] += update.token_ids

    def _note(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            name, border = chunk.request.request_id, chunk.start + chunk.num_recomputed
            self.first.setdefault(name, []).extend(range(border, chunk.stop))
            self.again.setdefault(name, []).extend(range(chunk.start, border))

    def check(self, routers: Routers, lengths: list[int]) -> RouteRecording:
        """That the recording has just these tokens, and the counters count them so."""
        recording = self.recorder.recording("tiny", NUM_EXPERTS)
        expected, phases = [], []
        for name, first in self.first.items():
            ids_TLK = routers.ids_TLK(self.tokens[name])
            expected += [ids_TLK[position] for position in first + self.again[name]]
            num_prompt = lengths[int(name.split()[1])]
            phases += [0 if position < num_prompt else 1 for position in first]
            phases += [2] * len(self.again[name])
        assert np.array_equal(recording.ids_TLK, np.stack(expected))
        assert recording.phases_T.tolist() == phases
        assert [*recording.request_lengths] == [
            len(first) + len(self.again[name]) for name, first in self.first.items()
        ]
        counted_LCE = self.after - self.before
        assert np.array_equal(recording.counts_LE, counted_LCE.sum(1))
        for phase in range(3):
            self._check_phase(recording, phase, counted_LCE[:, phase])
        return recording

    @staticmethod
    def _check_phase(recording: RouteRecording, phase: int, counted_LE: npt.NDArray[Any]) -> None:
        ids_TLK = recording.ids_TLK[recording.phases_T == phase]
        for layer, counted_E in enumerate(counted_LE):
            assert Counter(ids_TLK[:, layer].ravel().tolist()) == Counter(
                {expert: count for expert, count in enumerate(counted_E.tolist()) if count}
            )


def test_a_recording_holds_what_the_counters_count(llm: LLM, routers: Routers) -> None:
    """Twice the same prompts: with preemptions, and hits in the prefix cache."""
    run = Recorder(llm)
    run.start()
    run.add(PROMPTS + PROMPTS)
    run.run()
    recording = run.check(routers, LENGTHS * 2)
    assert recording.num_tokens == run.recorder.num_tokens
    assert (np.bincount(recording.phases_T) > 0).all()
    # Some of the prompts' tokens came from the cache.
    assert (recording.phases_T == 0).sum() < 2 * sum(LENGTHS)


def test_only_what_is_computed_while_it_is_on_is_recorded(llm: LLM, routers: Routers) -> None:
    run = Recorder(llm)
    run.add([PROMPTS[5], PROMPTS[2]], ignore_eos=True)
    run.run(7)
    run.start()
    run.run(6)
    recording = run.check(routers, [40, 7])
    assert {(0 in first) for first in run.first.values()} == {False}
    run.recorder.stop()
    run.run()
    assert run.recorder.recording("tiny", NUM_EXPERTS).num_tokens == recording.num_tokens
    run.start()
    with pytest.raises(RecordingError, match="no token"):
        run.recorder.recording("tiny", NUM_EXPERTS)


def test_a_full_recording_ends_at_a_whole_step_and_says_so(
    llm: LLM, routers: Routers, caplog: pytest.LogCaptureFixture
) -> None:
    run = Recorder(llm, max_tokens=25)
    run.start()
    # Not in the prefix cache. Its steps have 9 tokens.
    run.add([list(range(100, 140))])
    run.run()
    assert run.recorder.is_full and not run.recorder.is_recording
    assert run.check(routers, [40]).num_tokens == 18
    assert "18 tokens are recorded" in caplog.text
    run.start()
    assert not run.recorder.is_full and run.recorder.num_tokens == 0


def test_an_id_that_comes_back_is_another_request(llm: LLM) -> None:
    run = Recorder(llm)
    run.start()
    for length in (2, 7):
        run.tokens.clear()
        run.add([list(range(200, 200 + length))], max_tokens=1)
        run.run()
    assert run.recorder.recording("tiny", NUM_EXPERTS).request_lengths == (2, 7)


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "olmoe"])
def test_other_families_choose_as_transformers_does(
    random_family: Callable[[str], Path], family: str
) -> None:
    folder = random_family(family)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        out = model(torch.tensor([PROMPTS[4]]), output_router_logits=True, use_cache=False)
    expected = torch.stack([logits_TE.topk(2).indices for logits_TE in out.router_logits], 1)
    with LLM(str(folder), dtype="float32", num_threads=1) as llm:
        (told,) = llm.generate(PROMPTS[4], params(max_tokens=1))
    assert np.array_equal(told.outputs[0].routed_experts, expected.numpy())  # type: ignore[arg-type]
