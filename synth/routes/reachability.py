"""Who is cut off: the parts of a fabric, and the words for a bound of zero, by walking the links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.topology import Topology, Vertex

_DOWNSTREAM = frozenset({Kind.BROADCAST, Kind.SCATTER})
_UPSTREAM = frozenset({Kind.REDUCE, Kind.GATHER})

_MOST_NAMED = 16  # parts that a line names


@dataclass(frozen=True, slots=True)
class Components:
    """The ranks of a fabric by part: ranks that reach each other, through whatever lies between.

    Attributes:
        ranks: of each part, ascending; parts in order of their least rank.
        one_way: pairs of parts (by number) of which links lead from the first to the second, past no third
            part; nothing leads back.
    """

    ranks: tuple[tuple[int, ...], ...]
    one_way: tuple[tuple[int, int], ...]

    @property
    def largest(self) -> tuple[int, ...]:
        """The ranks of the part with the most of them; the first of equals."""
        return max(self.ranks, key=len)

    def __str__(self) -> str:
        """`2 parts: ranks 0-3 | rank 4; links lead from ranks 0-3 to rank 4 only one way`."""
        named = [_ranks(ranks) for ranks in self.ranks]
        more = " | ..." if len(named) > _MOST_NAMED else ""
        text = f"{len(named)} parts: {' | '.join(named[:_MOST_NAMED])}{more}"
        ways = [f"{named[first]} to {named[second]}" for first, second in self.one_way[:_MOST_NAMED]]
        return f"{text}; one way only: {', '.join(ways)}" if ways else text


def parts_of(topology: Topology, ranks: Iterable[int] | None = None) -> Components:
    """The parts into which a fabric falls; one where all ranks reach each other.

    Args:
        topology: the fabric.
        ranks: those whose parts count, such as those of a collective; others only forward. None for all.
    """
    import networkx

    counted = set(range(topology.ranks) if ranks is None else ranks)
    graph: networkx.DiGraph[int] = networkx.DiGraph()
    graph.add_nodes_from(range(topology.size))
    graph.add_edges_from((link.src, link.dst) for link in topology.links)
    found = [frozenset(part) for part in networkx.strongly_connected_components(graph)]
    sets = sorted(tuple(sorted(part & counted)) for part in found if part & counted)
    number = {rank: index for index, part in enumerate(sets) for rank in part}
    of_vertex = {vertex: number[min(part & counted)] for part in found if part & counted for vertex in part}
    one_way = set()
    for index, part in enumerate(sets if len(sets) > 1 else []):
        reached, frontier = {part[0]}, [part[0]]
        for vertex in frontier:
            for after in graph.successors(vertex):
                if of_vertex.get(after, index) != index:
                    one_way.add((index, of_vertex[after]))
                elif after not in reached:
                    reached.add(after)
                    frontier.append(after)
    return Components(tuple(sets), tuple(sorted(one_way)))


def rank_ranges(ranks: Iterable[int]) -> str:
    """Ranks in ascending order as options take them: `0-3,6`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {rank_ranges(ranks)}"


def who_is_cut_off(topology: Topology, collective: Collective) -> str:
    """One line that names the ranks that cannot take part, which way is missing, and all parts.

    Seen from the root, or from the first rank where there is none; for a custom collective the first block
    that cannot get where it must.
    """
    return f"{_who(topology, collective)}; {parts_of(topology, collective.ranks)}"


def _who(topology: Topology, collective: Collective) -> str:
    if collective.kind is Kind.CUSTOM:
        return _which_block_is_stuck(topology, collective)
    start = collective.ranks[0] if collective.root is None else collective.root
    if collective.kind in _DOWNSTREAM:
        reached = reachable_from(topology, start)
        way = f"nothing leads there from rank {start}"
    elif collective.kind in _UPSTREAM:
        reached = reachable_from(topology.reversed(), start)
        way = f"nothing leads from there to rank {start}"
    else:
        reached = reachable_from(topology, start) & reachable_from(topology.reversed(), start)
        way = f"there is no way from rank {start} and back"
    lost = [rank for rank in collective.ranks if rank not in reached]
    noun = "rank" if len(lost) == 1 else "ranks"
    return f"{collective.kind}: {noun} {', '.join(map(str, lost))} cut off: {way}"


def _which_block_is_stuck(topology: Topology, collective: Collective) -> str:
    for index, demand in enumerate(collective.demands):
        reached = set[Vertex]().union(*(reachable_from(topology, source) for source in demand.sources))
        lost = sorted(demand.targets - reached)
        if lost:
            from_where = f"{'rank' if len(demand.sources) == 1 else 'ranks'} {_listed(demand.sources)}"
            who = f"{'rank' if len(lost) == 1 else 'ranks'} {_listed(lost)}"
            return f"custom: {who} cut off: nothing leads there from {from_where}, where block {index} is"
    raise AssertionError("a bound of zero has a block that cannot get where it must")


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def reachable_from(topology: Topology, start: Vertex) -> set[Vertex]:
    """The vertices to which links lead, the start included."""
    neighbours: dict[Vertex, list[Vertex]] = {}
    for link in topology.links:
        neighbours.setdefault(link.src, []).append(link.dst)
    reached, frontier = {start}, [start]
    for vertex in frontier:
        for after in neighbours.get(vertex, ()):
            if after not in reached:
                reached.add(after)
                frontier.append(after)
    return reached
