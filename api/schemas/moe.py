"""Bodies of the routes that move and record experts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moe_serve.api.schemas.common import Int64, RequestModel


class RebalanceRequest(RequestModel):
    """`slots`: by MoE layer, the logical expert of each slot, rank after rank, as
    `/v1/moe/placement` tells it; without it experts are placed by the load of the newest window.
    `max_moves`: most slots that may change then, over all layers.
    """

    slots: list[list[Annotated[int, Field(ge=0, lt=2**31)]]] | None = None
    max_moves: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class RecordRequest(RequestModel):
    """`window`, for counts: steps of each."""

    mode: Literal["counts", "routes"] = "counts"
    window: Annotated[Int64, Field(ge=1)] = 100


class DumpRequest(RequestModel):
    """`style`: the kind of file; routes are npz, pt is SGLang's."""

    style: Literal["npz", "json", "pt"] = "npz"
