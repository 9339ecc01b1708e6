"""`moe-serve record` and `moe-serve rebalance`, against a scripted server."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_serve.cli import main
from moe_serve.experts.files.documents import plain
from moe_serve.experts.files.placement_files import (
    Style,
    placement_values,
    write_placement,
)
from moe_serve.experts.placement import LayerPlacement, Placement

NOW = Placement.make(2, 4, 2)
SWAPPED = Placement((LayerPlacement(((3, 1), (2, 0))),) * 2)
DONE = {
    "outcome": "done", "seconds": 0.254, "num_moves": 4, "num_bytes": 2_500_000,
    "balancedness": [0.5, 0.9375], "num_layers_switched": 2, "error": None,
}  # fmt: skip


class Scripted(http.server.HTTPServer):
    """Answers `answers[path]`: a status and a body. `asked`: method, path, key and body of each."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, str, str | None, Any]] = []
        self.answers: dict[str, tuple[int, Any]] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Scripted

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        key = self.headers["Authorization"]
        self.server.asked.append((self.command, self.path, key, body))
        status, answer = self.server.answers.get(self.path, (404, {}))
        self.send_response(status)
        self.end_headers()
        text = answer if isinstance(answer, str) else json.dumps(answer)
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def running() -> Iterator[Scripted]:
    with Scripted() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def server(running: Scripted) -> Scripted:
    running.asked.clear()
    running.answers = {
        "/v1/moe/record/start": (200, {"is_recording": True}),
        "/v1/moe/record/stop": (200, {"is_recording": False}),
        "/v1/moe/placement": (200, plain(placement_values(NOW))),
        "/v1/moe/rebalance": (200, DONE),
    }
    return running


Ask = Callable[..., tuple[str, str]]


@pytest.fixture
def ask(server: Scripted, capsys: pytest.CaptureFixture[str]) -> Ask:
    """ask("record", "start") -> what it prints, and on stderr."""

    def run(*argv: str) -> tuple[str, str]:
        assert main([*argv, "--url", server.url]) == 0
        out, err = capsys.readouterr()
        return out, err

    return run


@pytest.mark.parametrize(
    ("flags", "body", "line"),
    [
        ([], {}, "recording counts of expert choices\n"),
        (["--mode", "counts", "--window=7"], {"mode": "counts", "window": 7},
         "recording counts of expert choices\n"),
        (["--mode", "routes"], {"mode": "routes"}, "recording routes of expert choices\n"),
    ],
)  # fmt: skip
def test_start_sends_what_is_given(
    server: Scripted, ask: Ask, flags: list[str], body: Any, line: str
) -> None:
    assert ask("record", "start", *flags) == (line, "")
    assert server.asked == [("POST", "/v1/moe/record/start", None, body)]


def test_stop_says_what_comes_next(server: Scripted, ask: Ask) -> None:
    out, err = ask("record", "stop")
    assert "moe-serve record dump" in out and out.count("\n") == 1 and err == ""
    assert server.asked == [("POST", "/v1/moe/record/stop", None, {})]


@pytest.mark.parametrize(
    ("answer", "note"),
    [
        ({"mode": "counts", "num_windows": 3, "is_recording": True},
         "counts, 3 windows; still recording\n"),
        ({"mode": "routes", "num_tokens": 17, "is_recording": False},
         "routes of 17 tokens; recording is stopped\n"),
    ],
)  # fmt: skip
def test_dump_prints_the_path_alone(server: Scripted, ask: Ask, answer: Any, note: str) -> None:
    server.answers["/v1/moe/record/dump"] = (200, {"path": "/tmp/e.json", **answer})
    assert ask("record", "dump", "--style", "json") == ("/tmp/e.json\n", note)
    assert server.asked == [("POST", "/v1/moe/record/dump", None, {"style": "json"})]


def test_the_admin_key_of_the_flag_or_the_environment_is_sent(
    server: Scripted, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_SERVE_API_KEY", "client")
    ask("record", "start")
    monkeypatch.setenv("MOE_SERVE_ADMIN_API_KEY", "admin")
    ask("rebalance")
    ask("record", "stop", "--api-key", "mine")
    keys = [key for _, _, key, _ in server.asked]
    assert keys == ["Bearer client", "Bearer admin", "Bearer mine"]


def test_rebalance_by_the_load(server: Scripted, ask: Ask) -> None:
    line = "balancedness 0.500 -> 0.938: 4 experts moved, 2.5 MB between ranks, 0.25 s\n"
    assert ask("rebalance") == (line, "")
    assert ask("rebalance", "--max-moves", "0") == (line, "")
    assert [body for _, _, _, body in server.asked] == [{}, {"max_moves": 0}]
    unneeded = DONE | {"outcome": "unneeded", "num_moves": 0, "balancedness": [0.75, 0.75]}
    server.answers["/v1/moe/rebalance"] = (200, unneeded)
    assert ask("rebalance") == ("balancedness 0.750: no expert has to move\n", "")


@pytest.mark.parametrize(
    ("style", "name"),
    [("moe_serve", "p.npz"), ("sglang", "p.json"), ("eplb", "p.pt"), ("tensorrt_llm", "p.yaml")],
)
def test_rebalance_to_a_file_of_each_style(
    server: Scripted, ask: Ask, tmp_path: Path, style: Style, name: str
) -> None:
    write_placement(SWAPPED, tmp_path / name, style)
    ask("rebalance", "--placement", str(tmp_path / name))
    assert server.asked == [
        ("GET", "/v1/moe/placement", None, None),
        ("POST", "/v1/moe/rebalance", None, {"slots": [[3, 1, 2, 0]] * 2}),
    ]


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 2) -> str:
    assert main(list(argv)) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("moe-serve: error: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["record"], "record what? start, stop, dump"),
        (["record", "strat"], "'strat' is not one of start, stop, dump; did you mean start?"),
        (["record", "start", "now"], "'now' is one argument too many"),
        (["record", "start", "--mode", "route"], "--mode route must be one of counts, routes; did"),
        (["record", "start", "--window", "0"], "--window 0 must be a whole number of steps"),
        (["record", "start", "--window", "1e3"], "--window 1e3 must be a whole number of steps"),
        (["record", "start", "--window", str(2**63)], "must be a whole number of steps"),
        (["record", "start", "--mode", "routes", "--window", "7"],
         "--window has no effect with --mode routes"),
        (["record", "start", "--style", "npz"], "--style has no effect with start"),
        (["record", "dump", "--mode", "counts"], "--mode has no effect with dump"),
        (["record", "stop", "--window", "7"], "--window has no effect with stop"),
        (["record", "dump", "--style", "yaml"], "--style yaml must be one of npz, json, pt"),
        (["record", "stop", "--urk", "x"], "--urk is not a flag of moe-serve record; did you mean"),
        (["rebalance", "--max-moves", "-1"], "--max-moves -1 must be a whole number, 0 or more"),
        (["rebalance", "--max-moves", "few"], "--max-moves few must be a whole number"),
        (["rebalance", "--placement", "p.json", "--max-moves", "1"], "--max-moves has no effect"),
        (["rebalance", "--placement", "gone.json"], "gone.json cannot be read"),
        (["rebalance", "stop"], "'stop' is one argument too many"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line_and_changes_nothing(
    server: Scripted, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert message in refusal(capsys, *argv, "--url", server.url)
    assert not any(method == "POST" for method, *_ in server.asked)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (Placement.make(2, 4, 2, num_redundant=2), "[3, 3] slots by rank; the server has [2, 2]"),
        (Placement.make(3, 4, 2), "places the experts of 3 layers; the model has 2"),
        (Placement.make(2, 6, 2), "is for 6 experts, not 4"),
        (Placement.make(2, 4, 4), "is for 4 ranks, not 2"),
    ],
)
def test_a_placement_of_another_size_is_not_sent(
    server: Scripted,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    placement: Placement,
    message: str,
) -> None:
    file = str(tmp_path / "p.json")
    write_placement(placement, file)
    found = refusal(capsys, "rebalance", "--placement", file, "--url", server.url)
    assert message in found and file in found
    assert [method for method, *_ in server.asked] == ["GET"]


@pytest.mark.parametrize(
    ("status", "body", "code", "message"),
    [
        (500, {"error": {"message": "experts were not moved:\nrank 1 ended"}}, 1,
         "answers 500: experts were not moved: rank 1 ended"),
        (401, {"error": {"message": "missing or wrong API key"}}, 1,
         "answers 401: missing or wrong API key"),
        (404, "<html>", 1, "answers 404: Not Found"),
        (200, "<html>", 2, "sends no JSON"),
        (200, [], 2, "sends another answer than expected"),
        (200, {"outcome": "done"}, 2, "sends another answer than expected"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", [["rebalance"], ["record", "dump"]])
def test_other_answers_are_one_line(
    server: Scripted,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    status: int,
    body: Any,
    code: int,
    message: str,
) -> None:
    server.answers |= dict.fromkeys(["/v1/moe/rebalance", "/v1/moe/record/dump"], (status, body))
    assert message in refusal(capsys, *command, "--url", f"{server.url}/", code=code)


@pytest.mark.parametrize("command", [["rebalance"], ["record", "stop"]])
def test_a_server_that_is_not_there_or_is_none(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    nowhere = "http://127.0.0.1:1"
    assert "does not answer: " in refusal(capsys, *command, "--url", nowhere, code=1)
    assert "must begin with http://" in refusal(capsys, *command, "--url", "localhost")
    with Silent() as silent:
        url = f"http://127.0.0.1:{silent.port}"
        assert "does not answer: " in refusal(capsys, *command, "--url", url, code=1)


class Silent:
    """Speaks another protocol: says hello, in no HTTP, and hangs up."""

    def __enter__(self) -> Silent:

        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        connection, _ = self._socket.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"220 hello\r\n")

    def __exit__(self, *exc: object) -> None:
        self._thread.join()
        self._socket.close()
