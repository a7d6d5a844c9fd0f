"""What a topology says that flows get: each on its own way, sharing every link fairly.

A flow goes from rank to rank through switches only, on the widest way (the shortest among those). Rates
are max-min fair: all grow alike until a link is full, whose flows then stay as they are. This is what
connections in one network come near to; it is a model, and what it does not explain is told.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import TypeAlias

from arborcast.backends.probe.measurements import Flow
from arborcast.synth.topology import Hop, Topology, Vertex

Limit: TypeAlias = tuple[frozenset[Flow], float]
"""Flows that share something, and how much of it there is: their rates add up to at most this, GB/s."""


def fair_rates(flows: Collection[Flow], limits: Iterable[Limit]) -> dict[Flow, float]:
    """Max-min fair rates in GB/s; infinite for a flow without any limit.

    Takes time in proportion to flows times limits.
    """
    rates: dict[Flow, float] = {}
    left = [
        (capacity, shared)
        for among, capacity in limits
        if (shared := [flow for flow in flows if flow in among])
    ]
    while left:
        # The limit that is reached first while all rates grow alike.
        level, full = min(
            ((capacity / len(shared), shared) for capacity, shared in left), key=lambda pair: pair[0]
        )
        level, fixed = max(level, 0.0), set(full)
        rates |= dict.fromkeys(fixed, level)
        left = [
            (capacity - level * (len(shared) - len(growing)), growing)
            for capacity, shared in left
            if (growing := [flow for flow in shared if flow not in fixed])
        ]
    return {flow: rates.get(flow, math.inf) for flow in flows}


class Predictor:
    """Rates of flows by a topology, whose ways are found once."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._next: dict[Vertex, list[tuple[Vertex, float]]] = defaultdict(list)
        for link in topology.links:
            self._next[link.src].append((link.dst, float(link.bandwidth)))
        self._ways: dict[Flow, tuple[Hop, ...]] = {
            (rank, other): way
            for rank in range(topology.ranks)
            for other, way in self._ways_from(rank).items()
        }

    def way(self, flow: Flow) -> tuple[Hop, ...] | None:
        """The links on the flow's way, None where only other ranks could forward it."""
        return self._ways.get(flow)

    def rates(self, flows: Iterable[Flow]) -> dict[Flow, float]:
        """GB/s of each flow when all run at once; those without a way are left out."""
        ways = {flow: way for flow in flows if (way := self.way(flow)) is not None}
        users: dict[Hop, set[Flow]] = defaultdict(set)
        for flow, way in ways.items():
            for hop in way:
                users[hop].add(flow)
        bandwidth = self.topology.bandwidth
        return fair_rates(
            tuple(ways), [(frozenset(sharing), float(bandwidth[hop])) for hop, sharing in users.items()]
        )

    def _ways_from(self, rank: int) -> Mapping[int, tuple[Hop, ...]]:
        """The widest way to every other rank, fewest links among equals; Dijkstra's search."""
        done: dict[Vertex, tuple[Hop, ...]] = {}
        queue: list[tuple[float, int, Vertex, tuple[Hop, ...]]] = [(-math.inf, 0, rank, ())]
        while queue:
            width, length, vertex, way = heapq.heappop(queue)
            if vertex in done:
                continue
            done[vertex] = way
            if vertex == rank or self.topology.is_switch(vertex):
                for following, bandwidth in self._next[vertex]:
                    if following not in done:
                        item = (max(width, -bandwidth), length + 1, following, (*way, (vertex, following)))
                        heapq.heappush(queue, item)
        return {
            vertex: way for vertex, way in done.items() if vertex < self.topology.ranks and vertex != rank
        }


def ratio(first: float, second: float) -> float:
    """How many times larger the larger one is; at least 1."""
    if min(first, second) <= 0:
        return math.inf
    return max(first / second, second / first)


def agrees(predicted: float, minimum: float, maximum: float, tolerance: float) -> bool:
    """Whether a prediction is within the measured spread, widened by the tolerance on both sides."""
    return minimum / (1 + tolerance) <= predicted <= maximum * (1 + tolerance)
