"""Requests to a real server: official client, hostile input, disconnects, and what leaks."""

from __future__ import annotations

import concurrent.futures
import json
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

pytestmark = pytest.mark.dist

ROOT = Path(__file__).resolve().parents[2]


def known(server: Any) -> str:
    """The text of a fixed greedy request."""
    answer = server.complete([1, 2, 3], max_tokens=12, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def wait_idle(server: Any, seconds: float = 10) -> None:
    """Until the engine holds no request."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        metrics = server.client.get("/metrics").text
        running = [float(line.split()[-1]) for line in metrics.splitlines()
                   if line.startswith(("moe_serve:num_requests_running{",
                                       "moe_serve:num_requests_waiting{",
                                       "moe_serve:kv_cache_usage_perc{"))]  # fmt: skip
        assert len(running) == 3
        if running == [0, 0, 0]:
            return
        time.sleep(0.05)
    raise AssertionError(f"still busy after {seconds} s: {running}")


def test_the_official_client_gets_what_it_expects(server: Any) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any")
    whole = client.completions.create(model="m", prompt="abc", max_tokens=12, temperature=0)
    chunks = client.completions.create(
        model="m", prompt="abc", max_tokens=12, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.usage is not None and whole.usage.completion_tokens <= 12

    two = client.completions.create(
        model="m", prompt="abc", max_tokens=8, temperature=1, seed=7, n=2, logprobs=2
    )
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[0].text != two.choices[1].text
    assert two.choices[0].logprobs is not None

    stop = whole.choices[0].text[3:5]
    stopped = client.completions.create(
        model="m", prompt="abc", max_tokens=12, temperature=0, stop=[stop]
    )
    assert stopped.choices[0].text == whole.choices[0].text.split(stop)[0]
    assert stopped.choices[0].finish_reason == "stop"

    messages: Any = [{"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(
        model="m", messages=messages, max_completion_tokens=8, temperature=0, logprobs=True
    )
    stream = client.chat.completions.create(
        model="m", messages=messages, max_completion_tokens=8, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    events = list(stream)
    streamed = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert streamed == chat.choices[0].message.content
    assert events[-1].usage == chat.usage
    assert [model.id for model in client.models.list()] == ["m"]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="abc")


HOSTILE: list[tuple[dict[str, Any] | bytes, int]] = [
    (b"{", 400),
    (b"", 400),
    (b"[]", 400),
    (b"[" * 100_000, 400),
    (b'{"prompt": "a", "temperature": NaN}', 400),
    (b'{"prompt": "a", "top_p": Infinity}', 400),
    ({"prompt": [320]}, 400),
    ({"prompt": [-1]}, 400),
    ({"prompt": [9223372036854775807]}, 400),
    ({"prompt": [1.5]}, 400),
    ({"prompt": ""}, 400),
    ({"prompt": [[]]}, 400),
    ({"prompt": [7] * 256}, 400),
    ({"prompt": "a", "logit_bias": {"320": 1}}, 400),
    ({"prompt": "a", "logit_bias": {"-1": 1}}, 400),
    ({"prompt": "a", "logit_bias": {"abc": 1}}, 400),
    ({"prompt": "a", "stop_token_ids": [320]}, 400),
    ({"prompt": "a", "stop": [""]}, 400),
    ({"prompt": "a", "model": "other"}, 404),
    ({"prompt": "a", "n": 100_000}, 400),
    ({"prompt": "a", "max_tokens": -1}, 400),
    ({"prompt": "a", "temperature": "0.5"}, 400),
    ({"prompt": "a", "response_format": {"type": "json_object"}}, 400),
    ({"prompt": "x" * (17 * 2**20)}, 413),
]


def test_hostile_requests_get_a_clear_error_and_disturb_nobody(server: Any) -> None:
    expected = known(server)
    steady = concurrent.futures.ThreadPoolExecutor(2)
    for body, status in HOSTILE:
        neighbours = [steady.submit(known, server) for _ in range(2)]
        if isinstance(body, bytes):
            answer = server.client.post("/v1/completions", content=body)
        else:
            answer = server.client.post("/v1/completions", json={"max_tokens": 2} | body)
        shown = str(body)[:60]
        assert answer.status_code == status, (shown, answer.text[:300])
        error = json.loads(answer.content)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"], shown
        assert [future.result(30) for future in neighbours] == [expected] * 2
        assert server.client.get("/health").status_code == 200
    assert known(server) == expected


def test_a_client_that_leaves_frees_its_requests(server: Any) -> None:
    fields = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "n": 3, "temperature": 1}
    for stream in (True, False):
        with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=0.15) as client:
            url = f"{server.url}/v1/completions"
            with client.stream("POST", url, json=fields | {"stream": stream}) as answer:
                for _ in answer.iter_raw():
                    # The first bytes are enough; then leave without reading on.
                    raise httpx.ReadTimeout("left")
        wait_idle(server)
    known(server)


def test_stop_strings_and_characters_come_whole_from_the_engine(
    start: Callable[..., Any], scripted_model: Callable[..., Path]
) -> None:
    text = "ab cd<STOP>ef 世é😀"
    followers: dict[int, dict[int, float]] = {}
    tokens = [ord("?"), *dict.fromkeys(text.encode()), 256]
    # Bytes of the text are distinct but for the spaces: the script writes each once.
    for current, following in zip(tokens, tokens[1:], strict=False):
        followers[current] = {following: 20.0}
    expected = bytes(token for token in tokens[1:-1]).decode(errors="replace")
    server = start(scripted_model(followers)).wait_ready()
    for stop, include in [(["<STOP>"], False), (["<STOP>"], True), (["cd<", "d<S"], False),
                          (["P"], True), ([], False)]:  # fmt: skip
        fields = {"max_tokens": 64, "stop": stop, "include_stop_str_in_output": include}
        whole = server.complete("?", **fields).json()
        ends = [expected.find(s) + len(s) for s in stop if s in expected]
        text_end = min(ends, default=len(expected))
        matched = next((s for s in stop if expected[:text_end].endswith(s)), "")
        want = expected[:text_end] if include else expected[: text_end - len(matched)]
        assert whole["choices"][0]["text"] == want
        assert whole["choices"][0]["finish_reason"] == "stop"
        streamed = server.client.post(
            "/v1/completions", json={"prompt": "?", "temperature": 0, "stream": True} | fields
        )
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line[6:7] == "{"]
        assert "".join(event["choices"][0]["text"] for event in events) == want
    for cut in range(1, len(tokens)):
        whole = server.complete("?", max_tokens=cut).json()["choices"][0]["text"]
        streamed = server.client.post(
            "/v1/completions",
            json={"prompt": "?", "temperature": 0, "stream": True, "max_tokens": cut},
        )
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line[6:7] == "{"]
        assert "".join(event["choices"][0]["text"] for event in events) == whole


@pytest.mark.slow
def test_memory_stays_small_over_2000_requests(start: Callable[..., Any]) -> None:
    server = start("builtin").wait_ready()

    def resident() -> float:
        own = psutil.Process(server.process.pid)
        return sum(p.memory_info().rss for p in [own, *own.children(recursive=True)]) / 2**20

    def batch(first: int, count: int) -> None:
        def one(number: int) -> int:
            ids = [(number * 31 + i * 7) % 4000 + 1 for i in range(number % 40 + 1)]
            code: int = server.complete(ids, max_tokens=number % 5 + 1).status_code
            return code

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            assert set(pool.map(one, range(first, first + count))) == {200}

    # The KV pool is touched bit by bit: fill it before measuring growth.
    prompts = [[(i * 13 + j) % 4000 for j in range(1000)] for i in range(95)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda ids: server.complete(ids, max_tokens=1), prompts))
    batch(0, 500)
    before = resident()
    batch(500, 2000)
    after = resident()
    assert after < 1536, f"{after:.0f} MiB resident"
    assert after - before < 16, f"grew from {before:.0f} to {after:.0f} MiB"
    wait_idle(server)
    assert server.end() == 0


def test_the_readme_curl_answers_as_printed(start: Callable[..., Any]) -> None:
    server = start("builtin").wait_ready()
    readme = (ROOT / "README.md").read_text()
    blocks = [block.strip() for block in readme.split("```")[1::2]]
    at = next(i for i, block in enumerate(blocks) if block.startswith("curl "))
    command = shlex.split(blocks[at].replace("http://127.0.0.1:8000", server.url))
    printed = json.loads(blocks[at + 1].replace("\n", ""))
    result = subprocess.run([*command, "-s"], capture_output=True, text=True, timeout=30)
    answer = json.loads(result.stdout)
    for varying in ("id", "created"):
        del answer[varying], printed[varying]
    assert answer == printed
    assert blocks[at] in server.log.replace(server.url, "http://127.0.0.1:8000")


def test_scoring_and_penalties_work_on_the_real_engine(server: Any) -> None:
    scored = server.complete([*range(1, 41)], echo=True, logprobs=2, max_tokens=0).json()
    logprobs = scored["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == 40 and logprobs["token_logprobs"][0] is None
    again = server.complete([*range(1, 41)], echo=True, logprobs=2, max_tokens=0).json()
    assert again["choices"] == scored["choices"]
    fields = {"n": 3, "temperature": 1, "seed": 11, "logprobs": 1, "ignore_eos": True}
    three = [server.complete([1, 2, 3], **fields).json()["choices"] for _ in range(2)]
    assert three[0] == three[1] and len({choice["text"] for choice in three[0]}) == 3
    plain = server.complete([1, 2, 3], ignore_eos=True).json()["choices"][0]["text"]
    shy = server.complete([1, 2, 3], ignore_eos=True, frequency_penalty=2, presence_penalty=2)
    assert shy.json()["choices"][0]["text"] != plain
    prompt = [i % 200 for i in range(50)]
    cached = [server.complete(prompt).json()["usage"] for _ in range(2)][1]
    assert cached["prompt_tokens_details"]["cached_tokens"] == 48
