"""What the messages of a program put on the links of a topology, and how fast that can be at best."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, pairwise
from typing import TypeAlias

from arborcast.backends.programs.program import GlobalProgram, Move, ProgramError
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective
from arborcast.synth.topology import Hop, Topology, Vertex


@dataclass(frozen=True)
class Traffic:
    """Loads of a program on a topology.

    Attributes:
        loads: the share of the buffer that passes each link.
        rate: algbw in GB/s that the fullest link allows; 0 where nothing moves.
        fullest: that link, None where nothing moves.
        bound: the proven limit of the collective there, with as many streams as links.
    """

    loads: Mapping[Hop, Fraction]
    rate: Fraction
    fullest: Hop | None
    bound: Bound


def collective_of(program: GlobalProgram, topology: Topology) -> Collective:
    """What a program does, on a topology.

    Raises:
        ProgramError: it has another number of ranks.
    """
    if topology.ranks != program.ranks:
        raise ProgramError(f"the program is for {program.ranks} ranks, {topology.name} has {topology.ranks}")
    return Collective.on(topology, program.kind, root=program.root or 0)


def traffic(
    program: GlobalProgram,
    messages: Mapping[tuple[int, int], Fraction],
    topology: Topology,
    bound: Bound | None = None,
) -> Traffic:
    """Where the messages of a program go; each takes a shortest way through switches.

    Args:
        program: which one.
        messages: the share of the buffer from rank to rank, as the checker counts it.
        topology: of as many ranks.
        bound: of the collective there, where it is known already.

    Raises:
        ProgramError: another number of ranks, or ranks that exchange messages and have no way to each other.
    """
    from arborcast import synth

    collective = collective_of(program, topology)
    ways = routes(topology, messages)
    passing = [(hop, share) for pair, share in messages.items() for hop in pairwise(ways[pair])]
    loads: dict[Hop, Fraction] = {}
    for hop, share in chain(passing, _by_switches(program, topology)):
        loads[hop] = loads.get(hop, Fraction(0)) + share
    fullest = max(loads, key=lambda hop: loads[hop] / topology.bandwidth[hop], default=None)
    rate = Fraction(0) if fullest is None else topology.bandwidth[fullest] / loads[fullest]
    if bound is None or topology.streams:  # no runtime keeps to them, so a program may be faster
        free = replace(topology, streams=())
        bound = synth.bound(free, collective.kind, root=collective.root or 0)
    return Traffic(loads, rate, fullest, bound)


def switch_of(topology: Topology, ranks: Iterable[int]) -> Vertex:
    """The first switch with links from and to all of these ranks that adds or multicasts.

    Raises:
        ProgramError: there is none.
    """
    wanted = sorted(set(ranks))
    for vertex in range(topology.ranks, topology.holders):
        if all({(vertex, rank), (rank, vertex)} <= topology.bandwidth.keys() for rank in wanted):
            return vertex
    names = ", ".join(map(str, wanted[:8]))
    raise ProgramError(f"{topology.name} has no switch that adds or multicasts at ranks {names}")


Way: TypeAlias = list[list[Hop]]
"""The links that bytes pass one after another; through several at once where a switch adds or multicasts."""


def switch_ways(topology: Topology, rank: int, move: Move) -> Iterator[Way]:
    """What passes links as a switch adds it for the rank whose move it is, or multicasts it.

    Raises:
        ProgramError: no switch does so.
    """
    for spans, reads in ((move.sources, True), (move.targets, False)):
        others = [span.rank for span in spans if span.rank is not None]
        if move.switch and others:
            switch = switch_of(topology, others)
            many = [(other, switch) if reads else (switch, other) for other in others]
            yield [many, [(switch, rank)]] if reads else [[(rank, switch)], many]


def _by_switches(program: GlobalProgram, topology: Topology) -> Iterator[tuple[Hop, Fraction]]:
    """Of what switches add and multicast, the share of the buffer that passes each link."""
    for rank, _, _, move in program.unrolled().operations:
        if isinstance(move, Move):
            share = Fraction(move.count, program.chunks)
            for way in switch_ways(topology, rank, move):
                yield from ((hop, share) for hops in way for hop in hops)


def routes(topology: Topology, pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Vertex, ...]]:
    """A shortest way through switches between each two ranks, its ends included.

    Raises:
        ProgramError: there is none.
    """
    asked = sorted(pairs)
    ways = straight_ways(topology, sorted({src for src, _ in asked}))
    for src, dst in asked:
        if (src, dst) not in ways:
            raise ProgramError(f"rank {src} sends to rank {dst}, {topology.name} has no link between them")
    return {(src, dst): (src, *ways[src, dst], dst) for src, dst in asked}


Ways: TypeAlias = Mapping[tuple[int, int], tuple[Vertex, ...]]
"""By two ranks, the switches between them."""


def straight_ways(topology: Topology, sources: Iterable[int] | None = None) -> Ways:
    """One way between every two ranks that are joined: a link, else the fewest switches.

    Args:
        topology: the fabric.
        sources: the ranks where they start; None for all.
    """
    after: dict[Vertex, list[Vertex]] = {}
    for link in topology.links:
        after.setdefault(link.src, []).append(link.dst)
    found: dict[tuple[int, int], tuple[Vertex, ...]] = {}
    for src in range(topology.ranks) if sources is None else sources:
        level: list[tuple[Vertex, ...]] = [(src,)]
        seen = {src}
        while level:
            reached: list[tuple[Vertex, ...]] = []
            for way in level:
                for vertex in after.get(way[-1], ()):
                    if vertex not in seen:
                        seen.add(vertex)
                        reached.append((*way, vertex))
            for way in reached:
                if not topology.is_switch(way[-1]):
                    found[src, way[-1]] = way[1:-1]
            level = [way for way in reached if topology.is_switch(way[-1])]
    return found
