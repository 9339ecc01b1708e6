"""Runs a load against each server in turn: A, B, A, B, so that a slow minute hits both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from moe_serve.bench.serving.bodies import PATHS, Planned
from moe_serve.bench.serving.client import Client
from moe_serve.bench.serving.loads import Load
from moe_serve.bench.serving.runner import Observed, run_load
from moe_serve.bench.serving.targets import Target


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Procedure:
    """How often and how. `num_warmup` requests go to each server before its first run."""

    num_runs: int = 1
    num_warmup: int = 0
    max_concurrency: int | None = None
    is_same_each_run: bool = False
    timeout: float = 3600.0
    api_key: str | None = None

    def draw(self, run: int, copy: int) -> int:
        """Which prompts a run (from 0) gets; `copy` counts the times a URL stood before.

        A server that is compared with itself must not find its prompts cached.
        """
        return 1 + copy * self.num_runs + (0 if self.is_same_each_run else run)


async def measure(
    targets: Sequence[Target],
    load: Load,
    procedure: Procedure,
    on_request: Callable[[str], None] = lambda _: None,
) -> dict[str, list[Observed]]:
    """What was observed of each server, run by run; `on_request` is told of each one's end."""
    observed: dict[str, list[Observed]] = {target.name: [] for target in targets}
    urls = [target.url for target in targets]
    path = PATHS[load.wording.endpoint]
    async with AsyncExitStack() as stack:
        # One client for all runs: a connection is opened once, while warming up where that is done.
        clients = [
            await stack.enter_async_context(
                Client(url, path, api_key=procedure.api_key, timeout=procedure.timeout)
            )
            for url in urls
        ]

        async def one(index: int, requests: list[Planned], part: str) -> Observed:
            name = f"{targets[index].name}: {part}"
            return await run_load(
                clients[index], requests, procedure.max_concurrency, lambda _: on_request(name)
            )

        for index, target in enumerate(targets):
            await one(index, load.warmup(procedure.num_warmup, target.model), "warming up")
        for run in range(procedure.num_runs):
            for index, target in enumerate(targets):
                copy = urls[:index].count(target.url)
                requests = load.requests(procedure.draw(run, copy), target.model)
                observed[target.name].append(await one(index, requests, f"run {run + 1}"))
    return observed
