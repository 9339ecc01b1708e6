"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from moe_serve.api.disconnect import cancel_all

Item = TypeVar("Item")


async def interleave(streams: list[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Items in order of arrival, until all streams have ended.

    All are closed when this one ends or is closed, and when one of them raises.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield item
        return
    # A stream's end comes through the same queue, as its task, behind its last item.
    queue: asyncio.Queue[Item | asyncio.Task[None]] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    try:
        num_left = len(tasks)
        while num_left:
            news = await queue.get()
            if isinstance(news, asyncio.Task):
                news.result()
                num_left -= 1
            else:
                yield news
    finally:
        await cancel_all(*tasks)


async def _pump(
    stream: AsyncGenerator[Item, None], queue: asyncio.Queue[Item | asyncio.Task[None]]
) -> None:
    async with aclosing(stream):
        async for item in stream:
            queue.put_nowait(item)
