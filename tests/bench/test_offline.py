"""Benchmarks of the engine without a server: what they count, and what their flags refuse."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moe_serve.bench import latency, offline, throughput
from moe_serve.bench.engine_options import add_engine_arguments, read_engine_config
from moe_serve.bench.latency import Iteration, TokenLog, time_per_output_token
from moe_serve.bench.processor import processor_name
from moe_serve.bench.table import Table
from moe_serve.bench.throughput import Run
from moe_serve.cli import main
from moe_serve.config import EngineConfig
from moe_serve.errors import ConfigError
from moe_serve.llm import LLM

SMALL = {"device": "cpu", "num_threads": 1, "kv_cache_memory": "8MiB"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("builtin", **SMALL, enable_prefix_caching=False) as llm:
        yield llm


def config_of(*argv: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return read_engine_config(parser.parse_args(argv), prog="bench")


def test_engine_options_are_those_of_a_server_but_prefixes_are_not_cached() -> None:
    assert config_of() == EngineConfig(enable_prefix_caching=False)
    assert config_of("--enable-prefix-caching") == EngineConfig()
    found = config_of("folder", "--dtype", "float32", "--tp", "2", "--num-kv-blocks=7")
    assert (found.model, found.dtype) == ("folder", "float32")
    assert (found.tensor_parallel_size, found.num_kv_blocks) == (2, 7)
    assert config_of("--model", "other").model == "other"


def test_the_environment_and_a_file_set_engine_options_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "bench.yaml"
    file.write_text("block_size: 8\nmax_num_seqs: 5\n")
    monkeypatch.setenv("MOE_SERVE_MAX_NUM_SEQS", "3")
    found = config_of("--config", str(file))
    assert (found.block_size, found.max_num_seqs) == (8, 3)


def test_a_value_that_cannot_be_is_refused_as_by_a_server() -> None:
    with pytest.raises(ConfigError, match="--dtype half must be one of auto, float32"):
        config_of("--dtype", "half")


def test_a_run_counts_every_token(llm: LLM) -> None:
    seconds = iter(range(0, 10**10, 10**9))
    runs = throughput.measure(
        llm, num_prompts=3, input_len=7, output_len=5, num_runs=2, clock=seconds.__next__
    )
    assert (
        runs == [Run(seconds=1.0, num_requests=3, num_prompt_tokens=21, num_output_tokens=15)] * 2
    )
    assert throughput.medians(runs) == {
        "requests_per_second": 3.0,
        "output_tokens_per_second": 15.0,
        "total_tokens_per_second": 36.0,
    }


def test_prompts_of_a_file_are_repeated_and_must_leave_room(llm: LLM) -> None:
    options = {"num_prompts": 3, "input_len": 1, "num_runs": 1, "texts": ["one two", "three"]}
    (run,) = throughput.measure(llm, **options, output_len=2)
    lengths = [len(llm.tokenizer.encode(text)) for text in ("one two", "three", "one two")]
    assert run.num_prompt_tokens == sum(lengths)
    length = llm.engine.info.max_model_len
    with pytest.raises(ConfigError, match=f"--output-len {length}: prompt 1 of 2 tokens leaves"):
        throughput.measure(llm, **options, output_len=length)


def test_what_does_not_fit_the_context_is_refused(llm: LLM) -> None:
    length = llm.engine.info.max_model_len
    with pytest.raises(ConfigError, match=f"--input-len {length} and --output-len 1"):
        latency.measure(llm, batch_size=1, input_len=length, output_len=1, num_iterations=1)


def test_latencies_come_from_when_each_token_was_there(llm: LLM) -> None:
    # The clock is looked at before the batch, after each of its steps, and at its end.
    seconds = iter(range(0, 10**11, 10**9))
    (found,) = latency.measure(
        llm, batch_size=2, input_len=7, output_len=4, num_iterations=1, clock=seconds.__next__
    )
    assert found == Iteration(seconds=5.0, ttft=1.0, tpot=1.0)


def test_an_engine_is_watched_only_meanwhile(llm: LLM) -> None:
    step = llm.engine.step
    with pytest.raises(KeyError), TokenLog(lambda: 0).watching(llm.engine):
        assert llm.engine.step != step
        raise KeyError
    assert llm.engine.step == step


def test_time_per_output_token_has_the_first_token_not_in_it() -> None:
    assert time_per_output_token([4 * 10**9]) == 0.0
    assert time_per_output_token([10**9, 10**9, 4 * 10**9]) == 1.5


def test_a_summary_has_means_and_percentiles_of_iterations() -> None:
    found = latency.summary(
        [Iteration(seconds=second, ttft=0.5, tpot=0.25) for second in (1.0, 2.0, 6.0)]
    )
    assert (found["e2el"]["mean"], found["e2el"]["p50"], found["e2el"]["p75"]) == (3.0, 2.0, 4.0)
    assert set(found["ttft"].values()) == {0.5} and set(found["tpot"].values()) == {0.25}


def test_random_prompts_follow_the_seed() -> None:
    first, again, other = (
        offline.random_prompts(np.random.default_rng(seed), 3, 7, 100) for seed in (0, 0, 1)
    )
    assert first == again != other
    assert [len(prompt) for prompt in first] == [7, 7, 7]


def test_prompts_are_lines_of_text_or_of_json(tmp_path: Path) -> None:
    text, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text("one\n\n{two}\n")
    lines.write_text('{"prompt": "one", "more": 1}\n{"prompt": "two\\n"}\n')
    assert offline.read_prompts(str(text)) == ["one", "{two}"]
    assert offline.read_prompts(str(lines)) == ["one", "two\n"]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("p.txt", "\n", "there is no prompt in it"),
        ("p.jsonl", '{"prompt": "a"}\n{', r"p.jsonl:2: not JSON"),
        ("p.jsonl", '{"text": "a"}', r'p.jsonl:1: must be an object with a text "prompt"'),
        ("missing/p.txt", None, "cannot be read"),
    ],
)
def test_a_file_without_prompts_is_told(
    tmp_path: Path, name: str, content: str | None, told: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=told):
        offline.read_prompts(str(tmp_path / name))


def test_a_table_is_markdown_with_numbers_to_the_right() -> None:
    table = Table(["part", "us"])
    table.add("all of it", 1.5)
    table.add("rest", 12)
    assert str(table).splitlines() == [
        "| part      |  us |",
        "| --------- | --: |",
        "| all of it | 1.5 |",
        "| rest      |  12 |",
    ]


def test_a_table_of_short_cells_is_markdown_too() -> None:
    assert str(Table(["op", "T"])).splitlines() == ["| op |  T |", "| -- | -: |"]


def test_the_processor_is_named_where_the_system_does(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nmodel name : Some CPU @ 2 GHz\nmodel name : other\n")
    assert processor_name(file) == "Some CPU @ 2 GHz"
    assert processor_name(tmp_path / "none")


@pytest.mark.parametrize("kind", ["throughput", "latency"])
def test_the_commands_print_a_table_and_write_all_of_it(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    sizes = ["--input-len", "5", "--output-len", "3", "--num-iters", "2", "--num-iters-warmup", "0"]
    count = ["--batch-size" if kind == "latency" else "--num-prompts", "2"]
    engine = ["--num-threads", "1", "--kv-cache-memory", "8MiB", "--dtype", "float32"]
    argv = ["bench", kind, "builtin", *sizes, *count, *engine, "--output-json", str(file)]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "float32, cpu, 1 threads, 1 rank" in printed
    assert ("| median" if kind == "throughput" else "| p99") in printed
    found = json.loads(file.read_text())
    assert found["arguments"]["output_len"] == 3
    assert found["config"]["dtype"] == "float32"
    assert len(found["runs" if kind == "throughput" else "iterations"]) == 2


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["throughput", "--num-prompts", "0"], "--num-prompts 0 must be at least 1"),
        (["latency", "--seed", "-1"], "--seed -1 must be at least 0"),
        (["latency", "--batch-size", "65"], "--batch-size 65 is more than --max-num-seqs 64"),
    ],
)
def test_numbers_that_cannot_be_are_refused_before_anything_is_loaded(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *argv]) == 2
    assert told in capsys.readouterr().err
