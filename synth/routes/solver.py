"""Gather, scatter and alltoall: every block travels along paths, and no data is ever combined or copied.

A gather is one flow from all ranks to the root, solved exactly in integers, so it reaches its bound; a
scatter is one turned round. An alltoall is solved by `synth.routes.symmetric_alltoall` and written out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, TypeAlias

from arborcast.synth.bounds import bound
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import CollectiveError, InfeasibleError, TimedOutError
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.routes.reachability import who_is_cut_off
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Hop, Topology, Vertex

Path: TypeAlias = tuple[Vertex, ...]
ROUTED_KINDS = frozenset({Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL})
_SUPER_SOURCE = -1
FLOW_PARTS = 10**6
"""Into how many parts a floating flow is rounded before paths are taken out of it."""


@dataclass(frozen=True, slots=True)
class Route:
    """A part of one block on one path: `weight` is its share of that block."""

    path: Path
    weight: Fraction

    @property
    def ends(self) -> tuple[int, int]:
        """Owner and target."""
        return self.path[0], self.path[-1]


def solve_by_routes(
    topology: Topology, collective: Collective, *, seed: int = 0, deadline_s: float | None = None
) -> Schedule:
    """The best schedule of a gather, scatter or alltoall that moves blocks along paths.

    Args:
        topology: the fabric; ranks that take no part forward.
        collective: a gather, scatter or alltoall.
        seed: of HiGHS's own ties in an alltoall.
        deadline_s: seconds for the linear program of an alltoall; the flows of the others take no search.

    Raises:
        CollectiveError: another kind of collective.
        InfeasibleError: some rank cannot reach another one.
        TimedOutError: an alltoall was not solved in time; carries the blocks on shortest ways.
    """
    deadline = Deadline.after(deadline_s)
    if collective.kind not in ROUTED_KINDS:
        kinds = ", ".join(sorted(ROUTED_KINDS))
        other = "a chunk schedule" if collective.kind is Kind.CUSTOM else "trees"
        raise CollectiveError(f"{collective.kind}: routes serve {kinds}; use {other}")
    if collective.kind is Kind.ALLTOALL:
        return _alltoall(topology, collective, seed, deadline)
    limit = bound(topology, collective)
    if limit.rate == 0:
        raise InfeasibleError(who_is_cut_off(topology, collective), limit)
    if collective.kind is Kind.GATHER:
        routes = _gather_routes(topology, collective, limit.rate)
    else:
        mirrored = _gather_routes(topology.reversed(), collective, limit.rate)
        routes = [Route(route.path[::-1], route.weight) for route in mirrored]
    return _lift(topology, collective, limit, routes, Method("routes", seed))


def _alltoall(topology: Topology, collective: Collective, seed: int, deadline: Deadline) -> Schedule:
    """By the declared symmetries, as far as they are translations, and written out."""
    from arborcast.synth.routes.symmetric_alltoall import solve_symmetric_alltoall
    from arborcast.synth.symmetry.translation_search import translations_of

    try:
        return solve_symmetric_alltoall(
            topology,
            collective,
            translations=translations_of(topology, ranks=collective.ranks, effort=0),
            seed=seed,
            deadline_s=deadline.left_s,
        ).expand()
    except TimedOutError as late:
        assert isinstance(late.best, ImplicitSchedule), "every block on a shortest way"
        message = f"{collective.kind}: the deadline of {deadline.allowed_s} s passed"
        raise TimedOutError(message, late.best.expand()) from late


def _gather_routes(topology: Topology, collective: Collective, rate: Fraction) -> list[Route]:
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
    demands = {rank: left.pop((_SUPER_SOURCE, rank)) for rank in senders}
    return [
        Route(path, Fraction(amount, demands[path[0]]))
        for rank in senders
        for path, amount in _decompose(left, rank, {_target(collective): demands[rank]})
    ]


def _target(collective: Collective) -> int:
    assert collective.root is not None, "a gather has a root (checked by the collective)"
    return collective.root


def _decompose(
    flow: dict[Hop, int], source: Vertex, demands: Mapping[Vertex, int]
) -> Iterator[tuple[Path, int]]:
    """Take paths out of an integer flow, shortest first, until each target got its demand.

    `flow` is consumed. What is left may hold cycles and other sources' parts.
    """
    for target, demand in demands.items():
        missing = demand
        while missing:
            path = _shortest_ways(flow, source)[target]
            amount = min(missing, *(flow[hop] for hop in _hops(path)))
            for hop in _hops(path):
                flow[hop] -= amount
            missing -= amount
            yield path, amount


def _shortest_ways(flow: Mapping[Hop, int | Fraction], source: Vertex) -> dict[Vertex, Path]:
    """The paths of fewest links that still carry flow, to wherever there is one."""
    following: dict[Vertex, list[Vertex]] = defaultdict(list)
    for (src, dst), amount in flow.items():
        if amount > 0:
            following[src].append(dst)
    paths: dict[Vertex, Path] = {source: (source,)}
    queue = [source]
    for vertex in queue:
        for after in sorted(following[vertex]):
            if after not in paths:
                paths[after] = (*paths[vertex], after)
                queue.append(after)
    return paths


def _hops(path: Path) -> list[Hop]:
    return list(pairwise(path))


def _lift(
    topology: Topology, collective: Collective, limit: Bound, routes: Iterable[Route], method: Method
) -> Schedule:
    """One chunk per route; each hop from rank to rank is a transfer of its own step."""
    block = Fraction(1, len(collective.ranks))
    chunks: list[Chunk] = []
    transfers: list[Transfer] = []
    for route in routes:
        owner, target = route.ends
        stops = [i for i, vertex in enumerate(route.path) if not topology.is_switch(vertex)]
        for step, (start, end) in enumerate(pairwise(stops)):
            via = route.path[start + 1 : end]
            transfers.append(Transfer(len(chunks), route.path[start], route.path[end], step, via=via))
        chunks.append(Chunk(block * route.weight, owner, target))
    return Schedule.build(topology, collective, method, limit, chunks, transfers)
