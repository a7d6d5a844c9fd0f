"""How to split the bandwidth of links between the trees of a collective.

Three forms of one linear program: out-trees alone; out- and in-trees that share links while the roots are
free (allreduce); and the latter on symmetric links, where in-trees are reversed out-trees and one root
serves as well as any mixture. `split_bandwidth` returns what the exact packers then pack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from arborcast.synth.bounds.capacity_program import CapacityProgram, CapacitySolution, TreeDirection
from arborcast.synth.bounds.cuts import tightest_cut
from arborcast.synth.bounds.switch_balance import sufficient_part
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import CollectiveError, InfeasibleError, NumericalError
from arborcast.synth.kernels.link_graph import LinkGraph
from arborcast.synth.kernels.max_flow import distances_to, link_arrays, residual_capacity, residual_graph
from arborcast.synth.topology import Topology


@dataclass(frozen=True, slots=True)
class SplitCapacities:
    """Bandwidths that the exact packers fill completely.

    Attributes:
        rate: algbw in GB/s of the whole buffer.
        roots: the GB/s of the trees of each root; all others have none.
        out: what out-trees may use; every switch in it sends as much as it receives.
        into: what in-trees may use, None for none or, in an allreduce, the reverse of `out`.
    """

    rate: Fraction
    roots: Mapping[int, Fraction]
    out: Topology
    into: Topology | None = None


def split_bandwidth(topology: Topology, collective: Collective) -> SplitCapacities:
    """The best way to share links among the trees of a broadcast, an allgather or an allreduce.

    Args:
        topology: the fabric of the ranks that take part; make relays switches first (`synth.packing.relays`).
        collective: for a reduce or reduce-scatter, ask for its mirror image on the reversed topology.

    Returns:
        Exact bandwidths: `out` lets the roots reach every rank at their rates, and so does the reverse of
        `into`. The rate is that of `synth.bounds.bound` wherever trees reach it.

    Raises:
        CollectiveError: another kind of collective, or relays.
        InfeasibleError: some rank cannot be reached.
        NumericalError: HiGHS fails, or the best bandwidths have too many digits for exact int64 flows.
    """
    if collective.relays(topology):
        raise CollectiveError(f"{collective.kind}: bandwidth is split among ranks and switches, not relays")
    if collective.kind in {Kind.BROADCAST, Kind.ALLGATHER}:
        if not topology.unbalanced(range(topology.ranks, topology.size)):
            return _whole(topology, collective)
        part = sufficient_part(topology, _supply(collective), collective.ranks)
        if part is not None:
            return _whole(part, collective)
    solution = solved_program(topology, collective)
    if solution.rate == 0:
        raise InfeasibleError(f"{collective.kind}: some rank cannot be reached, the rate is 0")
    if not solution.is_feasible():
        raise NumericalError(
            f"{collective.kind}: the best bandwidths are not exact in int64 arithmetic; "
            "give the links' bandwidths with fewer digits"
        )
    out, *into = (solution.topology(direction) for direction in solution.program.directions)
    rate = solution.rate * (len(collective.ranks) if collective.kind is Kind.ALLGATHER else 1)
    return SplitCapacities(rate, solution.roots, out, into[0] if into else None)


def _whole(topology: Topology, collective: Collective) -> SplitCapacities:
    """All bandwidth for out-trees, where cuts alone limit them."""
    roots = tuple(_supply(collective))
    tight = tightest_cut(topology, _supply(collective), collective.ranks)
    if tight.rate == 0:
        raise InfeasibleError(f"{collective.kind}: some rank cannot be reached, the rate is 0")
    return SplitCapacities(tight.rate * len(roots), dict.fromkeys(roots, tight.rate), topology)


def _supply(collective: Collective) -> dict[int, int]:
    """One unit for each root."""
    return dict.fromkeys(collective.ranks if collective.root is None else (collective.root,), 1)


def one_way(topology: Topology, collective: Collective) -> CapacityProgram:
    """The program of a broadcast or allgather: one rate for all roots.

    Ranks that take no part carry no row of conservation, because they may copy.
    """
    assert collective.kind in {Kind.BROADCAST, Kind.ALLGATHER}, "mirror the other kinds first"
    links = np.arange(len(topology.links), dtype=np.int64)
    supply = dict.fromkeys(_supply(collective), 0)
    return CapacityProgram(
        topology,
        (TreeDirection(LinkGraph(topology), 1 + links, supply, collective.ranks),),
        (1, *[0] * len(links)),
        tuple(((1 + i,), i) for i in range(len(links))),
        _scale(topology, collective),
    )


def two_way(topology: Topology, collective: Collective) -> CapacityProgram:
    """The program of an allreduce with free roots, relays among them: in- and out-trees share links."""
    roots, count = topology.ranks, len(topology.links)
    links = np.arange(count, dtype=np.int64)
    supply = {root: root for root in range(roots)}
    return CapacityProgram(
        topology,
        (
            TreeDirection(LinkGraph(topology), roots + links, supply, collective.ranks),
            TreeDirection(LinkGraph(topology, turned=True), roots + count + links, supply, collective.ranks),
        ),
        (*[1] * roots, *[0] * (2 * count)),
        tuple(((roots + i, roots + count + i), i) for i in range(count)),
        _scale(topology, collective),
    )


def two_way_symmetric(topology: Topology, collective: Collective) -> CapacityProgram:
    """The program of an allreduce on symmetric links: out-trees of one root, in-trees their reverse.

    Turning a tree of another root round changes no load, so that one root is as good as any mixture; the
    most central rank keeps trees low. Without switches and relays every vertex is a multiple of
    1 / (denominator of the rate), because rooted-connected orientations are integral (Frank 1980).
    """
    assert topology.is_symmetric, "in-trees are reversed out-trees on symmetric links only"
    graph = LinkGraph(topology)
    links = np.arange(len(topology.links), dtype=np.int64)
    supply = {most_central(topology, collective.ranks): 0}
    return CapacityProgram(
        topology,
        (TreeDirection(graph, 1 + links, supply, collective.ranks),),
        (1, *[0] * len(links)),
        tuple(((1 + i, 1 + j), i) for i, j in enumerate(graph.reverse.tolist()) if i < j),
        _scale(topology, collective),
    )


def _scale(topology: Topology, collective: Collective) -> int:
    """The rate that cuts allow per root, in bandwidth units: the rate of trees is of that order."""
    first = collective.ranks[0] if collective.root is None else collective.root
    roots = collective.ranks if collective.kind is Kind.ALLGATHER else (first,)
    rate = tightest_cut(topology, dict.fromkeys(roots, 1), collective.ranks).rate
    return max(1, round(rate / topology.bandwidth_unit))


def most_central(topology: Topology, ranks: Sequence[int]) -> int:
    """The rank that the farthest other one reaches over the fewest links; the lowest of equals."""
    graph = residual_graph(topology.size, *link_arrays(topology))
    capacity = residual_capacity([1] * len(topology.links))
    members = np.array(ranks, dtype=np.int64)

    def eccentricity(rank: int) -> int:
        away = distances_to(*graph, capacity, -1, rank)[members]
        return topology.size if (away < 0).any() else int(away.max())

    return min(ranks, key=lambda rank: (eccentricity(rank), rank))


@lru_cache(maxsize=2)
def solved_program(topology: Topology, collective: Collective) -> CapacitySolution:
    """The optimum of `program_of`; cached, as splits follow bounds and methods are compared on one question.

    Raises:
        CollectiveError: a kind without a program of its own.
        ArithmeticError: HiGHS fails.
    """
    return program_of(topology, collective).solve()


def program_of(topology: Topology, collective: Collective) -> CapacityProgram:
    """The program for a broadcast, an allgather or an allreduce.

    Raises:
        CollectiveError: another kind.
    """
    match collective.kind:
        case Kind.BROADCAST | Kind.ALLGATHER:
            return one_way(topology, collective)
        case Kind.ALLREDUCE if topology.is_symmetric:
            return two_way_symmetric(topology, collective)
        case Kind.ALLREDUCE:
            return two_way(topology, collective)
    raise CollectiveError(f"{collective.kind}: has no program of its own, reverse the topology")
