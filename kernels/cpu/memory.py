"""Large pages for what is read again and again."""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any

from torch import Tensor

_HUGE_PAGE = 2 << 20


def prefer_huge_pages(tensor: Tensor) -> Tensor:
    """The same tensor; where the system has pages of 2 MiB, its memory will be made of them.

    To be called before it is first written. Reading through pages of 4 KiB takes the CPU to the
    page tables so often that a third of the bandwidth is lost.
    """
    advise = _madvise()
    if advise is None or not tensor.is_cpu or not tensor.numel():
        return tensor
    first = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    size = (tensor.data_ptr() + tensor.nbytes - first) // _HUGE_PAGE * _HUGE_PAGE
    if size > 0:
        # What the system does not have changes nothing.
        advise(first, size, mmap.MADV_HUGEPAGE)
    return tensor


@functools.cache
def _madvise() -> Any:
    """None where there is no such advice."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
