"""A plan: which part of which block goes which way, how fast that is, and in which order they leave.

What passes switches goes in rounds: those of the ports of the slowest switches that a part passes, inside its
box or between boxes. A part is first moved within its box, to the rank that sends it on, then exchanged, then
moved to its target; a round's exchange is one step behind what brings its parts there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

import numpy as np

from arborcast.synth.alltoallv.rerouting import Parts
from arborcast.synth.alltoallv.rounds import decompose
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Topology, Vertex, parts_of

METHOD = "alltoallv"


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """What goes which way, for one matrix of sizes.

    Attributes:
        topology: the fabric.
        collective: the alltoall with its sizes.
        bound: the proven limit of its rate, algbw of the mean buffer.
        parts: of the blocks, in units.
        units: of one byte.
    """

    topology: Topology
    collective: Collective
    bound: Bound
    parts: Parts
    units: int

    @cached_property
    def busiest(self) -> Fraction:
        """Bytes per unit of bandwidth of the link that is in use for the longest time."""
        load = self.parts.load(len(self.topology.links)).tolist()
        capacity = self.topology.capacities
        ratios = np.array(load) / np.array(capacity, dtype=np.float64)
        near = np.flatnonzero(ratios >= ratios.max() * (1 - 1e-9)).tolist()
        return max(Fraction(load[link], capacity[link] * self.units) for link in near)

    @property
    def rate(self) -> Fraction:
        """GB/s of the mean buffer, if all links work at their rates."""
        whole = Fraction(self.collective.total, len(self.collective.ranks))
        return whole * self.topology.bandwidth_unit / self.busiest

    @property
    def time_us(self) -> Fraction:
        """How long the busiest link is in use."""
        return self.busiest / self.topology.bandwidth_unit / 1000

    @property
    def gap(self) -> Fraction:
        """What is missing to the limit, as a part of it; 0 where the plan is proved to be the best."""
        return 1 - self.rate / self.bound.rate

    def schedule(self) -> Schedule:
        """The plan written out, a chunk for each part of a round: for checker, simulator and files."""
        pieces = pieces_of(self)
        return written_out(self.topology, self.collective, METHOD, self.bound, pieces, self.units)

    def ways(self) -> Iterator[tuple[tuple[Vertex, ...], Fraction]]:
        """The vertices that each part passes, and its bytes."""
        links, first = self.parts.links.tolist(), self.parts.first.tolist()
        ends = [(link.src, link.dst) for link in self.topology.links]
        for part, amount in enumerate(self.parts.amount.tolist()):
            hops = [ends[link] for link in links[first[part] : first[part + 1]]]
            yield (hops[0][0], *(dst for _, dst in hops)), Fraction(amount, self.units)


@dataclass(frozen=True, slots=True)
class BlockPiece:
    """A part of a block that moves as one.

    Attributes:
        path: the vertices that it passes.
        amount: in units of the plan.
        step: of its first transfer.
    """

    path: tuple[Vertex, ...]
    amount: int
    step: int


def pieces_of(plan: ExchangePlan) -> list[BlockPiece]:
    """All parts of a plan, cut into those of each round, in the order of their steps."""
    topology = plan.topology
    home = _switch_groups(topology)
    paths = [(path, int(amount * plan.units)) for path, amount in plan.ways()]
    slowest = [_slowest_exchange(topology, path) for path, _ in paths]
    found: list[BlockPiece] = []
    of_group: dict[Vertex, list[int]] = defaultdict(list)
    most = max(len(stops_of(topology, path)) for path, _ in paths) - 1
    for part, (path, amount) in enumerate(paths):
        place = slowest[part]
        if place is None:  # links alone: those that are sent on leave first, and all arrive together
            found.append(BlockPiece(path, amount, most - len(path) + 1))
        else:
            of_group[home[_via(topology, path, place)[0]]].append(part)
    for parts in of_group.values():
        exchanges = {part: _ends(topology, paths[part][0], slowest[part] or 0) for part in parts}
        for part, taken, turn in _in_rounds({part: paths[part][1] for part in parts}, exchanges):
            # All exchanges of a round are one step; what comes before takes as many steps as it may.
            found.append(BlockPiece(paths[part][0], taken, turn + most - 1 - (slowest[part] or 0)))
    first = min(piece.step for piece in found)
    return sorted((BlockPiece(it.path, it.amount, it.step - first) for it in found), key=lambda it: it.step)


def written_out(
    topology: Topology,
    collective: Collective,
    name: str,
    bound: Bound,
    pieces: Sequence[BlockPiece],
    units: int = 1,
) -> Schedule:
    """A chunk for each piece, which goes its way in consecutive steps.

    Args:
        topology: the fabric.
        collective: the alltoall with its sizes.
        name: of the method.
        bound: of its rate.
        pieces: of the blocks.
        units: of their amounts, how many are one byte.
    """
    unit = Fraction(len(collective.ranks), collective.total * units)
    chunks = [Chunk(unit * piece.amount, piece.path[0], piece.path[-1]) for piece in pieces]
    transfers = [
        Transfer(number, piece.path[start], piece.path[end], step, via=piece.path[start + 1 : end])
        for number, piece in enumerate(pieces)
        for step, (start, end) in enumerate(pairwise(stops_of(topology, piece.path)), start=piece.step)
    ]
    return Schedule.build(topology, collective, Method(name), bound, chunks, transfers)


def stops_of(topology: Topology, path: tuple[Vertex, ...]) -> list[int]:
    """The places of a path that are ranks."""
    return [place for place, vertex in enumerate(path) if not topology.is_switch(vertex)]


def _via(topology: Topology, path: tuple[Vertex, ...], exchange: int) -> tuple[Vertex, ...]:
    stops = stops_of(topology, path)
    return path[stops[exchange] + 1 : stops[exchange + 1]]


def _ends(topology: Topology, path: tuple[Vertex, ...], exchange: int) -> tuple[Vertex, Vertex]:
    stops = stops_of(topology, path)
    return path[stops[exchange]], path[stops[exchange + 1]]


def _slowest_exchange(topology: Topology, path: tuple[Vertex, ...]) -> int | None:
    """Which transfer of a path passes switches over the slowest link; None where none does."""
    stops = stops_of(topology, path)
    rates = {
        number: min(topology.bandwidth[hop] for hop in pairwise(path[start : end + 1]))
        for number, (start, end) in enumerate(pairwise(stops))
        if end > start + 1
    }
    return min(rates, key=rates.__getitem__) if rates else None


def _switch_groups(topology: Topology) -> dict[Vertex, Vertex]:
    """Switches that are joined to each other, each with the first of its group."""
    switches = range(topology.ranks, topology.size)
    joined = parts_of(switches, ((link.src, link.dst) for link in topology.links))
    return {vertex: min(part) for part in joined for vertex in part}


def _in_rounds(
    amounts: dict[int, int], exchanges: dict[int, tuple[Vertex, Vertex]]
) -> list[tuple[int, int, int]]:
    """Part, amount and round, of parts that are exchanged between ports of one group of switches."""
    ports = {
        rank: place for place, rank in enumerate(sorted({end for ends in exchanges.values() for end in ends}))
    }
    matrix = np.zeros((len(ports), len(ports)), dtype=np.int64)
    waiting: dict[tuple[int, int], list[int]] = defaultdict(list)
    for part, (src, dst) in exchanges.items():
        matrix[ports[src], ports[dst]] += amounts[part]
        waiting[ports[src], ports[dst]].append(part)
    left = dict(amounts)
    found: list[tuple[int, int, int]] = []
    for turn, src, dst, amount in zip(*(column.tolist() for column in decompose(matrix)), strict=True):
        queue, missing = waiting[src, dst], amount
        while missing:
            part = queue[0]
            taken = min(missing, left[part])
            found.append((part, taken, turn))
            missing -= taken
            left[part] -= taken
            if not left[part]:
                queue.pop(0)
    return found
