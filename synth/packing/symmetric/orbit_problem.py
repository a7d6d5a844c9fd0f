"""What a symmetric packing is asked for, in orbits: whose trees, which links they share, how much there is.

One tree of a representative stands for its images under all translations. So a tree that uses a link orbit
k times, with the weight w, puts `k * w * order / size` on each link of the orbit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.kernels.arborescence import Routes
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.kernels.link_graph import LinkGraph
from arborcast.synth.lp.tree_program import TreeRows
from arborcast.synth.packing.symmetric.growth import Orbits
from arborcast.synth.packing.weighted_tree import WeightedTree, centred, mirrored, pair_up
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Link, Topology


@dataclass(frozen=True, slots=True)
class TreeGroup:
    """Trees that together carry one amount.

    Attributes:
        roots: where they may start.
        turned: whether they are out-trees of the reversed topology, along which is gathered.
        share: which of the amounts they carry; groups of one share carry the same.
    """

    roots: tuple[int, ...]
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
    groups: tuple[TreeGroup, ...]
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
        groups = tuple(TreeGroup((root,), turned, 0) for root in roots)
        return Problem(topology, translations, groups, False, limit / len(collective.ranks))
    if topology.is_symmetric:
        graph = LinkGraph(topology)
        central = min(roots, key=lambda root: (int(hops_from(graph, root).max()), root))
        roots = (central,)
    return _of_allreduce(topology, translations, roots, limit)


def problem_written_out(topology: Topology, roots: Sequence[int] | None, limit: Fraction) -> Problem:
    """The problem in which every link is an orbit, for trees whose height is limited: all roots count.

    Args:
        topology: the graph.
        roots: one for a broadcast, all ranks for an allgather; None for an allreduce, whose roots are free.
        limit: of the rate, GB/s.
    """
    if roots is not None and len(roots) == 1 and not topology.is_symmetric:
        topology = _with_returns(topology, roots[0])
    trivial = Translations.trivial(topology)
    if roots is None:
        return _of_allreduce(topology, trivial, tuple(range(topology.ranks)), limit)
    groups = tuple(TreeGroup((root,), False, 0) for root in roots)
    return Problem(topology, trivial, groups, False, limit / len(roots))


def _with_returns(topology: Topology, root: int) -> Topology:
    """With a link from each rank to the root, which no tree of its uses: contraction asks for ways back."""
    back = [rank for rank in range(topology.ranks) if rank != root and (rank, root) not in topology.bandwidth]
    added = (Link(rank, root, topology.bandwidth_unit) for rank in back)
    return replace(topology, links=tuple(sorted([*topology.links, *added], key=_ends)), symmetries=())


def _ends(link: Link) -> tuple[int, int]:
    return link.src, link.dst


def _of_allreduce(
    topology: Topology, translations: Translations, roots: tuple[int, ...], limit: Fraction
) -> Problem:
    groups: tuple[TreeGroup, ...] = (TreeGroup(roots, False, 0),)
    if not topology.is_symmetric:
        each = ((share, root, turned) for share, root in enumerate(roots) for turned in (False, True))
        groups = tuple(TreeGroup((root,), turned, share) for share, root, turned in each)
    return Problem(topology, translations, groups, topology.is_symmetric, limit / translations.order)


@dataclass(frozen=True, eq=False)
class OrbitTree:
    """A tree of a group.

    Attributes:
        group: its index in the problem.
        root: where it starts.
        routes: the tree.
        uses: how often it uses each orbit; of a mirrored tree, both ways together.
    """

    group: int
    root: int
    routes: Routes
    uses: tuple[int, ...]

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        """Trees of one key are not told apart by the program."""
        return self.group, self.uses

    @cached_property
    def height(self) -> int:
        """Of the tree."""
        return self.routes.height

    @cached_property
    def used(self) -> Mapping[int, int]:
        """`uses` of the orbits that it uses at all."""
        return {orbit: count for orbit, count in enumerate(self.uses) if count}


def least_height(problem: Problem) -> int:
    """Below it no tree spans the ranks; as many as there are and more where none of any height does."""
    needed: dict[int, int] = {}
    for group in problem.groups:
        graph = problem.graph(turned=group.turned)
        lowest = min(int(hops_from(graph, root).max()) for root in group.roots)
        needed[group.share] = max(lowest, needed.get(group.share, 0))
    return min(needed.values())


def carriers_of(
    problem: Problem, columns: Sequence[OrbitTree], weights: Sequence[Fraction]
) -> Sequence[WeightedTree]:
    """The trees with their weights, for an allreduce in pairs."""
    trees: dict[bool, list[WeightedTree]] = {False: [], True: []}
    for column, weight in zip(columns, weights, strict=True):
        trees[problem.groups[column.group].turned].append(WeightedTree(column.root, weight, column.routes))
    if problem.mirrored:
        return [_at_representative(centred(mirrored(tree)), problem.translations) for tree in trees[False]]
    if trees[False] and trees[True]:
        return pair_up(trees[False], trees[True])
    return trees[False] or trees[True]


def _at_representative(pair: WeightedTree, translations: Translations) -> WeightedTree:
    """The image of a pair whose root is the first rank of its orbit: no load of an orbit changes."""
    element = int(translations.minus(0, int(translations.place[pair.root])))
    if element == 0:
        return pair
    return pair.over(pair.out.graph, np.array(translations.permutation(element), dtype=np.int64))
