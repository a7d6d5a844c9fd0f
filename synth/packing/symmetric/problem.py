"""What a symmetric packing is asked for, in orbits: whose trees, which links they share, how much there is.

One tree of a representative stands for its images under all translations. So a tree that uses a link orbit
k times, with the weight w, puts `k * w * order / size` on each link of the orbit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.kernels.arborescence import Routes
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.kernels.link_graph import LinkGraph
from arborcast.synth.lp.tree_program import TreeRows
from arborcast.synth.packing.symmetric.growth import Orbits
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
        twin = (
            of_link[self.graph(turned=False).reverse]
            if self.mirrored
            else np.full(len(of_link), -1, np.int64)
        )
        return Orbits(of_link, twin, int(of_link.max()) + 1)

    @cached_property
    def _graphs(self) -> tuple[LinkGraph, LinkGraph]:
        return LinkGraph(self.topology), LinkGraph(self.topology, turned=True)

    def graph(self, *, turned: bool) -> LinkGraph:
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


@lru_cache(maxsize=64)
def hops_from(graph: LinkGraph, root: int) -> Ints:
    """`LinkGraph.hops`, of which the last ones are kept."""
    return graph.hops(root)


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
        graph = LinkGraph(topology)
        central = min(roots, key=lambda root: (int(hops_from(graph, root).max()), root))
        groups = (Group(central, False, 0),)
    else:
        groups = tuple(
            Group(root, turned, share) for share, root in enumerate(roots) for turned in (False, True)
        )
    return Problem(topology, translations, groups, topology.is_symmetric, limit / translations.order)


@dataclass(frozen=True, eq=False)
class Column:
    """A tree of a group.

    Attributes:
        group: its index in the problem.
        routes: the tree.
        uses: how often it uses each orbit; of a mirrored tree, both ways together.
    """

    group: int
    routes: Routes
    uses: tuple[int, ...]

    @cached_property
    def height(self) -> int:
        """Of the tree."""
        return self.routes.height

    @cached_property
    def used(self) -> Mapping[int, int]:
        """`uses` of the orbits that it uses at all."""
        return {orbit: count for orbit, count in enumerate(self.uses) if count}


@dataclass
class Pool:
    """All trees met so far; of those that a group cannot tell apart by their uses, the lowest."""

    columns: list[Column] = field(default_factory=list)
    _place: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)

    def add(self, column: Column) -> bool:
        """Put a tree in; whether its uses are new. A lower tree takes the place of a higher one."""
        key = (column.group, column.uses)
        if key in self._place:
            place = self._place[key]
            if column.height < self.columns[place].height:
                self.columns[place] = column
            return False
        self._place[key] = len(self.columns)
        self.columns.append(column)
        return True

    def up_to(self, height: int) -> list[Column]:
        """The trees of at most a height."""
        return [column for column in self.columns if column.height <= height]
