"""`moe-serve bench serve` from flags to files, against a server in the same process."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_serve.cli import main
from moe_serve.cli.bench import KINDS
from tests.bench.fake_server import FakeServer, answer, echo, running


@pytest.fixture(scope="module")
def running_server() -> Iterator[FakeServer]:
    with running() as fake:
        yield fake


@pytest.fixture
def server(running_server: FakeServer) -> FakeServer:
    running_server.asked.clear()
    running_server.answers = {"a": echo, "b": echo}
    return running_server


def bench(server: FakeServer, *argv: str, name: str = "a", code: int = 0) -> None:
    assert main(["bench", "serve", "--base-url", server.url(name), *argv]) == code


def test_a_whole_report(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "out.json", tmp_path / "out.svg"
    bench(
        server, "--num-prompts", "5", "--max-concurrency=2", "--input-len", "7", "--output-len=3",
        "--runs", "2", "--goodput", "ttft:1e9", "--save-json", str(file), "--plot", str(picture),
    )  # fmt: skip
    report = json.loads(file.read_text())
    assert (report["kind"], report["version"]) == ("moe_serve.bench.serve", 1)
    (target,) = report["targets"]
    assert target["model"] == "fake" and target["facts"]["version"] == {"version": "7.1"}
    for run in target["runs"]:
        assert (run["completed"], run["failed"], run["max_concurrent_requests"]) == (5, 0, 2)
        assert (run["total_input_tokens"], run["total_output_tokens"]) == (35, 15)
        assert run["request_goodput"] == run["request_throughput"] > 0
    ET.fromstring(picture.read_text())
    assert "good requests per second" in capsys.readouterr().out
    bodies = server.bodies("a")
    # Two to warm up, then two runs of five: no prompt twice, all of ids that the server gave.
    assert len({tuple(body["prompt"]) for body in bodies}) == len(bodies) == 12
    assert {token for body in bodies for token in body["prompt"]} <= set(range(10, 20))
    assert all(body["ignore_eos"] and body["max_tokens"] == 3 for body in bodies)


def test_servers_take_turns_with_the_same_load(server: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    bench(
        server, "--compare", f"ours={server.url('a')}", "--compare", f"other={server.url('b')}",
        "--num-prompts=2", "--max-concurrency=1", "--runs=2", "--output-len=1",
        "--save-json", str(file),
    )  # fmt: skip
    loads = [(name, body["prompt"]) for name, path, body in server.asked if "completions" in path]
    assert [name for name, _ in loads] == [*"ab", *"aabb", *"aabb"]
    prompts = [prompt for _, prompt in loads]
    assert prompts[2:4] == prompts[4:6] != prompts[6:8] == prompts[8:10]
    report = json.loads(file.read_text())
    assert [target["name"] for target in report["targets"]] == ["ours", "other"]
    (pair,) = report["ratios"]
    assert (pair["of"], pair["to"], pair["median"]["completed"]) == ("other", "ours", 1)


def test_a_server_beside_itself_finds_no_prompt_again(server: FakeServer) -> None:
    bench(server, "--compare", f"x={server.url('a')}", "--compare", f"y={server.url('a')}",
          "--num-prompts=2", "--runs=2", "--output-len=1", "--warmup=0")  # fmt: skip
    prompts = [tuple(body["prompt"]) for body in server.bodies("a")]
    assert len(set(prompts)) == len(prompts) == 8


def test_the_same_prompts_where_wanted(server: FakeServer) -> None:
    bench(server, "--num-prompts=1", "--runs=3", "--same-prompts", "--output-len=1", "--warmup=0")
    first, *others = [body["prompt"] for body in server.bodies("a")]
    assert others == [first, first]


def test_chat_gets_words(server: FakeServer) -> None:
    bench(server, "--endpoint", "chat", "--num-prompts=1", "--input-len=4", "--output-len=2",
          "--warmup=0", "--no-ignore-eos", "--extra-body", '{"top_k": 3}')  # fmt: skip
    (body,) = server.bodies("a")
    assert len(body["messages"][0]["content"].split()) == 4
    assert "ignore_eos" not in body and body["top_k"] == 3


def test_a_trace_gives_times_and_lengths(server: FakeServer, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [{"timestamp": 10 * n, "input_length": 4 + n, "output_length": 1 + n, "hash_ids": [0]}
            for n in range(4)]  # fmt: skip
    trace.write_text("\n".join(map(json.dumps, rows)))
    bench(server, "--trace", str(trace), "--trace-speed", "9", "--trace-limit=2",
          "--trace-max-len=8", "--vocab-size=999", "--warmup=0",
          "--save-json", str(tmp_path / "out.json"))  # fmt: skip
    first, second = server.bodies("a")
    assert (len(first["prompt"]), len(second["prompt"])) == (4, 5)
    assert second["prompt"][:4] == first["prompt"] and second["max_tokens"] == 2
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["load"] == {"num_requests": 2, "num_left_out": 0}


def test_prompts_of_a_file_at_a_rate(server: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "x", "max_tokens": 2}\n{"prompt": [3]}\n')
    bench(server, "--prompts", str(file), "--request-rate=1000", "--burstiness=.5", "--warmup=0")
    assert [body["prompt"] for body in server.bodies("a")] == ["x", [3]]
    assert [body["max_tokens"] for body in server.bodies("a")] == [2, 128]


def test_failures_are_grouped_and_fail(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: str, body: Any) -> Any:
        is_load = "completions" in path
        return answer("429 Too Many Requests", {"error": {"message": "full"}}) if is_load else echo(
            path, body
        )  # fmt: skip

    server.answers["a"] = full
    bench(server, "--num-prompts=3", code=1)
    out = capsys.readouterr().out
    assert "server: 3 x 429: full" in out


def test_a_server_without_lists_needs_a_model_and_ids(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def bare(path: str, body: Any) -> Any:
        missing = answer("404 Not Found", {"detail": "Not Found"})
        return echo(path, body) if "completions" in path else missing

    server.answers["a"] = bare
    bench(server, code=2)
    assert "/v1/models answers 404" in capsys.readouterr().err
    bench(server, "--model=m", code=2)
    assert "no server has /tokenize" in capsys.readouterr().err
    bench(server, "--model=m", "--prompt-tokens=text", "--num-prompts=1", "--output-len=1")
    assert server.bodies("a")[-1]["model"] == "m"


def test_llama_cpp_tokenizes_in_its_own_words(server: FakeServer) -> None:
    def other(path: str, body: Any) -> Any:
        if path == "tokenize":
            return answer("200 OK", {"tokens": [7] if "content" in body else []})
        return echo(path, body)

    server.answers["a"] = other
    bench(server, "--num-prompts=1", "--input-len=3", "--output-len=1", "--warmup=0")
    assert server.bodies("a")[0]["prompt"] == [7, 7, 7]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--request-rate", "0"], "--request-rate: 0 must be a number above 0"),
        (["--num-prompts", "0"], "--num-prompts: 0 must be a whole number, 1 or more"),
        (["--range-ratio", "1"], "--range-ratio: 1 must be 0 or more and below 1"),
        (["--trace-speed", "inf"], "--trace-speed: inf must not be infinite"),
        (["--extra-body", "["], "--extra-body: [ is no JSON"),
        (["--extra-body", "[]"], "--extra-body: [] must be a JSON object"),
        (["--goodput", "ttfb:1"], "did you mean ttft?"),
        (["--trace-limit", "2"], "--trace-limit has no effect without --trace"),
        (["--trace", "x", "--num-prompts", "2"], "--num-prompts has no effect with --trace; use"),
        (["--trace", "x", "--input-len=2"], "--input-len has no effect with --trace"),
        (["--prompts", "x", "--same-prompts"], "--same-prompts has no effect with --prompts"),
        (["--burstiness", "2"], "--burstiness has no effect without --request-rate"),
        (["--burstiness=2", "--request-rate=inf"], "no effect at --request-rate inf"),
        (["--same-prompts"], "--same-prompts has no effect with one run"),
        (["--endpoint=chat", "--prompt-tokens=ids"], "--prompt-tokens ids has no effect"),
        (["--prompt-tokens=text", "--vocab-size=9"], "--vocab-size has no effect"),
        (["--trace", "none.csv"], "none.csv cannot be read: No such file"),
        (["--num-prompt", "3"], "is not a flag of moe-serve bench serve; did you mean --num-prom"),
        (["--base-url", "http://127.0.0.1:1"], "http://127.0.0.1:1/v1/models does not answer"),
        (["--base-url", "ftp://a"], "--base-url ftp://a must begin with http"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("moe-serve: error: ") and err.count("\n") == 1
    assert message in err


def test_files_that_cannot_be_written(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench(server, "--num-prompts=1", "--output-len=1", "--save-json", str(tmp_path), code=2)
    assert f"--save-json {tmp_path} cannot be written" in capsys.readouterr().err


def test_kinds_of_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    assert all(f"\n  {name} " in capsys.readouterr().out for name in ["serve"])
    assert main(["bench"]) == 2
    assert f"kinds: {', '.join(KINDS)}" in capsys.readouterr().err
    assert main(["bench", "serv"]) == 2
    assert "'serv' is no kind of benchmark; did you mean serve?" in capsys.readouterr().err


def test_loading_a_server_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'fastapi', 'httpx'):\n"
        "    sys.modules[name] = None\n"
        "from moe_serve.cli import main\n"
        "assert main(['bench', 'serve', '--base-url', 'http://127.0.0.1:1']) == 2\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
