"""Experts over HTTP, on two ranks of a real server: told of, moved, recorded, and hit by faults."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import io
import json
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from moe_serve.cli import main
from moe_serve.experts.files.load_files import from_json, read_load
from moe_serve.experts.files.route_files import read_routes
from moe_serve.experts.placement import Placement
from moe_serve.experts.recording import LoadRecording
from tests.server.streams import Stream, wait_chunks, wait_ends

pytestmark = pytest.mark.dist

# What the `start` fixture is: conftest's Server has no importable name.
Start = Callable[..., Any]

NUM_LAYERS, NUM_EXPERTS, TOP_K = 6, 16, 2
EXPERT_FLAGS = ["-tp", "2", "--enable-expert-parallel", "--enable-eplb"]
SMALL = ["--dtype", "float32", "--num-kv-blocks", "512", "--no-enable-prefix-caching"]
PROMPTS = ["Once upon a time", "The dog ran", "x " * 57, "?"]
NUM_TOKENS = 12
ENDED_SECONDS = 12


def eplb(**config: Any) -> list[str]:
    return ["--eplb-config", json.dumps(config)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded") / "made when needed"


@pytest.fixture(scope="module")
def server(make_server: Start, folder: Path) -> Iterator[Any]:
    """Experts move when they are asked to. Two of 4 redundant slots on each rank."""
    config = eplb(num_redundant_experts=4, step_interval=0, staging_mib=1)
    made = make_server("builtin", *EXPERT_FLAGS, *SMALL, *config, "--expert-record-dir", folder)
    try:
        yield made.wait_ready()
    finally:
        made.close()


def complete(server: Any, prompt: str = PROMPTS[0], max_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    answer = server.complete(prompt, max_tokens=max_tokens, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def texts(server: Any) -> list[str]:
    """Of all prompts at once, in order."""
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: complete(server, prompt), PROMPTS))
    return [answer["choices"][0]["text"] for answer in answers]


@pytest.fixture(scope="module")
def expected(server: Any) -> list[str]:
    return texts(server)


def post(server: Any, path: str, **body: Any) -> dict[str, Any]:
    answer = server.client.post(f"/v1/moe/{path}", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def load_of(server: Any) -> LoadRecording:
    """Checked: each token was counted `TOP_K` times in each layer, and computed as often."""
    recording = from_json(server.client.get("/v1/moe/load").json())
    assert recording.is_conserved and recording.model == "stories-moe"
    rows_L = recording.rows_WLR.sum((0, 2)).tolist()
    assert rows_L == recording.counts_LE.sum(1).tolist()
    assert rows_L == [TOP_K * recording.tokens_WC.sum()] * NUM_LAYERS
    return recording


def slots_of(server: Any) -> list[list[int]]:
    """Where experts lie, all replicas of each having the same weights."""
    answer = server.client.get("/v1/moe/placement?verify=true")
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert [len(sums) for sums in body["checksums"]] == [NUM_EXPERTS] * NUM_LAYERS
    slots: list[list[int]] = body["slots"]
    return slots


def elsewhere() -> list[list[int]]:
    return Placement.make(NUM_LAYERS, NUM_EXPERTS, 2, "round_robin", 4).slots_LP.tolist()


def num_computed(*answers: dict[str, Any]) -> int:
    """Tokens: all but the last of each, which is never an input."""
    return sum(answer["usage"]["total_tokens"] - 1 for answer in answers)


def test_texts_are_the_same_wherever_experts_lie(server: Any, expected: list[str]) -> None:
    first = slots_of(server)
    weights = server.client.get("/v1/moe/placement?verify=true").json()["checksums"]
    by_load = post(server, "rebalance")
    assert by_load["outcome"] == "done" and by_load["num_moves"] > 0
    before, after = by_load["balancedness"]
    assert before < after <= 1
    assert slots_of(server) != first
    assert texts(server) == expected
    to_place = post(server, "rebalance", slots=elsewhere())
    assert to_place["outcome"] == "done" and slots_of(server) == elsewhere()
    assert to_place["num_layers_switched"] == NUM_LAYERS and to_place["num_bytes"] > 0
    assert texts(server) == expected
    assert post(server, "rebalance", slots=elsewhere())["outcome"] == "unneeded"
    assert post(server, "rebalance", max_moves=1)["num_moves"] <= 1
    assert server.client.get("/v1/moe/placement?verify=true").json()["checksums"] == weights
    refused = server.client.post("/v1/moe/rebalance", json={"slots": elsewhere()[:-1]})
    assert refused.status_code == 400 and "of 5 layers" in refused.json()["error"]["message"]
    assert texts(server) == expected


def test_the_load_its_report_and_its_metrics_tell_of_all_traffic(server: Any) -> None:
    before = load_of(server)
    answers = [complete(server, prompt) for prompt in PROMPTS]
    after = load_of(server)
    assert after.tokens_WC.sum() - before.tokens_WC.sum() == num_computed(*answers)
    report = server.client.get("/v1/moe/report").json()
    assert report["tokens"]["total"] == after.tokens_WC.sum()
    assert report["ranks"]["num_ranks"] == 2
    decoded = server.client.get("/v1/moe/report?phase=decode").json()
    assert 0 < decoded["tokens"]["total"] < report["tokens"]["total"]
    page = server.client.get("/v1/moe/report?format=html").text
    assert "Expert load of stories-moe" in page
    metrics = dict(
        line.rsplit(" ", 1)
        for line in server.client.get("/metrics").text.splitlines()
        if re.match("moe_serve:(ep|expert)", line)
    )
    label = '{engine="0",model_name="stories-moe"'
    rows = [
        float(metrics[f'moe_serve:eplb_tokens_per_rank_total{label},rank="{rank}"}}'])
        for rank in (0, 1)
    ]
    assert rows == after.rows_WLR.sum((0, 1)).tolist()
    assert metrics[f'moe_serve:ep_rank_up{label},rank="1"}}'] == "1.0"
    assert 0 < float(metrics[f'moe_serve:eplb_balancedness{label},stat="min"}}']) <= 1
    assert len(metrics) < 30


def test_communication_is_told_of_both_ranks_and_counted(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    complete(server)
    report = server.client.get("/v1/moe/communication").json()
    assert (report["model"], report["num_ranks"]) == ("stories-moe", 2)
    groups = [[group["group"] for group in rank["groups"]] for rank in report["ranks"]]
    assert groups == [["lane", "experts"], ["lane", "experts"]]
    of_ranks = [
        {
            (group["group"], row["operation"], row["least_bytes"]): row["calls"]
            for group in rank["groups"]
            for row in group["operations"]
            if row["seconds"] > 0 and row["calls"] > 0
        }
        for rank in report["ranks"]
    ]
    # Messages of all-to-alls are as long as the routing makes them; all else is alike everywhere.
    own, other = ({key for key in calls if key[1] != "all_to_all"} for calls in of_ranks)
    assert own == other != set()
    text = server.client.get("/metrics").text
    counted = re.findall(r"^moe_serve:comm_calls_total\{.*\} (\S+)$", text, re.MULTILINE)
    assert sum(map(float, counted)) == sum(of_ranks[0].values())
    assert main(["report", "--communication", "--url", str(server.client.base_url)]) == 0
    assert "lane: 2 ranks by" in capsys.readouterr().out


def test_recorded_counts_are_those_of_the_traffic(server: Any, folder: Path) -> None:
    complete(server)
    assert post(server, "record/start", window=7) == {"is_recording": True}
    before = load_of(server)
    answers = [complete(server, PROMPTS[0])]
    # In the middle of it experts move, which is none of the recording's business.
    post(server, "rebalance", slots=np.roll(elsewhere(), 3, axis=0).tolist())
    post(server, "rebalance", slots=Placement.make(6, 16, 2, "linear", 4).slots_LP.tolist())
    answers += [complete(server, PROMPTS[1])]
    after = load_of(server)
    told = post(server, "record/dump", style="json")
    complete(server)
    second = post(server, "record/dump", style="pt")
    assert post(server, "record/stop") == {"is_recording": False}
    assert Path(told["path"]).parent == folder and told["is_recording"]
    recording = read_load(told["path"])
    assert recording.is_conserved and (recording.steps_W[:-1] == 7).all()
    assert recording.tokens_WC.sum() == num_computed(*answers)
    assert (recording.counts_LE == after.counts_LE - before.counts_LE).all()
    assert recording.placement is not None
    assert recording.placement.slots_LP.tolist() == slots_of(server)
    last = read_load(second["path"], top_k=TOP_K)
    assert (last.counts_LE == load_of(server).counts_LE - after.counts_LE).all()


def test_recorded_routes_are_those_that_clients_are_told(server: Any) -> None:
    before = load_of(server)
    assert post(server, "record/start", mode="routes") == {"is_recording": True}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        answer = client.completions.create(
            model="stories-moe",
            prompt=PROMPTS[1],
            max_tokens=17,
            temperature=0,
            extra_body={"return_routed_experts": True, "ignore_eos": True},
        )
    told = post(server, "record/dump")
    post(server, "record/stop")
    choice = answer.choices[0].model_dump()
    ids_TLK = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    routes = read_routes(told["path"])
    assert answer.usage is not None
    assert told["num_tokens"] == routes.num_tokens == answer.usage.total_tokens - 1
    assert ids_TLK.shape == (routes.num_tokens, NUM_LAYERS, TOP_K)
    assert (routes.ids_TLK == ids_TLK).all()
    assert (routes.counts_LE == load_of(server).counts_LE - before.counts_LE).all()


def test_from_the_command_line(
    server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = ["--url", server.url]
    assert main(["record", "start", "--window", "5", *url]) == 0
    complete(server)
    assert main(["record", "dump", "--style", "json", *url]) == 0
    assert main(["record", "stop", *url]) == 0
    path = capsys.readouterr().out.splitlines()[1]
    assert main(["report", path]) == 0
    place = tmp_path / "place.json"
    place.write_text(json.dumps({"phy2log": elsewhere()}))
    assert main(["rebalance", "--placement", str(place), *url]) == 0
    assert slots_of(server) == elsewhere()
    assert main(["rebalance", *url]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"balancedness 0\.\d+ -> \d\.\d+: \d+ experts? moved, ", line)
    assert main(["record", "dump", "--style", "npz", *url]) == 0
    (tmp_path / "file").write_text("")
    assert main(["rebalance", "--placement", str(tmp_path / "file"), *url]) == 2


def test_of_several_at_once_one_moves_experts_and_who_leaves_is_forgotten(
    server: Any, expected: list[str]
) -> None:
    maps = [elsewhere(), Placement.make(6, 16, 2, "linear", 4).slots_LP.tolist()]
    streams = [Stream(server.url, prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS]
    with httpx.Client(base_url=server.url, timeout=0.001) as hasty:
        for number in range(4):
            with contextlib.suppress(httpx.TimeoutException):
                hasty.post("/v1/moe/rebalance", json={"slots": maps[number % 2]})
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(
                lambda number: server.client.post(
                    "/v1/moe/rebalance", json={"slots": maps[number % 2]}
                ),
                range(4),
            )
        )
    for answer in answers:
        if answer.status_code != 200:
            assert answer.status_code == 400 and "already" in answer.json()["error"]["message"]
    wait_ends(streams, 20)
    assert [stream.text for stream in streams] == expected
    assert slots_of(server) in maps


class Mover(threading.Thread):
    """Moves all experts to and fro until that is answered by the server's end: `last`."""

    def __init__(self, server: Any) -> None:
        super().__init__(daemon=True)
        self._url = server.url
        self.num_done = 0
        self.last: int | Exception | None = None
        self.start()

    def run(self) -> None:
        maps = [elsewhere(), Placement.make(6, 16, 2, "linear", 4).slots_LP.tolist()]
        with httpx.Client(base_url=self._url, timeout=20) as client:
            while self.last is None:
                try:
                    body = {"slots": maps[self.num_done % 2]}
                    status = client.post("/v1/moe/rebalance", json=body).status_code
                    self.num_done += status == 200
                    # 400: others move experts right now.
                    self.last = status if status not in (200, 400) else None
                except httpx.TransportError as error:
                    self.last = error

    def check_told(self) -> None:
        """What waits at the end, or comes after it, is not left without an answer."""
        self.join(5)
        assert self.last == 503 or isinstance(self.last, httpx.ConnectError), repr(self.last)


def test_a_signal_ends_it_in_order_while_experts_move(server: Any, expected: list[str]) -> None:
    """The last one for this server."""
    streams = [Stream(server.url, prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS]
    mover = Mover(server)
    wait_chunks(streams, 8, seconds=20)
    while not mover.num_done:
        assert mover.last is None
        time.sleep(0.005)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0, server.log
    server.check_gone()
    mover.check_told()
    wait_ends(streams, 5)
    assert [stream.text for stream in streams] == expected
    assert "Traceback" not in server.log


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where servers put their sockets: a path short enough for them."""
    folder = Path(tempfile.mkdtemp(prefix="moe-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


def test_rebalancing_by_itself_is_not_noticed_and_a_dead_rank_is(
    start: Start, temporary: Path, expected: list[str]
) -> None:
    config = eplb(num_redundant_experts=4, step_interval=1, window_size=8, min_gain=-1)
    # Not by shared memory, over which streams might be done before the rank is killed.
    flags = ["--collective-timeout", "4", "--comm-backend", "gloo", *config]
    server = start("builtin", *EXPERT_FLAGS, *SMALL, *flags).wait_ready()
    assert texts(server) == expected
    load_of(server)
    moved = re.compile(r"moved \d+ experts? in")
    assert len(moved.findall(server.log)) > 3
    streams = [Stream(server.url, prompt, max_tokens=500) for prompt in PROMPTS * 3]
    # All: one that comes once the rank is dead would be refused.
    for stream in streams:
        wait_chunks([stream], 1, seconds=30)
    num_moved = len(moved.findall(server.log))
    deadline = time.monotonic() + 20
    while len(moved.findall(server.log)) <= num_moved:
        assert time.monotonic() < deadline, "experts do not move while streams run"
        time.sleep(0.01)
    mover = Mover(server)
    server.rank(1).kill()
    hit = time.monotonic()
    assert wait_ends(streams, ENDED_SECONDS) - hit < ENDED_SECONDS
    for stream in streams:
        assert stream.was_done and stream.breakage is None, stream
        assert stream.error is not None and "rank 1" in stream.error["message"], stream
        text = expected[PROMPTS.index(stream.prompt)]
        length = min(len(text), len(stream.text)) - 1
        assert stream.text[:length] == text[:length]
    assert server.process.wait(ENDED_SECONDS) == 1
    server.check_gone()
    mover.check_told()
    # The launcher is torch's, and leaves an empty folder.
    left = [path for path in temporary.iterdir() if not path.name.startswith("torchelastic")]
    assert left == []


def test_a_placement_that_cannot_be_is_one_line_before_weights_are_read(
    start: Start, tmp_path: Path
) -> None:
    file = tmp_path / "place.json"
    file.write_text(json.dumps({"phy2log": [[*range(15), 0]] * NUM_LAYERS}))
    flags = ["-tp", "2", "--enable-expert-parallel", "--init-expert-location", file]
    server = start("builtin", *SMALL, *flags)
    assert server.process.wait(40) == 2, server.log
    server.check_gone()
    lines = [line for line in server.log.splitlines() if "moe-serve: error: " in line]
    assert lines == [f"moe-serve: error: {file}: layer 0: expert 15 has no rank"], server.log
    assert "Traceback" not in server.log and "has read its" not in server.log
