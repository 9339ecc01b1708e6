"""Processes that end with the one that started them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time

logger = logging.getLogger(__name__)

EXIT_FAULT = 1
LAUNCHER_POLL_SECONDS = 0.5


def end_with_parent() -> None:
    """Watch, from now on, for the end of the process that spawned this one by multiprocessing."""
    threading.Thread(target=_wait_parent, daemon=True).start()


def end_with_launcher() -> None:
    """Watch for the end of a launcher, which can then no longer end this process."""
    threading.Thread(target=_wait_launcher, daemon=True).start()


def _wait_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(EXIT_FAULT)


def _wait_launcher() -> None:
    launcher = os.getppid()
    while os.getppid() == launcher:
        time.sleep(LAUNCHER_POLL_SECONDS)
    logger.error("the launcher is gone; so this rank ends")
    os._exit(EXIT_FAULT)
