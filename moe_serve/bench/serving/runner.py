"""Gives a load to a server: open loop, closed loop, or both at once."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence

from moe_serve.bench.serving.bodies import Planned
from moe_serve.bench.serving.client import Client
from moe_serve.bench.serving.outcome import Outcome


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One run: what became of each request, its length, and what the client itself took."""

    outcomes: list[Outcome]
    duration: float
    client_cpu_seconds: float


async def run_load(
    client: Client,
    requests: Sequence[Planned],
    max_concurrency: int | None,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
) -> Observed:
    """Send each request when it is due, but never more than `max_concurrency` at a time.

    With all due at once this is a closed loop; one that is late is sent as soon as it may.
    """
    free = asyncio.Semaphore(max_concurrency or max(1, len(requests)))
    outcomes: list[Outcome] = []

    async def send(planned: Planned) -> None:
        try:
            outcome = await client.send(planned)
        finally:
            free.release()
        outcomes.append(outcome)
        on_outcome(outcome)

    with _no_collection():
        cpu = time.process_time()
        client.begin()
        async with asyncio.TaskGroup() as group:
            for planned in requests:
                if (wait := planned.due - client.now()) > 0:
                    await asyncio.sleep(wait)
                await free.acquire()
                group.create_task(send(planned))
        return Observed(
            outcomes=outcomes,
            duration=client.now(),
            client_cpu_seconds=time.process_time() - cpu,
        )


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A pause of the garbage collector would be taken for one of the server."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
