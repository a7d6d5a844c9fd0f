"""Cuts that limit a custom collective: blocks all of whose sources are inside, and some target outside.

The tightest cut of all is NP-hard to find (sparsest cut). Found exactly, by maximum flows, are the tightest
for what one rank must get and, on the reversed topology, for what one rank alone can give; cuts between
many givers and many getters are tried besides. The limit is valid whatever was missed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

from arborcast.synth.bounds.cuts import cut_out_of, tightest_cut
from arborcast.synth.certificate import Cut
from arborcast.synth.certification.proven_rates import share_leaving
from arborcast.synth.collective import Collective, Demand
from arborcast.synth.topology import Link, Topology, Vertex


def demand_cuts(topology: Topology, collective: Collective) -> list[Cut]:
    """Cuts that limit a custom collective, without repeats; among them one of capacity 0 where one exists.

    Takes up to four maximum-flow questions for each rank that takes part.
    """
    demands = collective.demands
    everything = frozenset(range(topology.size))
    sides = [*_sides(topology, demands)]
    turned = [Demand(demand.targets, demand.sources) for demand in demands if len(demand.sources) == 1]
    sides += [everything - side for side in _sides(topology.reversed(), turned)]
    return [cut_out_of(topology, side) for side in dict.fromkeys(sides) if share_leaving(collective, side)]


def _sides(topology: Topology, demands: Sequence[Demand]) -> Iterator[frozenset[Vertex]]:
    """For every target, the tightest sets without it: of its own blocks, and of all that it does not hold."""
    joined = _Joined(topology, [demand.sources for demand in demands])
    for target in sorted(frozenset[int]().union(*(demand.targets for demand in demands))):
        own = [demand.sources for demand in demands if target in demand.targets]
        every = [demand.sources for demand in demands if target not in demand.sources]
        yield joined.tightest_side(own, target)
        if len(every) > len(own):
            yield joined.tightest_side(every, target)


class _Joined:
    """A topology with a further vertex for each set of several sources.

    Links without limit lead from it to the sources, so that a cut has it inside only where all of them are.
    """

    def __init__(self, topology: Topology, groups: Sequence[frozenset[int]]) -> None:
        several = sorted({group for group in groups if len(group) > 1}, key=sorted)
        self._size = topology.size
        self._vertex = {group: topology.size + index for index, group in enumerate(several)}
        # All blocks together get at most what leaves everything but the target, which is less than this.
        unlimited = 2 * sum((link.bandwidth for link in topology.links), Fraction(0)) or Fraction(1)
        links = [Link(vertex, rank, unlimited) for group, vertex in self._vertex.items() for rank in group]
        self._topology = (
            topology
            if not several
            else Topology.build(
                topology.name,
                topology.ranks,
                [*topology.links, *links],
                [*(switch.name for switch in topology.switches), *_names(topology, len(several))],
            )
        )

    def tightest_side(self, groups: Iterable[frozenset[int]], target: int) -> frozenset[Vertex]:
        """The vertices, without the target, that the least bandwidth leaves for each of the blocks inside."""
        supply = Counter(self._vertex.get(group, min(group)) for group in groups)
        side = tightest_cut(self._topology, supply, [target]).cut.side
        return frozenset(vertex for vertex in side if vertex < self._size)


def _names(topology: Topology, count: int) -> list[str]:
    taken = {switch.name for switch in topology.switches}
    free = (name for number in range(count + len(taken)) if (name := f"sources {number}") not in taken)
    return [next(free) for _ in range(count)]
