"""The limit of an alltoall or a custom collective by link lengths: no block travels less than a shortest way.

For an alltoall `synth.bounds.routing_trees` finds the best lengths exactly. For a custom collective a linear
program over the flows of each source finds them in floating point (its prices); they are rounded to small
denominators and the rate that the rounded lengths prove is computed exactly: a valid bound whatever was lost
in rounding, and usually nothing is. Blocks with
several targets count in the program as an equal part to each, the part not said to be shared: the limit
is then looser than the best.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.bounds.routing_trees import OrbitPartition, RoutingProgram
from arborcast.synth.certificate import Dual
from arborcast.synth.certification import dual_or_none
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import NO_DEADLINE, Deadline
from arborcast.synth.errors import TimedOutError
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.lp.linear_program import LinearProgram, rationalize
from arborcast.synth.topology import Topology, Vertex

log = logging.getLogger(__name__)

LARGEST_PROGRAM = 50_000
"""Flow columns (sources times links) up to which the linear program is solved: seconds."""

_FINEST_PART = 5040  # of a block, where the numbers of targets have no smaller common multiple


def routing_duals(topology: Topology, collective: Collective, deadline: Deadline = NO_DEADLINE) -> list[Dual]:
    """Link lengths that limit an alltoall or a custom collective: the best first, or simple ones only.

    Args:
        topology: connected for the ranks that take part; all vertices forward.
        collective: an alltoall, or a custom one.
        deadline: of the linear program; without its answer simple lengths remain.
    """
    slowness = 1 / np.array(topology.capacities, dtype=np.float64)
    simple = [(Fraction(1),) * len(topology.links), rationalize(slowness / slowness.max())]
    candidates: list[tuple[Fraction, ...]] = []
    try:
        if collective.kind is Kind.ALLTOALL:
            candidates, simple = _lengths_of_trees(topology, collective, deadline), []
        elif len(_supplies(collective)) * len(topology.links) <= LARGEST_PROGRAM:
            candidates = [rationalize(ConcurrentFlow(topology, collective).lengths(deadline))]
    except TimedOutError:
        log.info("%s on %s: no time for the best lengths", collective.kind, topology.name)
    # Beside a slow link that nobody needs, the lengths of all others may be rounded to 0.
    duals = [dual_or_none(topology, collective, lengths) for lengths in [*candidates, *simple]]
    return [dual for dual in duals if dual is not None]


def _lengths_of_trees(
    topology: Topology, collective: Collective, deadline: Deadline
) -> list[tuple[Fraction, ...]]:
    """The best lengths of an alltoall, the same for links that declared symmetries map to each other."""
    alike = OrbitPartition.under(topology, collective, topology.symmetries)
    best = RoutingProgram(topology, collective, alike).solve(deadline)
    return [lengths_of_links(alike, best.lengths)]


def lengths_of_links(alike: OrbitPartition, of_orbits: Ints) -> tuple[Fraction, ...]:
    """The lengths of all links from those of their orbits, the largest 1."""
    fractions = [Fraction(length, int(of_orbits.max())) for length in of_orbits.tolist()]
    return tuple(fractions[orbit] for orbit in alike.link_orbits.tolist())


@dataclass(frozen=True, slots=True)
class _Supply:
    """What is sent from the same ranks: how many units of the rate each receiver gets."""

    sources: frozenset[int]
    wanted: dict[Vertex, int]


def _supplies(collective: Collective) -> Sequence[_Supply]:
    if collective.kind is not Kind.CUSTOM:
        everyone = frozenset(collective.ranks)
        return [
            _Supply(frozenset({rank}), dict.fromkeys(sorted(everyone - {rank}), 1))
            for rank in collective.ranks
        ]
    unit = min(math.lcm(*(len(demand.targets) for demand in collective.demands)), _FINEST_PART)
    wanted: dict[frozenset[int], Counter[Vertex]] = defaultdict(Counter)
    for demand in collective.demands:
        for target in sorted(demand.targets):
            wanted[demand.sources][target] += max(1, round(unit / len(demand.targets)))
    return [_Supply(sources, dict(units)) for sources, units in wanted.items()]


class ConcurrentFlow:
    """The linear program that sends one rate from every rank to every other, the flows added by source.

    For a custom collective it sends every block at one rate, and adds the flows with the same sources.
    """

    def __init__(self, topology: Topology, collective: Collective) -> None:
        links, supplies = topology.links, _supplies(collective)
        out: dict[int, list[int]] = defaultdict(list)
        into: dict[int, list[int]] = defaultdict(list)
        for i, link in enumerate(links):
            out[link.src].append(i)
            into[link.dst].append(i)
        # Column 0 is the rate; then come the flows of each supply in the order of the links.
        program = LinearProgram((1, *[0] * (len(supplies) * len(links))), scale=max(topology.capacities))
        self._rows = [
            program.add_row(
                [1 + s * len(links) + i for s in range(len(supplies))], [1] * len(supplies), upper=capacity
            )
            for i, capacity in enumerate(topology.capacities)
        ]
        for s, supply in enumerate(supplies):
            first = 1 + s * len(links)
            for vertex in range(topology.size):
                if vertex not in supply.sources:
                    arriving = [first + i for i in into[vertex]]
                    leaving = [first + i for i in out[vertex]]
                    coefficients = [1] * len(arriving) + [-1] * len(leaving)
                    kept = [-supply.wanted[vertex]] if vertex in supply.wanted else []
                    program.add_row(
                        arriving + leaving + [0] * len(kept), coefficients + kept, lower=0, upper=0
                    )
        self._program = program

    def lengths(self, deadline: Deadline = NO_DEADLINE) -> NDArray[np.float64]:
        """The prices of the links, the largest 1.

        Raises:
            TimedOutError: the deadline passed.
        """
        self._program.solve(deadline)
        prices: NDArray[np.float64] = np.abs(self._program.prices()[self._rows])
        prices /= prices.max()
        return prices
