"""Few trees: as few as reach the optimum up to a tolerance, or the best rate with at most so many.

Fewer trees mean larger messages and fewer of them. `synth.lp.sparsify` chooses among candidates that are made
here: the trees of the exact packing, those of multiplicative weights, the widest single tree. Picking among
trees that were made for other purposes picks badly where every root needs some, so that `reweave` makes a
fixed number of equal trees per root: each is the cheapest arborescence under lengths that grow with what the
others load on each link, more steeply in each round (negotiated congestion in the routing of chips).

Sources: Wang et al., BLINK (MLSys 2020), section 4; McMurchie and Ebeling, PathFinder (1995).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain, product

import numpy as np

from arborcast.synth.bounds.capacity_lp import most_central
from arborcast.synth.deadline import NO_DEADLINE, Deadline, LastAnswers
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.kernels.arborescence import FORBIDDEN, LogicalGraph, Routes, cheapest_arborescence
from arborcast.synth.kernels.compiled import Flags, Ints
from arborcast.synth.lp.choice import TreeCandidates, Use
from arborcast.synth.lp.sparsify import check_few, few_as_asked
from arborcast.synth.lp.tree_program import TreeRows, crowded_prices
from arborcast.synth.packing.mwu import weigh
from arborcast.synth.packing.weighted_tree import Packing, WeightedTree, merge, mirrored, pair
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Topology

CANDIDATES = 200
"""In all, besides the known ones; the heaviest of each group are kept."""

_CANDIDATE_EPSILON = Fraction(1, 20)  # a coarse run of the weights yields some hundred different trees
_ROUNDS = 24  # of reweaving
_LONGEST = 1 << 20  # the length of the most crowded link
_coarse: LastAnswers[Packing] = LastAnswers(1)  # a comparison asks for one tree, then for two


def fewest(
    topology: Topology,
    roots: Sequence[int] | None,
    optimum: Fraction,
    known: Iterable[WeightedTree],
    options: SolveOptions,
    deadline: Deadline = NO_DEADLINE,
) -> Packing:
    """Few out-trees from each root, all roots at one rate; or few pairs for an allreduce, in all.

    Args:
        topology: the graph.
        roots: one for a broadcast, all ranks for an allgather; None for an allreduce, whose roots are free.
        optimum: the largest rate per root (of an allreduce: of all), GB/s.
        known: carriers that should be among the candidates, such as those of the exact packing.
        options: how few; see `synth.lp.sparsify.few_as_asked`.
        deadline: when the best so far is returned.

    Returns:
        Carriers with exact weights. `settings` hold "tolerance" or "max_trees", the number of "candidates",
        and "proved": what is known about the answer.

    Raises:
        InputError: a tolerance or a number of trees out of its range.
    """
    check_few(options.tolerance, options.max_trees)
    known = merge(known)
    question = (topology, None if roots is None else tuple(roots), options.seed)
    coarse = _coarse.of(
        question,
        deadline,
        lambda: weigh(topology, roots, epsilon=_CANDIDATE_EPSILON, seed=options.seed, deadline=deadline),
    )
    others = sorted(merge([*widest(topology, roots), *coarse.carriers]), key=lambda carrier: -carrier.weight)
    most = options.max_trees or 0
    rewoven = [
        merge(reweave(topology, roots, count, deadline=deadline))
        for count in range(max(1, most - 1), most + 1)
        if roots is not None and len(roots) > 1
    ]
    carriers: list[WeightedTree] = []
    uses: list[Use] = []
    groups: Sequence[int | None] = roots or (None,)
    for group, root in enumerate(groups):
        wanted = [one for one in chain(known, *rewoven) if root in (None, one.root)]
        heaviest = [one for one in others if root in (None, one.root)][: CANDIDATES // len(groups) + 1]
        kept = merge([*wanted, *heaviest])
        carriers += kept
        uses += [Use.of(group, carrier) for carrier in kept]

    def indices(some: Iterable[WeightedTree]) -> list[int]:
        keys = {carrier.key for carrier in some}
        return [index for index, carrier in enumerate(carriers) if carrier.key in keys]

    rows = TreeRows.of((link.bandwidth for link in topology.links), optimum, len(groups))
    weights, facts = few_as_asked(
        TreeCandidates(rows, tuple(uses)),
        indices(known),
        options,
        deadline,
        starts=[indices(trees) for trees in rewoven],
        optimum=Fraction(1),
    )
    return Packing(
        tuple(replace(carriers[index], weight=weight * optimum) for index, weight in weights.items()), facts
    )


def widest(topology: Topology, roots: Sequence[int] | None) -> list[WeightedTree]:
    """Trees from each root that use only links from some bandwidth on, the cheapest and the shallowest.

    Without switches the widest single tree is among them. For an allreduce (`roots` None) pairs of them; on
    symmetric links one root stands for all.
    """
    if roots is not None:
        graph = LogicalGraph(topology)
        return [tree for root in roots for tree in _widest_trees(graph, root)]
    if topology.is_symmetric:
        root = most_central(topology, range(topology.ranks))
        return [mirrored(tree) for tree in _widest_trees(LogicalGraph(topology), root)]
    here, back = LogicalGraph(topology), LogicalGraph(topology.reversed())
    return [
        pair(out, into, out.weight)
        for root in range(topology.ranks)
        for out, into in product(_widest_trees(here, root), _widest_trees(back, root))
        if out.weight == into.weight
    ]


def _widest_trees(graph: LogicalGraph, root: int) -> Iterator[WeightedTree]:
    topology = graph.topology
    capacities = np.array(topology.capacities, dtype=np.int64)
    for narrowest in sorted(set(topology.capacities), reverse=True)[:CANDIDATES]:
        distances = graph.distances(np.where(capacities >= narrowest, 1, FORBIDDEN).astype(np.int64))
        try:
            cheapest = cheapest_arborescence(distances.matrix, root)
        except InfeasibleError:
            continue
        for parents in (cheapest, _shallow(distances.matrix < FORBIDDEN, root)):
            yield WeightedTree(root, Fraction(narrowest) * topology.bandwidth_unit, distances.routes(parents))


def _shallow(reaches: Flags, root: int) -> Ints:
    """Parents with the fewest edges between the root and each rank; `reaches[parent, child]`."""
    parents = np.full(len(reaches), -1, dtype=np.int64)
    missing = np.arange(len(reaches)) != root
    wave = [root]
    for parent in wave:
        children = np.flatnonzero(reaches[parent] & missing)
        parents[children] = parent
        missing[children] = False
        wave += children.tolist()
    return parents


def reweave(
    topology: Topology, roots: Sequence[int], trees_per_root: int, *, deadline: Deadline
) -> tuple[WeightedTree, ...]:
    """Equal trees, so many for each root, that crowd the fullest link as little as was found.

    Args:
        topology: connected from every root.
        roots: all send at one rate.
        trees_per_root: each tree carries that part of its root's rate.
        deadline: once it has passed, the best complete round so far is what counts.

    Returns:
        Trees of weight 1 / `trees_per_root`; equal ones are not merged. Nothing here is random.
    """
    graph = LogicalGraph(topology)
    capacities = np.array(topology.capacities, dtype=np.float64)
    load = np.zeros(len(topology.links), dtype=np.int64)
    woven: dict[tuple[int, int], Routes] = {}
    best: dict[tuple[int, int], Routes] = {}
    least = np.inf
    for steepness in range(2, _ROUNDS + 2):
        for slot in ((root, copy) for copy in range(trees_per_root) for root in roots):
            if slot in woven:
                load -= woven[slot].uses()
            distances = graph.distances(crowded_prices(load, capacities, steepness, _LONGEST))
            woven[slot] = distances.routes(cheapest_arborescence(distances.matrix, slot[0]))
            load += woven[slot].uses()
        crowd = float((load / capacities).max())
        if crowd < least:
            best, least = dict(woven), crowd
        if deadline.has_passed:
            break
    return tuple(
        WeightedTree(root, Fraction(1, trees_per_root), routes) for (root, _), routes in best.items()
    )
