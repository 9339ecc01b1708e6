"""Memory that shows what a kernel leaves unwritten."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, new memory is full of NaN (of the largest number, for integers): what a kernel leaves
    unwritten shows.
    """
    # Some operations only warn that they have no deterministic form: they are not what is meant.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        before = torch.utils.deterministic.fill_uninitialized_memory
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = before
            torch.use_deterministic_algorithms(False)
