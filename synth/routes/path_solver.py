"""Gather, scatter and alltoall: every block travels along paths, and no data is ever combined or copied.

A gather is one flow from all ranks to the root, solved exactly in integers, so it reaches its bound; a
scatter is one turned round. An alltoall is solved by `synth.routes.symmetric_alltoall` and written out.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

from arborcast.synth.bounds import bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import CollectiveError, InfeasibleError, TimedOutError
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.routes.paths import PathShare, lift_routes, routes_of_flow
from arborcast.synth.routes.reachability import who_is_cut_off
from arborcast.synth.schedule import Method, Schedule
from arborcast.synth.solve_options import DEFAULTS, SolveOptions
from arborcast.synth.topology import Topology

ROUTED_KINDS = frozenset({Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL})
_SUPER_SOURCE = -1


def solve_by_routes(topology: Topology, collective: Collective, options: SolveOptions = DEFAULTS) -> Schedule:
    """The best schedule of a gather, scatter or alltoall that moves blocks along paths.

    Args:
        topology: the fabric; ranks that take no part forward.
        collective: a gather, scatter or alltoall.
        options: seed and deadline, of the linear program of an alltoall; the other flows take no search.

    Raises:
        CollectiveError: another kind of collective.
        InfeasibleError: some rank cannot reach another one.
        TimedOutError: an alltoall was not solved in time; carries the blocks on shortest ways.
    """
    if collective.kind not in ROUTED_KINDS:
        kinds = ", ".join(sorted(ROUTED_KINDS))
        other = "a chunk schedule" if collective.kind is Kind.CUSTOM else "trees"
        raise CollectiveError(f"{collective.kind}: routes serve {kinds}; use {other}")
    if collective.kind is Kind.ALLTOALL:
        return _alltoall(topology, collective, options)
    limit = bound(topology, collective)
    if limit.rate == 0:
        raise InfeasibleError(who_is_cut_off(topology, collective), limit)
    if collective.kind is Kind.GATHER:
        routes = _gather_routes(topology, collective, limit.rate)
    else:
        mirrored = _gather_routes(topology.reversed(), collective, limit.rate)
        routes = [replace(route, path=route.path[::-1]) for route in mirrored]
    method = Method("routes", options.seed)
    return Schedule.build(topology, collective, method, limit, *lift_routes(topology, collective, routes))


def _alltoall(topology: Topology, collective: Collective, options: SolveOptions) -> Schedule:
    """By the symmetries, declared or else found, as far as they are translations, and written out."""
    from arborcast.synth.routes.symmetric_alltoall import solve_symmetric_alltoall
    from arborcast.synth.symmetry.translation_search import LEAST_EFFORT, translations_of

    effort = 0 if topology.symmetries else LEAST_EFFORT
    try:
        known = translations_of(topology, ranks=collective.ranks, effort=effort)
        return solve_symmetric_alltoall(topology, collective, options, translations=known).expand()
    except TimedOutError as late:
        assert isinstance(late.best, ImplicitSchedule), "every block on a shortest way"
        raise TimedOutError(str(late), late.best.expand()) from late


def _gather_routes(topology: Topology, collective: Collective, rate: Fraction) -> list[PathShare]:
    """Paths of a maximum flow from all ranks to the root, each rank sending rate/n GB/s."""
    import networkx as nx

    share = rate / len(collective.ranks)
    senders = [rank for rank in collective.ranks if rank != collective.root]
    scale = math.lcm(share.denominator, *(link.bandwidth.denominator for link in topology.links))
    graph: Any = nx.DiGraph()
    for link in topology.links:
        graph.add_edge(link.src, link.dst, capacity=int(link.bandwidth * scale))
    for rank in senders:
        graph.add_edge(_SUPER_SOURCE, rank, capacity=int(share * scale))
    value, flow = nx.maximum_flow(graph, _SUPER_SOURCE, collective.root)
    assert value == int(share * scale) * len(senders), "the bound is attained by a flow (max-flow min-cut)"
    left = {(src, dst): amount for src, row in flow.items() for dst, amount in row.items() if amount}
    assert collective.root is not None, "a gather has a root (checked by the collective)"
    demands = {rank: {collective.root: left.pop((_SUPER_SOURCE, rank))} for rank in senders}
    return [route for rank in senders for route in routes_of_flow(left, rank, demands[rank])]
