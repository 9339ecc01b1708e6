"""Where the server process and its engine meet."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddresses:
    """ZMQ addresses that the server binds. Several may send to `from_engine`: the engine's loop,
    and what watches over it. `heartbeat`: see `heartbeat.beating`; None without.
    """

    to_engine: str
    from_engine: str
    heartbeat: float | None

    @classmethod
    def within(cls, folder: Path, heartbeat: float | None) -> EngineAddresses:
        return cls(
            to_engine=f"ipc://{folder / 'to'}",
            from_engine=f"ipc://{folder / 'from'}",
            heartbeat=heartbeat,
        )
