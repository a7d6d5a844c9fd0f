"""What a symmetric packing is asked for, in orbits: whose trees, which links they share, how much there is.

One tree of a representative stands for its images under all translations. So a tree that uses a link orbit
k times, with the weight w, puts `k * w * order / size` on each link of the orbit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.lp.tree_program import TreeRows
from arborcast.synth.packing.symmetric.contraction import Graph
from arborcast.synth.packing.symmetric.growth import Orbits
from arborcast.synth.packing.symmetric.hops import hops_from
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Topology


@dataclass(frozen=True, slots=True)
class Group:
    """Trees that together carry one amount.

    Attributes:
        root: where they start.
        turned: whether they are out-trees of the reversed topology, along which is gathered.
        share: which of the amounts they carry; groups of one share carry the same.
    """

    root: int
    turned: bool
    share: int


@dataclass(frozen=True, eq=False)
class Problem:
    """Trees by group, and what they may use of each link orbit.

    Attributes:
        topology: relays are switches in it.
        translations: of it.
        groups: who needs trees.
        mirrored: whether each tree is used in both directions, for an allreduce on symmetric links.
        target: the sum of all shares at the limit, GB/s.
    """

    topology: Topology
    translations: Translations
    groups: tuple[Group, ...]
    mirrored: bool
    target: Fraction

    @property
    def shares(self) -> int:
        """How many amounts there are to be carried."""
        return max(group.share for group in self.groups) + 1

    @cached_property
    def link_orbits(self) -> Ints:
        """The orbit of each link."""
        return self.translations.link_orbits(self.topology)

    @cached_property
    def orbits(self) -> Orbits:
        """What a use of each link counts for."""
        of_link = self.link_orbits
        twin = np.full(len(of_link), -1, dtype=np.int64)
        if self.mirrored:
            tails, heads = self.graph(turned=False).tails, self.graph(turned=False).heads
            # Links are sorted by (src, dst): sorted by (dst, src) they are the reversed ones in order.
            twin[np.argsort(heads * self.topology.size + tails)] = of_link
        return Orbits(of_link, twin, int(of_link.max()) + 1)

    @cached_property
    def _graphs(self) -> tuple[Graph, Graph]:
        return Graph.of(self.topology), Graph.of(self.topology, turned=True)

    def graph(self, *, turned: bool) -> Graph:
        """The links as they are, or turned round."""
        return self._graphs[turned]

    @cached_property
    def budgets(self) -> tuple[Fraction, ...]:
        """How often each orbit may be used by a tree that carries the whole target, as a mean over trees."""
        sizes = np.bincount(self.link_orbits).tolist()
        first = np.unique(self.link_orbits, return_index=True)[1].tolist()
        links = self.topology.links
        return tuple(
            links[link].bandwidth * size / (self.translations.order * self.target)
            for link, size in zip(first, sizes, strict=True)
        )

    @cached_property
    def rows(self) -> TreeRows:
        """The same for the program that weighs trees."""
        return TreeRows(self.budgets, tuple(group.share for group in self.groups))

    @cached_property
    def steepness(self) -> Ints:
        """By how much a use raises the price of an orbit, so that scarce ones become dear sooner."""
        scarcest = min(self.budgets)
        return np.array([max(1, math.floor((1 << 16) * scarcest / b)) for b in self.budgets], dtype=np.int64)


def problem_of(
    topology: Topology, collective: Collective, translations: Translations, limit: Fraction
) -> Problem:
    """The problem of an allgather, reduce-scatter or allreduce among all ranks of a topology.

    An allreduce on links that are alike both ways gathers along the trees on which it spreads, and one root
    is as good as any mixture (see `synth.bounds.capacity_lp`), a central one gives low trees; elsewhere each
    root orbit has a share.
    """
    roots = translations.representatives
    if collective.kind is not Kind.ALLREDUCE:
        turned = collective.kind is Kind.REDUCE_SCATTER
        groups = tuple(Group(root, turned, 0) for root in roots)
        return Problem(topology, translations, groups, False, limit / len(collective.ranks))
    if topology.is_symmetric:
        graph = Graph.of(topology)
        central = min(roots, key=lambda root: (int(hops_from(graph, root).max()), root))
        groups = (Group(central, False, 0),)
    else:
        groups = tuple(
            Group(root, turned, share) for share, root in enumerate(roots) for turned in (False, True)
        )
    return Problem(topology, translations, groups, topology.is_symmetric, limit / translations.order)
