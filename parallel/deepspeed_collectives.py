"""Collectives by `deepspeed.comm`, over a gloo group that torch has formed already."""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moe_serve.errors import INSTALL_DEEPSPEED, ConfigError
from moe_serve.parallel.torch_collectives import TorchCollectives

# DeepSpeed 0.19, ops/op_builder/cpu/comm.py.
_SHARED_MEMORY_OP = "deepspeed_shm_comm"


class DeepSpeedCollectives(TorchCollectives):
    """See `Collectives`. DeepSpeed moves the rows; sums are made of moved rows as over gloo, for
    its own add in another order.

    All that watches `deepspeed.comm`, its communication log for one, sees these calls. Raises
    ConfigError where DeepSpeed is not installed or is set up for something else than gloo.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(process_group)
        self._comm = _open_comm(self.name)
        self.name = "deepspeed"
        self._first = dist.get_global_rank(process_group, 0)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        self._comm.all_gather_into_tensor(out, x, group=self._group)

    def gather(self, parts: list[Tensor] | None, x: Tensor) -> None:
        self._comm.gather(x, parts, dst=self._first, group=self._group)


def _open_comm(backend: str) -> ModuleType:
    """deepspeed.comm, on top of torch's process group. A second call finds it open."""
    # Read at its import: where a GPU is seen, it would be set up for that one.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        comm = importlib.import_module("deepspeed.comm")
    except ImportError as error:
        raise ConfigError(
            f"--comm-backend deepspeed needs DeepSpeed ({error}): {INSTALL_DEEPSPEED}"
        ) from None
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    chosen = accelerator.communication_backend_name()
    if {backend, chosen} != {"gloo"}:
        raise ConfigError(
            f"--comm-backend deepspeed moves CPU tensors by gloo, but the group is torch's "
            f"{backend} and DeepSpeed is set up for {chosen}: use --device cpu, "
            "DS_ACCELERATOR=cpu and no oneccl_bindings_for_pytorch"
        )
    if not comm.is_initialized():
        # Or it would spend half a minute to compile an all-reduce that ignores the group.
        importlib.import_module("deepspeed.ops").__compatible_ops__[_SHARED_MEMORY_OP] = False
        comm.init_distributed(dist_backend=backend, verbose=False)
        _mend(comm.comm.cdb)
    return comm


def _mend(backend: Any) -> None:
    # Renamed in torch 2.13, which warns of the old name.
    backend.all_gather_function = getattr(dist, "all_gather_single", backend.all_gather_function)
    # Where torch's group was there before DeepSpeed's import, arguments default to it. It would
    # outlive `world.leave`, and gloo's threads, never joined, would abort the process at its end.
    for method in (type(backend).barrier, type(backend).monitored_barrier):
        method.__defaults__ = (None, *method.__defaults__[1:])
