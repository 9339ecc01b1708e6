"""One server over two nodes, each in a network namespace of its own; a cable joins them.

A node has nothing but its loopback and its end of the cable, and its own name leads to the
loopback, as on many hosts: what the ranks tell each other must go by the right address.

Restarts take most of a minute: they are tested where the environment variable TEST_KILL_SEEDS
is set (see test_rank_failures.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

# What the `start` fixture is: conftest's Server has no importable name.
Start = Callable[..., Any]
OneRank = Callable[[Sequence[str], int], list[str]]

PORT, MASTER_PORT = "8000", "29400"
READY_SECONDS = 90
END_SECONDS = 20
# Run in a node: the lines of the answer to a body, or, without one, a wait for /health.
CLIENT = """
import sys, time, urllib.request
url, seconds, *body = sys.argv[1:]
request = urllib.request.Request(url, *map(str.encode, body))
request.add_header("Content-Type", "application/json")
deadline = time.monotonic() + float(seconds)
while True:
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            for line in answer:
                print(line.decode().strip(), flush=True)
        break
    except OSError as error:
        if time.monotonic() > deadline:
            sys.exit(f"{url}: {error}")
        time.sleep(0.2)
"""


@dataclasses.dataclass(frozen=True)
class Node:
    """A network namespace, and its address on the cable."""

    name: str
    address: str

    @property
    def within(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]

    def ask(self, url: str, body: dict[str, Any] | None = None, seconds: float = 0) -> Any:
        """A running client; tries for that long until it is answered."""
        data = [] if body is None else [json.dumps(body)]
        return subprocess.Popen(
            [*self.within, sys.executable, "-c", CLIENT, url, str(seconds), *data],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Two of them; skips where this process may not make any."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip, of iproute2")
    unique = uuid.uuid4().hex[:8]
    made = [Node(f"moe-{unique}-{number}", f"10.77.1.{number}") for number in (1, 2)]
    try:
        try:
            join(made, [f"moe{unique}{number}" for number in (1, 2)])
        except OSError as error:
            pytest.skip(f"cannot make network namespaces: {error}")
        yield made
    finally:
        for node in made:
            subprocess.run(["ip", "netns", "del", node.name], capture_output=True, timeout=20)


def join(nodes: list[Node], cable: list[str]) -> None:
    for node in nodes:
        ip("netns", "add", node.name)
    near, far = nodes
    ends = [*cable[:1], "netns", near.name, "type", "veth", "peer", "name", *cable[1:]]
    ip("link", "add", *ends, "netns", far.name)
    for node, end in zip(nodes, cable, strict=True):
        ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", end)
        for link in (end, "lo"):
            ip("-n", node.name, "link", "set", link, "up")


def elastic(node: Node, nodes: list[Node]) -> list[str]:
    """The address that is first in alphabetical order is that of rank 0."""
    flags = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{nodes[0].address}:{MASTER_PORT}"]
    # By itself torchrun knows a host by its name, which leads nowhere else here.
    is_host = ["--rdzv-conf", f"is_host={int(node is nodes[0])}"]
    return [*flags, *is_host, "--rdzv-id", "test", "--local-addr", node.address]


def static(node: Node, nodes: list[Node]) -> list[str]:
    master = ["--master-addr", nodes[0].address, "--master-port", MASTER_PORT]
    return [*master, "--node-rank", str(nodes.index(node))]


Meeting = Callable[[Node, list[Node]], list[str]]


def start_on(
    start: Start, nodes: list[Node], meeting: Meeting, model: Path, *torchrun: str
) -> list[Any]:
    """A torchrun on each, ready; the second first, which must not matter."""
    flags = ["--host", "0.0.0.0", "--dtype", "float32", "--num-kv-blocks", "512"]
    flags += ["--enable-expert-parallel", "--collective-timeout", "4"]
    each = ["--nnodes", "2", "--nproc-per-node", "1", *torchrun]
    servers = {}
    for node in reversed(nodes):
        servers[node.name] = start(
            model, *flags, port=PORT, within=node.within, torchrun=[*each, *meeting(node, nodes)]
        )
    made = [servers[node.name] for node in nodes]
    wait_ready(nodes, made)
    return made


def url(node: Node, path: str) -> str:
    return f"http://{node.address}:{PORT}{path}"


def wait_ready(nodes: list[Node], servers: list[Any]) -> None:
    """The API is on the first node."""
    client = nodes[1].ask(url(nodes[0], "/health"), seconds=READY_SECONDS)
    try:
        while client.poll() is None:
            assert all(server.process.poll() is None for server in servers), logs(servers)
            time.sleep(0.1)
        assert client.returncode == 0, client.stdout.read() + logs(servers)
    finally:
        client.kill()
        client.communicate()


def logs(servers: list[Any]) -> str:
    return "\n".join(server.log for server in servers)


def complete(nodes: list[Node], prompt: str) -> str:
    """The text, asked for on the second node."""
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    lines, _ = nodes[1].ask(url(nodes[0], "/v1/completions"), body).communicate(timeout=40)
    text: str = json.loads(lines)["choices"][0]["text"]
    return text


def test_two_nodes_answer_as_one_rank_and_end_together(
    start: Start,
    nodes: list[Node],
    random_model: Path,
    one_rank: OneRank,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    servers = start_on(start, nodes, elastic, random_model)
    assert "2 = 1 x 2 (lanes x tensor-parallel), experts spread over 2" in servers[0].log
    assert [complete(nodes, "abc")] == one_rank(["abc"], 40)
    elsewhere = nodes[1].ask(url(nodes[1], "/health"))
    assert "refused" in elsewhere.communicate(timeout=20)[0], "the API is on the first node only"

    body = {"prompt": "abc", "max_tokens": 200, "stream": True, "ignore_eos": True}
    stream = nodes[1].ask(url(nodes[0], "/v1/completions"), body)
    assert "choices" in stream.stdout.readline()
    servers[1].rank(1).kill()
    rest, _ = stream.communicate(timeout=END_SECONDS)
    *_, error, done = filter(None, rest.splitlines())
    assert "rank 1" in error and nodes[1].address in error and "[DONE]" in done, rest
    for server in servers:
        assert server.process.wait(END_SECONDS) != 0
        server.check_gone()


# Stands in for pdsh and ssh: runs the command in the namespace of each host, with its number.
PDSH = """#!{python}
import subprocess, sys
names = {names}
at = sys.argv.index("-w")
hosts, command = sys.argv[at + 1].split(","), " ".join(sys.argv[at + 2:])
running = []
for number, host in enumerate(hosts):
    one = command.replace("%n", str(number))
    running.append(subprocess.Popen(["ip", "netns", "exec", names[host], "sh", "-c", one]))
sys.exit(max([process.wait() for process in running]))
"""


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra deepspeed")
def test_deepspeed_starts_the_hosts_of_a_hostfile(
    start: Start,
    nodes: list[Node],
    random_model: Path,
    one_rank: OneRank,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hostfile, pdsh = tmp_path / "hostfile", tmp_path / "pdsh"
    hostfile.write_text("".join(f"{node.address} slots=1\n" for node in nodes))
    names = {node.address: node.name for node in nodes}
    pdsh.write_text(PDSH.format(python=sys.executable, names=names))
    pdsh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    launcher = ["--hostfile", str(hostfile), "--no_ssh_check", "--master_addr", nodes[0].address]
    flags = ["--host", "0.0.0.0", "--dtype", "float32", "--num-kv-blocks", "512"]
    server = start(random_model, *flags, "--enable-expert-parallel", port=PORT, deepspeed=launcher)
    wait_ready(nodes, [server])
    assert "2 = 1 x 2 (lanes x tensor-parallel), experts spread over 2" in server.log
    assert [complete(nodes, "abc")] == one_rank(["abc"], 40)
    # A host's launcher ends all of its own, and the other's see that rank gone.
    server.rank(1).kill()
    assert server.process.wait(END_SECONDS) != 0
    server.check_gone(END_SECONDS)


@pytest.mark.skipif("TEST_KILL_SEEDS" not in os.environ, reason="set TEST_KILL_SEEDS")
@pytest.mark.parametrize("meeting", [elastic, static])
def test_both_nodes_come_back_when_one_may_restart(
    start: Start, nodes: list[Node], random_model: Path, one_rank: OneRank, meeting: Meeting
) -> None:
    servers = start_on(start, nodes, meeting, random_model, "--max-restarts", "3")
    first = servers[0].rank(0)
    servers[1].rank(1).kill()
    first.wait(END_SECONDS)
    wait_ready(nodes, servers)
    assert [complete(nodes, "abc")] == one_rank(["abc"], 40)
    for server in servers:
        server.process.terminate()
    for server in servers:
        server.process.wait(END_SECONDS)
        server.check_gone()
