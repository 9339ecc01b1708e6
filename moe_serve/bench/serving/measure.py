"""Runs a load against each server in turn: A, B, A, B, so that a slow minute hits both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from moe_serve.bench.serving.bodies import PATHS
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
        """Which prompts a run gets, from 1; `copy` counts the times a URL stood before.

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

    async def one(index: int, run: int) -> Observed:
        target = targets[index]
        if run < 0:
            requests = load.warmup(procedure.num_warmup, target.model)
        else:
            copy = urls[:index].count(target.url)
            requests = load.requests(procedure.draw(run, copy), target.model)
        part = f"{target.name}: " + ("warming up" if run < 0 else f"run {run + 1}")
        path = PATHS[load.wording.endpoint]
        async with Client(
            target.url, path, api_key=procedure.api_key, timeout=procedure.timeout
        ) as client:
            return await run_load(
                client, requests, procedure.max_concurrency, lambda _: on_request(part)
            )

    for run in range(-1 if procedure.num_warmup else 0, procedure.num_runs):
        for index, target in enumerate(targets):
            seen = await one(index, run)
            if run >= 0:
                observed[target.name].append(seen)
    return observed
