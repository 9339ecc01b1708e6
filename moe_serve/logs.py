"""Log lines of one process: `12:03:44.120 INFO engine scheduler: text`, on standard error."""

from __future__ import annotations

import logging
import sys

PACKAGE = "moe_serve"


class LineFormatter(logging.Formatter):
    """Time, level, role of the process, module and text on one line; a traceback follows it."""

    def __init__(self, role: str) -> None:
        super().__init__(
            "%(asctime)s.%(msecs)03d %(levelname)s %(role)s %(module)s: %(message)s",
            "%H:%M:%S",
            defaults={"role": role},
        )


def set_up(level: str, *, role: str) -> None:
    """Send what moe_serve logs, from `level` ('debug' ... 'error') on, to standard error.

    Called once at the start of each process, with its `role` ('server', 'engine'); calling again
    replaces the role and the level. Loggers of other packages are left alone.
    """
    logger = logging.getLogger(PACKAGE)
    for handler in list(logger.handlers):
        if isinstance(handler.formatter, LineFormatter):
            logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(role))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
