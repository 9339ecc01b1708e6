"""`moe-serve serve [MODEL]`: the HTTP server."""

from __future__ import annotations

from collections.abc import Sequence

from moe_serve import settings
from moe_serve.cli.generate import GenerateConfig
from moe_serve.config import ServeConfig


def run(argv: Sequence[str], *, prog: str) -> int:
    """Serve until a signal ends it; returns the exit code."""
    config = settings.parse(
        ServeConfig,
        argv,
        prog=prog,
        description="Answer the OpenAI API over HTTP from a Mixture-of-Experts model.",
        other_types=[GenerateConfig],
    )
    from moe_serve import serve

    return serve.run(config)
