"""Rates rounded down to whole multiples of a common unit, so that few chunks fill every link of a round.

A round is the time in which a link of one unit moves one chunk. The greatest common divisor of 2048/65 and 10
is 2/65: links then carry 1024 and 325 chunks a round, and no schedule of few chunks uses them well. Rounded
down to multiples of 10 they carry 3 and 1. What is found on the rounded fabric is a schedule of the real one,
since capacity only shrank; what is proved there is proved of schedules in multiples of the unit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from arborcast.synth.certificate import Bound
from arborcast.synth.errors import InputError
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Topology

TOLERANCE = Fraction(1, 20)
"""The part of its rate that a link may lose unless another is asked for."""

LARGEST_EXACT = 64
"""Chunks that a link may carry a round up to which rates stay as they are unless a tolerance is asked for."""

FINEST = Fraction(1, 1000)
"""The least tolerance but for none: a finer grid is none."""


@dataclass(frozen=True)
class QuantizedRates:
    """A fabric beside the same with its rates rounded down.

    Attributes:
        topology: the fabric.
        unit: GB/s that one chunk per round stands for, at most the least rate.
        tolerance: the part of its rate that each link may lose.
    """

    topology: Topology
    unit: Fraction
    tolerance: Fraction = TOLERANCE

    @classmethod
    def of(cls, topology: Topology, tolerance: Fraction | None = None) -> QuantizedRates | None:
        """The coarsest grid within a tolerance; None where rates stay as they are.

        Args:
            topology: the fabric.
            tolerance: the part of its rate that each link may lose. None: `TOLERANCE`, and nothing where
                links carry at most `LARGEST_EXACT` chunks a round as they are.

        Raises:
            InputError: a tolerance out of its range.
        """
        if tolerance is None:
            if max(topology.capacities, default=0) <= LARGEST_EXACT:
                return None
            tolerance = TOLERANCE
        elif tolerance and not FINEST <= tolerance < 1:
            raise InputError(f"rate tolerance must be 0, or at least {FINEST} and below 1, got {tolerance}")
        if not tolerance or not topology.links:
            return None
        unit = coarsest_unit((link.bandwidth for link in topology.links), tolerance)
        grid = cls(topology, unit, tolerance)
        return grid if grid.rates else None

    @cached_property
    def rates(self) -> dict[Fraction, Fraction]:
        """What becomes of each rate that changes, GB/s, in ascending order."""
        rounded = {rate: rate // self.unit * self.unit for rate in set(self.topology.bandwidth.values())}
        return {rate: kept for rate, kept in sorted(rounded.items()) if kept != rate}

    @cached_property
    def rounded(self) -> Topology:
        """The fabric that schedules are looked for on."""
        return replace(
            self.topology,
            links=tuple(
                replace(link, bandwidth=self.rates.get(link.bandwidth, link.bandwidth))
                for link in self.topology.links
            ),
        )

    def lift(self, schedule: Schedule, limit: Bound) -> Schedule:
        """A schedule of the rounded fabric on the real one, with the limit of that one's rate."""
        return replace(schedule, topology=self.topology, bound=limit, unit=self.unit)

    def __str__(self) -> str:
        """`rates rounded down to multiples of 10 GB/s: 31.51 to 30`."""
        changed = [f"{float(rate):.4g} to {float(kept):.4g}" for rate, kept in self.rates.items()]
        listed = ", ".join([*changed[:4], *(["..."] if len(changed) > 4 else [])])
        unit = str(self.unit) if self.unit.denominator == 1 else f"{self.unit} ({float(self.unit):.4g})"
        return f"rates rounded down to multiples of {unit} GB/s: {listed}"


def coarsest_unit(rates: Iterable[Fraction], tolerance: Fraction) -> Fraction:
    """The largest unit with a whole multiple below each rate that is within a positive tolerance of it.

    Tried from the least rate downwards. Where the most multiples of a unit within a rate, m, fall short of
    it, so do m of any smaller unit; the next one worth a look is the one of which m + 1 are the rate.
    """
    different = sorted(set(rates))
    unit = different[0]
    while True:
        short = [rate for rate in different if rate // unit * unit < (1 - tolerance) * rate]
        if not short:
            return unit
        unit = min(rate / (rate // unit + 1) for rate in short)
