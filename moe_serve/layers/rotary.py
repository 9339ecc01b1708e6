"""Angles of the rotary embedding."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moe_serve.models.spec import RopeSpec

# Shapes: T tokens, P positions, r rotary dimensions; f = r / 2 frequencies.

_FIRST_LENGTH = 512


class CosSin(NamedTuple):
    """[T, r] each, in the table's dtype; the second half repeats the first."""

    cos_Tr: Tensor
    sin_Tr: Tensor


class RotaryTable:
    """cos and sin by position, computed in fp32 when first needed and kept in `dtype`."""

    def __init__(
        self,
        spec: RopeSpec,
        max_position: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.spec = spec
        self.max_position = max_position
        self.device = device
        self.dtype = dtype
        self._cos_Pr = torch.empty(0, spec.rotary_dim, device=device, dtype=dtype)
        self._sin_Pr = torch.empty(0, spec.rotary_dim, device=device, dtype=dtype)

    def lookup(self, positions_T: Tensor, length: int) -> CosSin:
        """Rows of `positions_T`, all of them below `length` (known on the host: no sync)."""
        assert length <= self.max_position, f"position {length - 1} of {self.max_position}"
        if length > len(self._cos_Pr):
            self._grow(length)
        return CosSin(self._cos_Pr[positions_T], self._sin_Pr[positions_T])

    def _grow(self, length: int) -> None:
        num_rows = max(_FIRST_LENGTH, 1 << (length - 1).bit_length())
        positions_P = torch.arange(min(num_rows, self.max_position)).float()
        angles_Pf = positions_P[:, None] * inverse_frequencies(self.spec)
        angles_Pr = torch.cat((angles_Pf, angles_Pf), dim=-1)
        self._cos_Pr = (angles_Pr.cos() * self.spec.attention_factor).to(self.device, self.dtype)
        self._sin_Pr = (angles_Pr.sin() * self.spec.attention_factor).to(self.device, self.dtype)


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """Radians per position of each pair of dimensions -> [r / 2] fp32 on the CPU.

    linear: all slowed by the factor. llama3 and yarn: only the slow ones, with a ramp between
    (Llama 3.1's rule by wavelength; arXiv 2309.00071 by number of turns in the trained length).
    """
    steps_f = torch.arange(0, spec.rotary_dim, 2).float() / spec.rotary_dim
    plain_f = 1.0 / spec.theta**steps_f
    if spec.kind == "linear":
        return plain_f / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, plain_f)
    if spec.kind == "yarn":
        keep_f = 1 - _yarn_ramp(spec)
        slow_f = 1.0 / (spec.factor * spec.theta**steps_f)
        return slow_f * (1 - keep_f) + plain_f * keep_f
    return plain_f


def _llama3(spec: RopeSpec, plain_f: Tensor) -> Tensor:
    wavelength_f = 2 * math.pi / plain_f
    longest = spec.original_max_position / spec.low_freq_factor
    shortest = spec.original_max_position / spec.high_freq_factor
    turns_f = spec.original_max_position / wavelength_f
    keep_f = (turns_f - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    between_f = (1 - keep_f) * plain_f / spec.factor + keep_f * plain_f
    scaled_f = torch.where(wavelength_f > longest, plain_f / spec.factor, between_f)
    return torch.where(wavelength_f < shortest, plain_f, scaled_f)


def _yarn_ramp(spec: RopeSpec) -> Tensor:
    """0 for pairs that turn often within the trained length, 1 for those that hardly do."""

    def pair_that_turns(times: float) -> float:
        ratio = spec.original_max_position / (times * 2 * math.pi)
        return spec.rotary_dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = pair_that_turns(spec.beta_fast), pair_that_turns(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(spec.rotary_dim // 2).float() - low) / (high - low)).clamp(0, 1)
