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
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from arborcast.synth.bounds.commodity_flows import CommodityFlows
from arborcast.synth.bounds.routing_trees import OrbitPartition, RoutingProgram
from arborcast.synth.certificate import Dual
from arborcast.synth.certification import dual_or_none
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import NO_DEADLINE, Deadline
from arborcast.synth.errors import TimedOutError
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.kernels.link_graph import LinkGraph
from arborcast.synth.lp.linear_program import rationalize
from arborcast.synth.topology import Permutation, Topology

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
        else:
            candidates = _lengths_of_flows(topology, collective, deadline)
    except TimedOutError:
        log.info("%s on %s: no time for the best lengths", collective.kind, topology.name)
    # Beside a slow link that nobody needs, the lengths of all others may be rounded to 0.
    duals = [dual_or_none(topology, collective, lengths) for lengths in [*candidates, *simple]]
    return [dual for dual in duals if dual is not None]


def _lengths_of_trees(
    topology: Topology, collective: Collective, deadline: Deadline
) -> list[tuple[Fraction, ...]]:
    """The best lengths of an alltoall, the same for links that symmetries map to each other."""
    symmetries = topology.symmetries or _found(topology, collective)
    alike = OrbitPartition.under(topology, collective, symmetries)
    best = RoutingProgram(topology, collective, alike).solve(deadline)
    return [lengths_of_links(alike, best.lengths)]


def _found(topology: Topology, collective: Collective) -> Sequence[Permutation]:
    """Symmetries of a topology that declares none; a link's latency says nothing of rates."""
    from arborcast.synth.symmetry.automorphisms import automorphisms_of
    from arborcast.synth.symmetry.translation_search import LEAST_EFFORT

    members = collective.members
    colours = [int(vertex in members) for vertex in range(topology.size)]
    return automorphisms_of(topology, latencies=False, colours=colours, effort=LEAST_EFFORT).generators


def lengths_of_links(alike: OrbitPartition, of_orbits: Ints) -> tuple[Fraction, ...]:
    """The lengths of all links from those of their orbits, the largest 1."""
    fractions = [Fraction(length, int(of_orbits.max())) for length in of_orbits.tolist()]
    return tuple(fractions[orbit] for orbit in alike.link_orbits.tolist())


def _lengths_of_flows(
    topology: Topology, collective: Collective, deadline: Deadline
) -> list[tuple[Fraction, ...]]:
    """The prices of links where every block of a custom collective moves at one rate; none if too large.

    Blocks with the same sources are one commodity.
    """
    unit = min(math.lcm(*(len(demand.targets) for demand in collective.demands)), _FINEST_PART)
    commodities = list(dict.fromkeys(demand.sources for demand in collective.demands))
    if len(commodities) * len(topology.links) > LARGEST_PROGRAM:
        return []
    wanted = np.zeros((len(commodities), topology.size), dtype=np.int64)
    for demand in collective.demands:
        wanted[commodities.index(demand.sources), list(demand.targets)] += max(
            1, round(unit / len(demand.targets))
        )
    capacity = np.array(topology.capacities, dtype=np.int64)
    return [CommodityFlows(LinkGraph(topology), capacity, commodities).solve(wanted, deadline).lengths]
