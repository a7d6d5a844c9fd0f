"""Implicit schedules for tests: a tree of fewest links from each representative, moved everywhere."""

from __future__ import annotations

from fractions import Fraction

from arborcast.synth.certificate import Bound, Cut, Scope
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Chunk, Method, Transfer
from arborcast.synth.symmetry.translation_search import translations_of
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Topology, Vertex


def spreading(topology: Topology, root: int, chunk: int) -> list[Transfer]:
    """A tree of fewest links from a rank to all that it reaches, a step for each rank passed."""
    ways: dict[Vertex, tuple[int, tuple[Vertex, ...], int]] = {root: (root, (), 0)}
    reached, transfers = [root], []
    onwards: dict[Vertex, list[Vertex]] = {}
    for link in topology.links:
        onwards.setdefault(link.src, []).append(link.dst)
    for here in reached:
        sender, via, step = ways[here]
        for vertex in onwards.get(here, ()):
            if vertex in ways:
                continue
            reached.append(vertex)
            if topology.is_switch(vertex):
                ways[vertex] = (sender, (*via, vertex), step)
            else:
                transfers.append(Transfer(chunk, sender, vertex, step, False, via))
                ways[vertex] = (vertex, (), step + 1)
    return transfers


def implicit_allgather(
    topology: Topology, translations: Translations | None = None, bound: Bound | None = None
) -> ImplicitSchedule:
    """An allgather along such trees; its bound, unless given, is none that anybody proved."""
    group = translations_of(topology) if translations is None else translations
    share = Fraction(1, topology.ranks)
    roots = group.representatives
    return ImplicitSchedule.build(
        topology,
        Collective.on(topology, Kind.ALLGATHER),
        Method("spreading", 3, (("drawn", "yes"), ("none", None))),
        bound or Bound(Fraction(5), Cut(frozenset({0}), Fraction(7, 2)), Scope.TREES),
        group,
        [Chunk(share, root) for root in roots],
        [transfer for chunk, root in enumerate(roots) for transfer in spreading(topology, root, chunk)],
    )
