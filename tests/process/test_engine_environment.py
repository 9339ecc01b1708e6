"""What the engine's process sets before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from moe_serve.engine_environment import prepare


def test_workers_sleep_and_tensors_get_huge_pages() -> None:
    environ: dict[str, str] = {"HOME": "/"}
    prepare(environ)
    assert environ == {"HOME": "/", "GOMP_SPINCOUNT": "1000", "THP_MEM_ALLOC_ENABLE": "1"}


@pytest.mark.parametrize(
    "given",
    [
        {"GOMP_SPINCOUNT": "7", "THP_MEM_ALLOC_ENABLE": "0"},
        {"OMP_WAIT_POLICY": "active", "THP_MEM_ALLOC_ENABLE": "0"},
    ],
)
def test_what_the_user_has_set_stays(given: dict[str, str]) -> None:
    environ = dict(given)
    prepare(environ)
    assert environ == given


def test_the_engine_is_started_with_it() -> None:
    code = (
        "import os, sys\n"
        "from moe_serve import engine_client\n"
        "class Process:\n"
        "    def run(config, addresses, log_level):\n"
        "        print('torch' in sys.modules, os.environ['GOMP_SPINCOUNT'])\n"
        "sys.modules['moe_serve.engine_process'] = Process\n"
        "engine_client._run_engine(None, None, 'info')\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP", "OMP"))}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["False", "1000"]
