"""What a chunk schedule has to do, freed of everything that solvers need not know.

Every collective becomes blocks that are only copied (a reduction is the mirror image of a copy on the
reversed topology, see `synth.chunks.problem.time_reversal`), and the topology becomes routes from rank to
rank: a link, or a way through switches, which share the capacities of their links. Capacities count chunks
per round: bandwidth over the greatest common divisor of all bandwidths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.collective import Collective, Demand, Kind
from arborcast.synth.errors import CollectiveError, InputError
from arborcast.synth.topology import Hop, Topology, Vertex

MOST_ROUTES = 20_000
"""Ways from rank to rank up to which a topology is handed to a solver; more would not fit its memory."""


class TooManyRoutesError(InputError):
    """The switches of a topology allow more ways from rank to rank than a solver could take."""


@dataclass(frozen=True, slots=True)
class Route:
    """A way from one rank to another within a step: a link, or a simple path through switches only.

    Attributes:
        src: the rank that sends.
        dst: the rank that receives.
        via: the switches between them, in order.
        links: the indices in `Topology.links` of the links it passes.
    """

    src: int
    dst: int
    via: tuple[Vertex, ...]
    links: tuple[int, ...]


@dataclass(frozen=True)
class ChunkProblem:
    """Blocks to copy over routes.

    Attributes:
        topology: the fabric; its ranks are the vertices that may hold chunks, relays included.
        demands: the blocks, all of one size; each is divided into C chunks.
        routes: sorted by (src, dst, via).
    """

    topology: Topology
    demands: tuple[Demand, ...]
    routes: tuple[Route, ...]

    @classmethod
    def of(cls, topology: Topology, collective: Collective) -> ChunkProblem:
        """The problem of a collective whose data is only copied.

        Raises:
            CollectiveError: the collective reduces; its mirror image (`synth.chunks.problem.time_reversal`)
            does not.
            TooManyRoutesError: the switches allow more than `MOST_ROUTES` routes.
        """
        if collective.kind.reduces:
            raise CollectiveError(f"{collective.kind}: reduces, and a problem only copies; mirror it")
        return cls(topology, demands_of(collective), routes_of(topology))

    @property
    def ranks(self) -> int:
        """Number of vertices that may hold chunks."""
        return self.topology.ranks

    @property
    def capacities(self) -> tuple[int, ...]:
        """Chunks per round of each link of the topology."""
        return self.topology.capacities

    @property
    def is_routing(self) -> bool:
        """Whether every block goes to one rank alone, so that nothing is worth copying on the way."""
        return all(len(demand.targets) == 1 for demand in self.demands)

    @property
    def is_spanning(self) -> bool:
        """Whether every block goes from one rank to all others."""
        return all(
            len(demand.sources) == 1 and len(demand.targets) == self.ranks - 1 for demand in self.demands
        )

    def route_costs(self, prices: NDArray[Any]) -> NDArray[Any]:
        """What each route costs in each step: a row per step, of prices of the links in each step."""
        links, starts = self._links_of_routes
        return np.asarray(np.add.reduceat(prices[:, links], starts, axis=1))

    @cached_property
    def _links_of_routes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The links of all routes, one route after the other, and where those of each begin."""
        counts = np.array([len(route.links) for route in self.routes], dtype=np.int64)
        links = np.array([link for route in self.routes for link in route.links], dtype=np.int64)
        return links, np.cumsum(counts) - counts

    @cached_property
    def leaving(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the routes that leave each rank."""
        return tuple(
            tuple(i for i, route in enumerate(self.routes) if route.src == rank) for rank in range(self.ranks)
        )

    @cached_property
    def arriving(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the routes that reach each rank."""
        return tuple(
            tuple(i for i, route in enumerate(self.routes) if route.dst == rank) for rank in range(self.ranks)
        )

    @cached_property
    def between(self) -> dict[tuple[int, int], list[int]]:
        """The indices of the routes from rank to rank, of those that have one, in order of both."""
        between: dict[tuple[int, int], list[int]] = {}
        for index, route in enumerate(self.routes):
            between.setdefault((route.src, route.dst), []).append(index)
        return between

    @cached_property
    def passing(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the routes that pass each link of the topology."""
        passing: list[list[int]] = [[] for _ in self.topology.links]
        for index, route in enumerate(self.routes):
            for link in route.links:
                passing[link].append(index)
        return tuple(map(tuple, passing))

    def steps_from(self, sources: frozenset[int]) -> tuple[int | None, ...]:
        """The least number of steps from the nearest of some ranks to each rank; None: out of reach."""
        return _distances(
            sources, lambda rank: [self.routes[index].dst for index in self.leaving[rank]], self.ranks
        )

    def steps_to(self, target: int) -> tuple[int | None, ...]:
        """The least number of steps from each rank to one; None: it cannot reach it."""
        return _distances(
            {target}, lambda rank: [self.routes[index].src for index in self.arriving[rank]], self.ranks
        )

    @cached_property
    def latency(self) -> int | None:
        """The least number of steps in which any schedule can end; None where a target is out of reach."""
        worst = 0
        for demand in self.demands:
            reached = self.steps_from(demand.sources)
            for target in demand.targets:
                here = reached[target]
                if here is None:
                    return None
                worst = max(worst, here)
        return worst


def _distances(
    starts: Iterable[int], neighbours: Callable[[int], Iterable[int]], ranks: int
) -> tuple[int | None, ...]:
    """Breadth first: the fewest moves from the nearest start to each rank; None: out of reach."""
    moves = dict.fromkeys(starts, 0)
    queue = deque(moves)
    while queue:
        rank = queue.popleft()
        for after in neighbours(rank):
            if after not in moves:
                moves[after] = moves[rank] + 1
                queue.append(after)
    return tuple(moves.get(rank) for rank in range(ranks))


def demands_of(collective: Collective) -> tuple[Demand, ...]:
    """The blocks that a collective without reductions must copy, in the order of its buffer."""
    everyone = frozenset(collective.ranks)

    def demand(owner: int, targets: frozenset[int]) -> Demand:
        return Demand(frozenset({owner}), targets - {owner})

    root = collective.root
    match collective.kind:
        case Kind.CUSTOM:
            return collective.demands
        case Kind.BROADCAST:
            assert root is not None, "a broadcast has a root (checked by the collective)"
            return (demand(root, everyone),)
        case Kind.ALLGATHER:
            return tuple(demand(rank, everyone) for rank in collective.ranks)
        case Kind.GATHER | Kind.SCATTER | Kind.ALLTOALL:
            return tuple(
                demand(block.owner, frozenset({block.target}))
                for block in collective.blocks()
                if block.owner is not None and block.target is not None
            )
        case _:
            raise CollectiveError(f"{collective.kind}: reduces, and a problem only copies; mirror it")


def routes_of(topology: Topology) -> tuple[Route, ...]:
    """Every way from rank to rank that passes no other rank and no vertex twice.

    Raises:
        TooManyRoutesError: there are more than `MOST_ROUTES`.
    """
    index = {(link.src, link.dst): position for position, link in enumerate(topology.links)}
    following: list[list[Vertex]] = [[] for _ in range(topology.size)]
    for src, dst in index:
        following[src].append(dst)
    found: list[Route] = []
    for src in range(topology.ranks):
        for path in _ways(topology, following, (src,)):
            links = tuple(index[hop] for hop in _hops(path))
            found.append(Route(src, path[-1], path[1:-1], links))
            if len(found) > MOST_ROUTES:
                raise TooManyRoutesError(
                    f"topology {topology.name}: its switches allow more than {MOST_ROUTES} ways from rank "
                    "to rank, too many for a chunk schedule; use trees"
                )
    return tuple(sorted(found, key=lambda route: (route.src, route.dst, route.via)))


def _ways(
    topology: Topology, following: Sequence[Sequence[Vertex]], path: tuple[Vertex, ...]
) -> Iterator[tuple[Vertex, ...]]:
    """Simple ways on from the end of a path through switches to a rank.

    None of them can be left out: each passes some link that any other one does not.
    """
    for after in following[path[-1]]:
        if after in path:
            continue
        if topology.is_switch(after):
            yield from _ways(topology, following, (*path, after))
        else:
            yield (*path, after)


def _hops(path: Sequence[Vertex]) -> list[Hop]:
    return list(pairwise(path))
