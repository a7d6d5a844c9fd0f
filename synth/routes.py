"""Gather, scatter and alltoall: every block travels along paths, and no data is ever combined or copied.

A gather is one flow from all ranks to the root, solved exactly in integers, so it reaches its bound. An
alltoall is a concurrent multi-commodity flow: HiGHS finds it, its paths get exact weights, and the rate of
the schedule is the exact one of those weights, whatever was lost in rounding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, TypeAlias

from synth.bounds import bound
from synth.bounds.linear_program import LinearProgram
from synth.bounds.routing_lp import ConcurrentFlow
from synth.certificate import Bound
from synth.collective import Collective, Kind
from synth.deadline import Deadline
from synth.errors import CollectiveError, InfeasibleError, TimedOutError
from synth.reachability import who_is_cut_off
from synth.schedule import Chunk, Method, Schedule, Transfer
from synth.topology import Hop, Topology, Vertex

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
        seed: recorded in the schedule; nothing here is random.
        deadline_s: seconds for the LPs of an alltoall, after which its bound may be looser; the flows of
            the others take milliseconds.

    Raises:
        CollectiveError: another kind of collective.
        InfeasibleError: some rank cannot reach another one.
        TimedOutError: the linear programs were not solved in time; carries the blocks on shortest ways.
    """
    deadline = Deadline.after(deadline_s)
    if collective.kind not in ROUTED_KINDS:
        kinds = ", ".join(sorted(ROUTED_KINDS))
        other = "a chunk schedule" if collective.kind is Kind.CUSTOM else "trees"
        raise CollectiveError(f"{collective.kind}: routes serve {kinds}; use {other}")
    limit = bound(topology, collective, deadline_s=deadline.left_s)
    if limit.rate == 0:
        raise InfeasibleError(who_is_cut_off(topology, collective), limit)
    match collective.kind:
        case Kind.GATHER:
            routes = _gather_routes(topology, collective, limit.rate)
        case Kind.SCATTER:
            mirrored = _gather_routes(topology.reversed(), collective, limit.rate)
            routes = [Route(route.path[::-1], route.weight) for route in mirrored]
        case _:
            try:
                routes = _alltoall_routes(topology, collective, limit.rate, deadline)
            except TimedOutError as error:
                best = _lift(
                    topology,
                    collective,
                    limit,
                    _shortest_routes(topology, collective),
                    Method("routes", seed),
                )
                message = f"{collective.kind}: the deadline of {deadline_s} s passed"
                raise TimedOutError(message, best) from error
    return _lift(topology, collective, limit, routes, Method("routes", seed))


def _shortest_routes(topology: Topology, collective: Collective) -> Iterator[Route]:
    """Every block whole on a way of the fewest links, for who has no time to choose well."""
    for source in collective.ranks:
        paths = _shortest_ways(topology.bandwidth, source)
        for target in collective.ranks:
            if target != source:
                yield Route(paths[target], Fraction(1))


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


def _alltoall_routes(
    topology: Topology, collective: Collective, limit: Fraction, deadline: Deadline
) -> list[Route]:
    """Paths of a concurrent flow, then the exact weights that serve them best."""
    deadline.check("the limit of the alltoall")
    paths = _concurrent_flow_paths(topology, collective, deadline.left_s)
    weights = _best_weights(topology, paths, deadline.left_s)
    best: list[Route] = []
    best_rate = Fraction(0)
    for denominator in (*range(1, 129), 10**4, 10**6):
        routes = list(_rounded(paths, weights, denominator))
        rate = _rate(topology, len(collective.ranks), routes)
        if rate > best_rate:
            best, best_rate = routes, rate
        if rate == limit:
            break
    return best


def _concurrent_flow_paths(
    topology: Topology, collective: Collective, deadline_s: float | None
) -> list[Path]:
    """Candidate paths: those of an optimal flow aggregated by source (LP over links, not over paths)."""
    flows = ConcurrentFlow(topology, collective).flows(deadline_s)
    paths: set[Path] = set()
    for source, sent in zip(collective.ranks, flows, strict=True):
        flow = {
            (link.src, link.dst): round(amount * FLOW_PARTS)
            for link, amount in zip(topology.links, sent.tolist(), strict=True)
        }
        # Rounding leaves a few parts unconnected: ask for slightly less than each target gets.
        demands = {rank: FLOW_PARTS - FLOW_PARTS // 1000 for rank in collective.ranks if rank != source}
        paths.update(path for path, _ in _decompose(flow, source, demands))
    return sorted(paths)


def _best_weights(topology: Topology, paths: list[Path], deadline_s: float | None) -> list[float]:
    """Weights of the paths, adding up to 1 for each pair of ends, of least congestion (an LP vertex)."""
    users: dict[Hop, list[int]] = defaultdict(list)
    pairs: dict[Hop, list[int]] = defaultdict(list)
    for column, path in enumerate(paths, start=1):
        pairs[path[0], path[-1]].append(column)
        for hop in _hops(path):
            users[hop].append(column)
    # Column 0 is the rate of every pair; then come the GB/s of each path.
    program = LinearProgram((1, *[0] * len(paths)), scale=max(topology.capacities))
    for columns in pairs.values():
        program.add_row([0, *columns], [-1, *[1] * len(columns)], lower=0, upper=0)
    for hop, capacity in zip(topology.bandwidth, topology.capacities, strict=True):
        program.add_row(users[hop], [1] * len(users[hop]), upper=capacity)
    rate, *amounts = program.solve(deadline_s).tolist()
    return [amount / rate for amount in amounts]


def _rounded(paths: list[Path], weights: list[float], denominator: int) -> Iterator[Route]:
    """Weights as multiples of 1/denominator that add up to 1 for each pair of ends."""
    pairs: dict[tuple[Vertex, Vertex], list[int]] = defaultdict(list)
    for index, path in enumerate(paths):
        pairs[path[0], path[-1]].append(index)
    for indices in pairs.values():
        parts = {i: math.floor(weights[i] * denominator + 1e-9) for i in indices}
        by_remainder = sorted(indices, key=lambda i: (parts[i] - weights[i] * denominator, i))
        missing = denominator - sum(parts.values())
        for i in by_remainder[: max(missing, 0)]:
            parts[i] += 1
        for i in indices:
            if parts[i]:
                yield Route(paths[i], Fraction(parts[i], denominator))


def _rate(topology: Topology, count: int, routes: Iterable[Route]) -> Fraction:
    """The algbw of an alltoall along these routes; each block is 1/count of a rank's buffer."""
    load: dict[Hop, Fraction] = defaultdict(Fraction)
    for route in routes:
        for hop in _hops(route.path):
            load[hop] += route.weight
    return count / max(amount / topology.bandwidth[hop] for hop, amount in load.items())


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
