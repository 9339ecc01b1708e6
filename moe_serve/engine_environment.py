"""What the engine's process asks of the libraries it is about to load, through its environment."""

from __future__ import annotations

from collections.abc import MutableMapping

# Rounds for which an idle OpenMP worker looks for work before it sleeps: a thousand, some 20 us, is
# what libgomp takes with more threads than cores; else it takes 300,000. The HTTP side needs a core
# every step: a worker that holds it while it waits for another one, which waits for that core,
# makes a step several times as long.
SPIN_COUNT = "1000"


def prepare(environ: MutableMapping[str, str]) -> None:
    """Set what the user has not. To be called before torch is imported, which reads it once."""
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    # Huge pages for large tensors, where the system leaves the choice to programs: weights are
    # loaded into memory that has not been used before, which costs a fault a page.
    environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
