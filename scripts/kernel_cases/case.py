"""A call whose kernels are compiled without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Case(NamedTuple):
    """`call` runs an op on tensors of the device "meta", inside `kernels.jit.recorded`.

    `has_product`: its kernels multiply matrices, so sm_90 code must hold wgmma.
    """

    name: str
    call: Callable[[], object]
    has_product: bool = False
