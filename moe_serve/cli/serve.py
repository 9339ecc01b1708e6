"""`moe-serve serve [MODEL]`: the HTTP server."""

from __future__ import annotations

import os
from collections.abc import Sequence

from moe_serve import settings
from moe_serve.cli.generate import GenerateConfig
from moe_serve.config import ServeConfig
from moe_serve.parallel.degrees import read_seat, resolve_degrees


def run(argv: Sequence[str], *, prog: str) -> int:
    """Serve until a signal ends it; returns the exit code.

    Started by a launcher it is one of its ranks; else it starts the ranks that are asked for.
    """
    config = settings.parse(
        ServeConfig,
        argv,
        prog=prog,
        description="Answer the OpenAI API over HTTP from a Mixture-of-Experts model.",
        other_types=[GenerateConfig],
    )
    seat = read_seat(os.environ)
    if seat is None:
        degrees = resolve_degrees(config.tensor_parallel_size, config.data_parallel_size, None)
        if degrees.world_size > 1:
            from moe_serve import launch

            return launch.run(config, argv, degrees)
    elif seat.rank > 0:
        from moe_serve import rank_process

        return rank_process.run(config, seat)
    from moe_serve import serve

    return serve.run(config, is_launched=seat is not None)
