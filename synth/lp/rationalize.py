"""Floating prices of a linear program as the fractions of small denominators that they stand for."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

_DENOMINATORS = range(1, 241)
_CLOSE = 1e-7  # how near floating lengths, the largest 1, must be to fractions to be taken for them


def near_fractions(lengths: NDArray[np.float64], parts: int = 2**30) -> tuple[Fraction, ...]:
    """The fractions of smallest common denominator that are close; else the nearest of many parts.

    Args:
        lengths: not negative, the largest 1.
        parts: how finely lengths without a small common denominator are rounded.
    """
    for denominator in _DENOMINATORS:
        whole = np.round(lengths * denominator)
        if np.abs(lengths - whole / denominator).max() < _CLOSE:
            return tuple(Fraction(int(value), denominator) for value in whole)
    return tuple(Fraction(round(float(length) * parts), parts) for length in lengths)
