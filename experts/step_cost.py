"""What experts cost: a model of their time, with two numbers. Pure."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

# Shapes: P slots, of any leading dimensions.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """An expert that gets rows in a step reads its weights once, and then computes row by row.

    `read_seconds`: the former; `row_seconds`: each row. `source` says where they come from.
    """

    read_seconds: float
    row_seconds: float
    source: str

    def slot_seconds(self, rows_P: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Expected seconds a step of slots that get `rows_P` rows in a mean step.

        How many come in a single step varies: a slot with mean n gets none in exp(-n) of all steps
        (Poisson), and then reads nothing.
        """
        is_read_P = -np.expm1(-rows_P)
        seconds: npt.NDArray[np.float64] = is_read_P * self.read_seconds + rows_P * self.row_seconds
        return seconds
