from __future__ import annotations

import dataclasses
import html.parser
import http.server
import io
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from moe_serve.cli import main
from moe_serve.experts.analysis.report import build_report
from moe_serve.experts.files.load_files import to_json, write_load
from moe_serve.experts.files.route_files import write_routes
from moe_serve.experts.placement import Placement
from moe_serve.experts.step_cost import StepCost
from moe_serve.parallel.comm_log import CommRow, GroupCommunication
from moe_serve.reports.communication import build as build_communication
from moe_serve.reports.page import render_page
from moe_serve.reports.terminal import print_report
from tests.experts.recordings import make_recording, random_routes

COST = StepCost(read_seconds=0.0, row_seconds=1e-3, source="measured")
LOAD = make_recording(
    [[30, 20, 10, 20], [0, 20, 40, 20]],
    placement=Placement.make(2, 4, 2),
    steps_W=np.array([10]),
    seconds_W=np.array([1.0]),
    cost=COST,
)


ROW = CommRow(
    operation="all_gather", least_bytes=2**20, calls=4, message_bytes=4 * 2**20,
    bytes_sent=3 * 2**19, seconds=2.0, longest_seconds=1.5,
)  # fmt: skip
UNTIMED = dataclasses.replace(ROW, seconds=None, longest_seconds=None)
COMMUNICATION = build_communication(
    [
        [GroupCommunication(group="experts", backend="gloo", size=2, rows=[row])]
        for row in (ROW, UNTIMED)
    ]
) | {"model": "tiny"}


@pytest.fixture
def load_file(tmp_path: Path) -> str:
    write_load(LOAD, tmp_path / "load.json")
    return str(tmp_path / "load.json")


def report_of(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["report", "--json", *argv]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 2) -> str:
    assert main(["report", *argv]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("moe-serve: error: ") and err.count("\n") == 1
    return err


def test_json_of_a_file(load_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_of(capsys, load_file) == build_report(LOAD)


def test_files_are_taken_together(load_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(capsys, load_file, load_file)
    assert (report["num_windows"], report["tokens"]["total"]) == (2, 160)


def test_options_reach_the_report(
    tmp_path: Path, load_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_load(make_recording([[80, 0, 0, 0]] * 2), tmp_path / "before.npz")
    report = report_of(
        capsys, load_file, "--ranks", "4", "--redundant=4",
        "--baseline", str(tmp_path / "before.npz"),
    )  # fmt: skip
    assert (report["ranks"]["num_ranks"], report["ranks"]["num_redundant"]) == (4, 4)
    assert report["drift"]["max"] == 1
    assert report_of(capsys, load_file, "--phase", "decode")["tokens"]["total"] == 0
    assert report_of(capsys, load_file, "--phase=prefill")["tokens"]["total"] == 80


def test_routes_and_dumps_are_loads_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    routes = random_routes(0, 17, 2, 7, 2)
    write_routes(routes, tmp_path / "routes.npz")
    report = report_of(capsys, str(tmp_path / "routes.npz"))
    assert report["load"] == routes.counts_LE.tolist()
    (tmp_path / "dump.json").write_text(json.dumps({"logical_count": routes.counts_LE.tolist()}))
    assert report_of(capsys, str(tmp_path / "dump.json"), "--top-k", "2")["load"] == report["load"]
    assert "top_k is missing" in refusal(capsys, str(tmp_path / "dump.json"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give either recorded FILEs, or --url"),
        (["FILE", "--url", "http://localhost"], "give either recorded FILEs, or --url"),
        (
            ["FILE", "--rank", "2"],
            "--rank is not a flag of moe-serve report; did you mean --ranks?",
        ),
        (["FILE", "--ranks", "0"], "--ranks 0 must be a whole number, 1 or more"),
        (["FILE", "--ranks", "two"], "--ranks two must be a whole number"),
        (["FILE", "--ranks"], "--ranks needs a value"),
        (["FILE", "--redundant", "1"], "--redundant has no effect without --ranks"),
        (["FILE", "--ranks", "2", "--redundant", "9"], "9 redundant experts"),
        (["FILE", "--phase", "decoding"], "did you mean decode?"),
        (["FILE", "--api-key", "k"], "--api-key has no effect without --url"),
        (["FILE", "--top-k", "3"], "top_k is 1 in the file, but 3 was given"),
        (["FILE", "--baseline", "gone.json"], "gone.json cannot be read: No such file"),
        (["FILE", "--html", "gone/page.html"], "--html gone/page.html cannot be written"),
        (["gone.json"], "gone.json cannot be read"),
        (["--communication"], "--communication needs --url"),
        (["FILE", "--communication"], "a FILE has no effect with --communication"),
        (
            ["--communication", "--url", "http://localhost", "--top-k", "2"],
            "--top-k has no effect with --communication",
        ),
        (["--url", "localhost:8000"], "--url localhost:8000 must begin with http://"),
        (["--url", "http://localhost", "--top-k", "2"], "--top-k has no effect with --url"),
    ],
)
def test_what_cannot_be_is_one_line(
    load_file: str, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    argv = [load_file if word == "FILE" else word for word in argv]
    assert message in refusal(capsys, *argv)


class Server(http.server.BaseHTTPRequestHandler):
    """Answers /v1/moe/load as the server would, and a few other ways under other paths."""

    def do_GET(self) -> None:
        is_known = self.headers["Authorization"] == "Bearer secret"
        answers = {
            "/v1/moe/load": (200, json.dumps(to_json(LOAD))),
            "/v1/moe/communication": (200, json.dumps(COMMUNICATION)),
            "/other/v1/moe/communication": (200, "[]"),
            "/html/v1/moe/load": (200, "<html>"),
            "/other/v1/moe/load": (200, "[]"),
            "/no-moe/v1/moe/load": (404, '{"error": {"message": "tiny has no MoE\\nlayers"}}'),
        }
        status, body = answers.get(self.path, (500, "")) if is_known else (401, "{}")
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Server) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def test_a_running_server_is_asked(
    server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert report_of(capsys, "--url", f"{server}/", "--api-key=secret") == build_report(LOAD)
    monkeypatch.setenv("MOE_SERVE_API_KEY", "secret")
    assert report_of(capsys, "--url", server) == build_report(LOAD)


@pytest.mark.parametrize(
    ("path", "key", "code", "message"),
    [
        ("", "wrong", 1, "/v1/moe/load answers 401: Unauthorized"),
        ("/no-moe", "secret", 1, "answers 404: tiny has no MoE layers"),
        ("/html", "secret", 2, "sends no JSON"),
        ("/other", "secret", 2, "must hold names with values, not list"),
    ],
)
def test_answers_that_are_no_load(
    server: str, capsys: pytest.CaptureFixture[str], path: str, key: str, code: int, message: str
) -> None:
    assert message in refusal(capsys, "--url", server + path, "--api-key", key, code=code)


def test_communication_is_asked_for_and_shown(
    server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--communication", "--url", server, "--api-key", "secret"]
    assert report_of(capsys, *argv) == COMMUNICATION
    assert main(["report", *argv]) == 0
    text = capsys.readouterr().out
    assert "Communication of tiny" in text
    assert "experts: 2 ranks by gloo, 4 calls a rank, 3.0 MiB sent by all ranks" in text
    # A mean of 0.5 s for each of 4 messages of 1 MiB; those of two ranks are gathered.
    assert re.search(r"0 +experts +all_gather +1 MiB +4 +1\.5 +500,000 +1,500,000 +2 ", text)
    assert re.search(r"1 +experts +all_gather +1 MiB +4 +1\.5 +- +- +- ", text)
    other = refusal(capsys, *argv[:2], f"{server}/other", *argv[3:])
    assert "sends no report on communication" in other


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not answer" in refusal(capsys, "--url", "http://127.0.0.1:1", code=1)


def text_of(report: dict[str, Any], width: int = 100, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    print_report(report, Console(file=file, width=width))
    file.flush()
    return raw.getvalue().decode(encoding)


def test_the_map_and_the_tables_on_a_terminal() -> None:
    report = build_report(LOAD, baseline=make_recording([[80, 0, 0, 0]] * 2))
    text = text_of(report)
    lines = [line.rstrip() for line in text.splitlines()]
    # x mean: 1.5 1 0.5 1 and 0 1 2 1.
    assert "0 ▅▄▃▄" in lines and "1 ·▄▆▄" in lines
    for sentence in report["summary"]:
        assert sentence in " ".join(text.split())
    for title in ("Hottest experts", "Least even layers", "Rows of ranks", "What rebalancing",
                  "moved most since tiny"):  # fmt: skip
        assert title in text
    assert "\x1b" not in text


def test_a_terminal_without_unicode_gets_ascii() -> None:
    text = text_of(build_report(LOAD), encoding="ascii")
    lines = [line.rstrip() for line in text.splitlines()]
    assert "0 +=-=" in lines and "1  =*=" in lines


def test_a_map_wider_than_the_terminal_shows_the_hottest_of_neighbours() -> None:
    counts_LE = np.ones((1, 300), dtype=np.int64)
    counts_LE[0, 7] = 100
    text = text_of(build_report(make_recording(counts_LE)), width=62)
    assert "each cell the hottest of 6 experts" in " ".join(text.split())
    assert f"0 ▃█{'▃' * 48}" in [line.rstrip() for line in text.splitlines()]


def test_an_empty_load_and_one_rank_are_said_plainly() -> None:
    assert "No token was recorded yet." in text_of(build_report(make_recording(np.zeros((1, 2)))))
    one = text_of(build_report(LOAD, num_ranks=1))
    assert "there is no imbalance over ranks" in one and "What rebalancing" not in one


class Page(html.parser.HTMLParser):
    """What a browser takes of a page: its scripts by id, title, and all that names an address."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: dict[str, str] = {}
        self.title = ""
        self.addresses: list[str] = []
        self._open: tuple[str, str] = ("", "")
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self._open = (tag, values.get("id") or "")
        self.addresses += [values[name] or "" for name in ("src", "href", "data") if name in values]

    def handle_endtag(self, tag: str) -> None:
        self._open = ("", "")

    def handle_data(self, data: str) -> None:
        tag, name = self._open
        if tag == "script":
            self.scripts[name] = self.scripts.get(name, "") + data
        elif tag == "title":
            self.title += data


@pytest.mark.parametrize(
    "model",
    ["tiny", "</script><b>x</b>", "<!--<script>", "{{report}}", "{{page.css}} \\1 'ä\u2028"],
)
def test_the_page_holds_the_report_whatever_the_model_is_called(model: str) -> None:
    report = build_report(make_recording([[1, 2, 0]], model=model))
    page = Page(render_page(report))
    assert json.loads(page.scripts["report"]) == report
    assert page.title == f"Expert load of {model}"
    assert set(page.scripts) == {"report", ""}


def test_the_page_loads_nothing() -> None:
    text = render_page(build_report(LOAD))
    assert Page(text).addresses == []
    # The name of a standard, which no browser opens, and which SVG cannot do without.
    others = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttp|WebSocket|import\(", others)
    assert "default-src 'none'" in text


def test_the_page_of_a_large_model_is_small() -> None:
    random = np.random.default_rng(0)
    counts_LE = random.multinomial(8 * 10**6, random.dirichlet(np.full(256, 0.5)), size=64)
    recording = make_recording(counts_LE, top_k=8)
    text = render_page(build_report(recording, num_ranks=8, baseline=recording))
    assert len(text.encode()) < 400_000


def test_each_part_that_the_script_fills_is_in_the_page() -> None:
    text = render_page(build_report(LOAD))
    wanted = set(re.findall(r'(?:byId|show)\("([^"]+)"\)', text))
    assert wanted and wanted == set(re.findall(r' id="([^"]+)"', text))


def test_the_page_is_written(
    tmp_path: Path, load_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "page.html"
    assert main(["report", load_file, "--html", str(target)]) == 0
    assert capsys.readouterr() == ("", f"{target}: written\n")
    assert target.read_text(encoding="utf-8") == render_page(build_report(LOAD))
    assert report_of(capsys, load_file, "--html", str(target)) == build_report(LOAD)
