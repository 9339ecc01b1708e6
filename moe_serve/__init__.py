"""moe_serve: serve Mixture-of-Experts language models; exact, accountable, nothing lost.

    from moe_serve import LLM, SamplingParams

    with LLM() as llm:
        print(llm.generate(["Once upon a time"], SamplingParams(max_tokens=32))[0].outputs[0].text)

Importing the package loads neither torch nor transformers; the names below do so on first use.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_serve.llm import LLM
    from moe_serve.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]

_HOMES = {"LLM": "moe_serve.llm", "SamplingParams": "moe_serve.sampling_params"}

try:
    __version__ = importlib.metadata.version("moe-serve")
except importlib.metadata.PackageNotFoundError:  # a clone that was never installed
    __version__ = "0+uninstalled"


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
