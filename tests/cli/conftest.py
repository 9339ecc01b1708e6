from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the shell that runs the tests has set must not reach them."""
    for name in list(os.environ):
        is_seat = name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if is_seat or name.upper().startswith("MOE_SERVE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "100")
