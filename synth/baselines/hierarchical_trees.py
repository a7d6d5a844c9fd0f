r"""Trees by levels: low ones inside boxes, and between boxes trees in which each has a few below it.

A box is a set of ranks that reach each other over links of less latency than any way out of it has; where
there are none, all ranks are one box. Lane `i` goes between boxes over the `i`-th rank of each, so that all
of their adapters are used. With two boxes below each (`fan_out` 2) and two copies, whose inner boxes differ,
these are the trees that NCCL uses across hosts, but for its chains inside them (Sanders, Speck and Traeff
2009); more below each make fewer steps. Lanes 0 and 1 of boxes A..F with two below each, and the second copy
of lane 0:

       A0            A1            D0
     /    \        /    \        /    \
    B0     C0     B1     C1     E0     F0
   /  \   /      /  \   /      /  \   /
  D0  E0 F0     D1  E1 F1     A0  B0 C0
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise

from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Topology, Vertex

Ways = Mapping[int, tuple[int | None, tuple[Vertex, ...]]]
"""Of each rank the one above it, None for the root, and the switches between."""

MOST_TRANSFERS = 70_000
"""Of a schedule that is compared with others: more take seconds to simulate at one size."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """What the trees look like.

    Attributes:
        fan_out: how many boxes are below a box.
        lanes: how many ranks of each box go out of it, each with trees of its own; None for all.
        copies: trees of each lane, of which each has other inner boxes.
    """

    fan_out: int
    lanes: int | None
    copies: int


DOUBLE = TreeShape(fan_out=2, lanes=None, copies=2)
COMPARED = (
    *(TreeShape(fan_out, 1, 1) for fan_out in (2, 4, 8, 12)),
    *(TreeShape(fan_out, None, 1) for fan_out in (2, 4, 8)),
    DOUBLE,
    TreeShape(4, None, 4),
)
"""Those that are compared at each size: few messages first, then more of the links' rate."""


def solve_levels(
    topology: Topology,
    collective: Collective,
    bound: Bound,
    _seed: int,
    deadline: Deadline,
    shape: TreeShape = DOUBLE,
    known: _Boxes | None = None,
) -> Schedule:
    """A broadcast, reduce or allreduce along such trees; a root of the collective is the root of all.

    Nothing is left to chance: `_seed` stands for those of `BASELINES` that search.

    `Method.settings` holds the shape and `boxes`, how many were found.

    Raises:
        InfeasibleError: some rank has no way to another of its box, or to that of its lane in another box,
            without passing ranks elsewhere.
        TimedOutError: the deadline passed.
    """
    boxes = known or _Boxes(topology, collective.ranks)
    count = len(boxes.members)
    lanes, copies = boxes.trees(shape, collective)
    chunks: list[Chunk] = []
    transfers: list[Transfer] = []
    for lane in range(lanes):
        for copy in range(copies):
            deadline.check("the search for trees by levels")
            first = -(-count // shape.fan_out) * copy if copies > 1 else 0
            order = [(first + place) % count for place in range(count)]
            if collective.root is not None:
                home = boxes.box_of(collective.root)
                order = [home, *(box for box in order if box != home)]
            root = boxes.rank(order[0], lane) if collective.root is None else collective.root
            ways = boxes.tree(root, lane, order, shape.fan_out)
            if collective.kind.reduces:
                boxes.check_back(ways)
            transfers += _moves(collective.kind, ways, len(chunks))
            chunks.append(Chunk(Fraction(1, lanes * copies), root))
    settings = (("boxes", count), ("fan_out", shape.fan_out), ("lanes", lanes), ("copies", copies))
    return Schedule.build(topology, collective, Method("levels", settings=settings), bound, chunks, transfers)


def level_schedules(
    topology: Topology, collective: Collective, bound: Bound, deadline: Deadline
) -> Iterator[Schedule]:
    """Those of `COMPARED` that differ and are not too large; raises as `solve_levels`."""
    seen: set[tuple[object, ...]] = set()
    boxes = _Boxes(topology, collective.ranks)
    phases = 2 if collective.kind is Kind.ALLREDUCE else 1
    for shape in COMPARED:
        if math.prod(boxes.trees(shape, collective)) * phases * (len(collective.ranks) - 1) > MOST_TRANSFERS:
            continue
        found = solve_levels(topology, collective, bound, 0, deadline, shape, boxes)
        what = tuple((move.chunk, move.src, move.dst) for move in found.transfers)
        if what not in seen:
            seen.add(what)
            yield found


@dataclass(frozen=True)
class _Boxes:
    """The ranks by boxes, and ways inside and between."""

    topology: Topology
    ranks: tuple[int, ...]

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each box, ascending."""
        return self._found[1]

    @cached_property
    def _found(self) -> tuple[Fraction, tuple[tuple[int, ...], ...]]:
        """The least latency whose links join ranks, and what they join."""
        latencies = sorted({link.latency_us for link in self.topology.links})
        for latency in latencies:
            groups = self._joined(latency)
            if len(groups) < len(self.ranks):
                return latency, groups
        return latencies[-1], (self.ranks,)

    @cached_property
    def size(self) -> int:
        """Ranks of the smallest box."""
        return min(map(len, self.members))

    def trees(self, shape: TreeShape, collective: Collective) -> tuple[int, int]:
        """Lanes and copies; one tree where there is one box and a root, as all would be the same."""
        if len(self.members) == 1 and collective.root is not None:
            return 1, 1
        return min(shape.lanes or self.size, self.size), min(shape.copies, len(self.members))

    def box_of(self, rank: int) -> int:
        """The box of a rank."""
        return next(box for box, members in enumerate(self.members) if rank in members)

    def rank(self, box: int, lane: int) -> int:
        """The rank of a lane in a box."""
        return self.members[box][lane] if len(self.members) > 1 else self._central[lane]

    @cached_property
    def _central(self) -> list[int]:
        """The ranks of the only box, those first from which all is near."""
        return sorted(self.members[0], key=lambda rank: (_height(self.inside(rank)), rank))

    def tree(self, root: int, lane: int, order: Sequence[int], fan_out: int) -> Ways:
        """One tree over all ranks, from `root` in the first box of `order`, which is above those after it."""
        ways = dict(self.inside(root))
        for place, box in enumerate(order[1:], start=1):
            entry, above = self.rank(box, lane), self.rank(order[(place - 1) // fan_out], lane)
            ways |= self.inside(entry)
            ways[entry] = (above, self._between(above, entry))
        return ways

    def inside(self, root: int) -> Ways:
        """Ways to all ranks of the root's box: over the fewest ranks, then the least latency."""
        known = self._inside.get(root)
        if known is None:
            known = self._inside[root] = self._search(root)
        return known

    @cached_property
    def _inside(self) -> dict[int, Ways]:
        return {}

    @cached_property
    def _receivers(self) -> dict[Vertex, list[Vertex]]:
        receivers: dict[Vertex, list[Vertex]] = {vertex: [] for vertex in range(self.topology.size)}
        for link in self.topology.links:
            receivers[link.src].append(link.dst)
        return receivers

    @cached_property
    def _mates(self) -> dict[Vertex, list[Vertex]]:
        """What each vertex sends to over links inside boxes."""
        longest, latency = self._found[0], self.topology.latency_us
        return {
            vertex: [receiver for receiver in receivers if latency[vertex, receiver] <= longest]
            for vertex, receivers in self._receivers.items()
        }

    def check_back(self, ways: Ways) -> None:
        """Raise InfeasibleError unless each way can be gone backwards."""
        for rank, (above, via) in ways.items():
            path = () if above is None else (rank, *reversed(via), above)
            if any(hop not in self.topology.bandwidth for hop in pairwise(path)):
                raise InfeasibleError(
                    f"levels: rank {rank} has no way back to {above} over the same switches"
                )

    def _search(self, root: int) -> Ways:
        mates = set(self.members[self.box_of(root)])
        latency = self.topology.latency_us
        ways: dict[int, tuple[int | None, tuple[Vertex, ...]]] = {}
        queue: list[tuple[int, Fraction, int, Vertex, int | None, tuple[Vertex, ...]]] = []
        heappush(queue, (0, Fraction(0), 0, root, None, ()))
        closed: set[Vertex] = set()
        while queue and len(ways) < len(mates):
            steps, so_far, _, vertex, above, via = heappop(queue)
            if vertex in closed:
                continue
            closed.add(vertex)
            if vertex in mates:
                ways[vertex] = (above, via)
                above, via = vertex, ()
                steps += 1
            else:
                via = (*via, vertex)
            for receiver in self._mates[vertex]:
                if receiver not in closed and (receiver in mates or self.topology.is_switch(receiver)):
                    further = so_far + latency[vertex, receiver]
                    heappush(queue, (steps, further, len(closed), receiver, above, via))
        if len(ways) < len(mates):
            raise InfeasibleError(f"levels: rank {root} does not reach all ranks of its box")
        return ways

    def _between(self, src: int, dst: int) -> tuple[Vertex, ...]:
        """The switches on the way of least latency, of several the widest."""
        rate, latency = self.topology.bandwidth, self.topology.latency_us
        best: tuple[Fraction, Fraction, tuple[Vertex, ...]] | None = None
        for switch, (so_far, narrow, via) in self._switches_from(src).items():
            if (switch, dst) in rate:
                way = (so_far + latency[switch, dst], max(narrow, -rate[switch, dst]), via)
                best = way if best is None else min(best, way)
        if (src, dst) in rate:
            way = (latency[src, dst], -rate[src, dst], ())
            best = way if best is None else min(best, way)
        if best is None:
            raise InfeasibleError(f"levels: no way through switches from rank {src} to {dst} of another box")
        return best[2]

    def _switches_from(self, src: int) -> dict[Vertex, tuple[Fraction, Fraction, tuple[Vertex, ...]]]:
        """Of each switch that is reached through switches: latency, minus the width, and the switches."""
        known = self._leaving.get(src)
        if known is not None:
            return known
        rate, latency = self.topology.bandwidth, self.topology.latency_us
        found: dict[Vertex, tuple[Fraction, Fraction, tuple[Vertex, ...]]] = {}
        queue: list[tuple[Fraction, Fraction, tuple[Vertex, ...], Vertex]] = [
            (Fraction(0), -sum(rate.values(), Fraction(0)), (), src)
        ]
        while queue:
            so_far, narrow, via, vertex = heappop(queue)
            if vertex in found:
                continue
            if vertex != src:
                found[vertex] = (so_far, narrow, via)
            for receiver in self._switches_after[vertex]:
                if receiver not in found:
                    hop = (vertex, receiver)
                    way = (so_far + latency[hop], max(narrow, -rate[hop]), (*via, receiver), receiver)
                    heappush(queue, way)
        self._leaving[src] = found
        return found

    @cached_property
    def _leaving(self) -> dict[int, dict[Vertex, tuple[Fraction, Fraction, tuple[Vertex, ...]]]]:
        return {}

    @cached_property
    def _switches_after(self) -> dict[Vertex, list[Vertex]]:
        is_switch = self.topology.is_switch
        return {vertex: list(filter(is_switch, others)) for vertex, others in self._receivers.items()}

    def _joined(self, latency: Fraction) -> tuple[tuple[int, ...], ...]:
        """The ranks that links of at most this latency join, in the order of their first ranks."""
        taking_part = {*self.ranks, *range(self.topology.ranks, self.topology.size)}
        above = {vertex: vertex for vertex in taking_part}

        def top(vertex: Vertex) -> Vertex:
            while above[vertex] != vertex:
                above[vertex] = above[above[vertex]]
                vertex = above[vertex]
            return vertex

        for link in self.topology.links:
            if link.latency_us <= latency and {link.src, link.dst} <= taking_part:
                above[top(link.src)] = top(link.dst)
        groups: dict[Vertex, list[int]] = {}
        for rank in sorted(self.ranks):
            groups.setdefault(top(rank), []).append(rank)
        return tuple(map(tuple, groups.values()))


def _depths(ways: Ways) -> dict[int, int]:
    depths: dict[int, int] = {}
    for rank in ways:
        path = [rank]
        while path[-1] not in depths and (above := ways[path[-1]][0]) is not None:
            path.append(above)
        last = depths.setdefault(path.pop(), 0)
        for lower in reversed(path):
            last += 1
            depths[lower] = last
    return depths


def _height(ways: Ways) -> int:
    return max(_depths(ways).values())


def _moves(kind: Kind, ways: Ways, chunk: int) -> Iterator[Transfer]:
    """Up from the leaves in the last steps that do, then down."""
    depths = _depths(ways)
    height = max(depths.values())
    for rank, (above, via) in ways.items():
        if above is not None:
            if kind.reduces:
                yield Transfer(chunk, rank, above, height - depths[rank], True, tuple(reversed(via)))
            if kind is not Kind.REDUCE:
                after = height if kind.reduces else 0
                yield Transfer(chunk, above, rank, after + depths[rank] - 1, via=via)
