"""Which experts the tokens of a choice chose, as a string.

The field, its place and its encoding are those of vLLM: an array file of numpy (.npy), in base64.
    numpy.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
"""

from __future__ import annotations

import base64
import io

import msgspec
import numpy as np

from moe_serve.output import SequenceOutput


def routed_experts(output: SequenceOutput) -> str | msgspec.UnsetType:
    """int16 [tokens, MoE layers, top_k]; nothing before the choice is complete, or if nobody asked.

    See `SequenceOutput.routed_experts`.
    """
    ids_TLK = output.routed_experts if output.finish_reason is not None else None
    if ids_TLK is None:
        return msgspec.UNSET
    file = io.BytesIO()
    np.save(file, ids_TLK, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode("ascii")
