"""Numbers for a topology file out of measured ones: few digits, and equal where nothing tells them apart.

Exact solvers like small numbers and symmetric fabrics; both get lost in the noise of a measurement unless
rates that differ by less than it are made equal.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from fractions import Fraction

from arborcast.backends.probe.measurements import Spread

_MULTIPLES = 8
"""Rates are made whole multiples of the lowest one up to here; above, anything would be near to one."""


def clustered(values: Sequence[Spread], *, alike: float) -> list[Fraction]:
    """A round number for each value, the same for values that cannot be told apart.

    In ascending order a value joins those before it where it is within `alike` of the last of them and
    within twice that of the first, or where the medians of the first and of it lie in the spread of each
    other. A cluster's number is the median of its medians: as a multiple of the lowest cluster's number where
    it is within `alike` of one, else with two significant digits.

    Args:
        values: all positive.
        alike: relative difference that says nothing.
    """
    order = sorted(range(len(values)), key=lambda index: values[index].median)
    clusters: list[list[int]] = []
    for index in order:
        if clusters and _joins(values[index], [values[member] for member in clusters[-1]], alike):
            clusters[-1].append(index)
        else:
            clusters.append([index])
    numbers = [Fraction(0)] * len(values)
    unit: Fraction | None = None
    for cluster in clusters:
        middle = statistics.median(values[index].median for index in cluster)
        number = rounded(middle) if unit is None else _near_multiple(middle, unit, alike)
        unit = unit or number
        for index in cluster:
            numbers[index] = number
    return numbers


def rounded(value: float) -> Fraction:
    """Two significant digits, in halves of the last one up to 25: at most 2.5 % off.

    3.14 -> 3.1, 12.4 -> 12.5, 0.0208 -> 0.021
    """
    exponent = math.floor(math.log10(value)) - 1
    digits = value / 10.0**exponent
    steps = Fraction(round(2 * digits), 2) if digits < 25 else Fraction(round(digits))
    return steps * Fraction(10) ** exponent


def _joins(value: Spread, cluster: Sequence[Spread], alike: float) -> bool:
    first, last = cluster[0], cluster[-1]
    if value.median <= min(last.median * (1 + alike), first.median * (1 + alike) ** 2):
        return True
    return value.minimum <= first.median and value.median <= first.maximum


def _near_multiple(value: float, unit: Fraction, alike: float) -> Fraction:
    times = round(value / float(unit))
    if 1 <= times <= _MULTIPLES and abs(value / float(times * unit) - 1) <= alike:
        return times * unit
    return rounded(value)
