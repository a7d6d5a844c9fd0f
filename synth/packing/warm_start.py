"""Trees that are known before: what an exact packing takes out first, as far as every cut allows.

After a fault most trees of the old packing still stand, and the others lack a few edges. A `Stump` is such a
tree; here are the pieces of `synth.packing.exact` that share a demand among them, choose another root where
any will do, and grow what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from arborcast.synth.errors import InfeasibleError
from arborcast.synth.kernels.arborescence import FORBIDDEN, LogicalGraph, Routes, arborescence_destroying
from arborcast.synth.kernels.compiled import Flags, Ints, kernel
from arborcast.synth.packing.routed import RoutedTree, rerooted_routes, same_links
from arborcast.synth.tree import Tree

_DEAR = 1 << 44
"""More than any usable link costs; a way of such links still fits int64."""


@dataclass(frozen=True, eq=False)
class Stump:
    """A tree, or what faults left of one.

    Attributes:
        root: where it starts.
        weight: what it carried; only ratios count.
        routes: parents and links; besides the root, ranks whose edge is gone have parent -1.
        free: whether it may start at any rank as well: its edges exist in both directions.
    """

    root: int
    weight: Fraction
    routes: Routes
    free: bool = False

    @classmethod
    def of(cls, graph: LogicalGraph, tree: Tree) -> Stump:
        """A whole tree of the graph's topology."""
        found = RoutedTree.of(graph, tree)
        return cls(found.root, found.weight, found.routes)

    @property
    def is_whole(self) -> bool:
        """Whether it spans all ranks."""
        return int((self.routes.parents < 0).sum()) == 1


def rebound(stump: Stump, graph: LogicalGraph) -> Stump:
    """The stump over another graph of the same vertices; edges over links that it lacks are lost."""
    routes = stump.routes
    number = same_links(routes.graph, graph)
    if number is None:
        return replace(stump, routes=Routes(graph, routes.parents, routes.starts, routes.links))
    kept = without_lost_edges(routes.parents, routes.starts, number[routes.links])
    return replace(stump, routes=Routes(graph, *kept))


def shares_of(stumps: Sequence[Stump], demand: Ints) -> list[int]:
    """How many units each stump should carry: each root's demand in proportion to the weights.

    Stumps that are free share the demand of all roots. Largest remainders come first, so that a demand with
    any stump is shared out completely.
    """
    groups: dict[int, list[int]] = {}
    for place, stump in enumerate(stumps):
        groups.setdefault(-1 if stump.free else stump.root, []).append(place)
    units = [0] * len(stumps)
    for root, members in groups.items():
        total = int(demand.sum()) if root < 0 else int(demand[root])
        weight = sum((stumps[place].weight for place in members), Fraction(0))
        exact = {place: total * stumps[place].weight / weight for place in members}
        for place in members:
            units[place] = int(exact[place])
        left = total - sum(units[place] for place in members)
        for place in sorted(members, key=lambda place: (int(exact[place]) - exact[place], place))[:left]:
            units[place] += 1
    return units


def largest_part(stump: Stump) -> Stump:
    """A free stump started in its largest connected part, whose top becomes the root."""
    tops = tops_of(stump.routes.parents)
    top = int(np.argmax(np.bincount(tops, minlength=len(tops))))
    return replace(stump, root=top)


def started_at(stump: Stump, root: int, reverse: Ints) -> Stump:
    """A free stump with another rank of its root's part as the root."""
    if root == stump.root:
        return stump
    return replace(stump, root=root, routes=rerooted_routes(stump.routes, root, reverse))


def cheapest_root(stump: Stump, lengths: Ints, reverse: Ints, wanted: Flags) -> int:
    """The rank among those wanted from which the stump's part of the root is cheapest; -1 for none."""
    routes = stump.routes
    # A link that must not be used is dear, not infinite: it may be the one that another root turns round.
    priced = np.minimum(lengths, _DEAR)
    costs, known = _root_costs(routes.parents, routes.starts, routes.links, stump.root, priced, reverse)
    usable = np.flatnonzero(known & wanted)
    return int(usable[np.argmin(costs[usable])]) if usable.size else -1


def grown(stump: Stump, lengths: Ints, parent_cost: Ints) -> Routes | None:
    """The stump with the ranks that its root does not reach joined to it at the least cost.

    Args:
        stump: what is left of a tree; all that hangs on a lost edge is joined anew.
        lengths: int64 lengths of the links, `FORBIDDEN` for those that must not be used.
        parent_cost: what each rank charges for every child that it takes.

    Returns:
        None where the links do not reach them.
    """
    routes = stump.routes
    graph = routes.graph
    inside = tops_of(routes.parents) == stump.root
    missing = np.flatnonzero(~inside)
    if not missing.size:
        return routes
    distances = graph.distances(lengths, missing)
    rows = distances.entering[missing] + parent_cost
    from_inside = np.flatnonzero(inside)
    nearest = from_inside[np.argmin(rows[:, from_inside], axis=1)]
    cost = np.full((len(missing) + 1, len(missing) + 1), FORBIDDEN, dtype=np.int64)
    cost[1:, 0] = rows[np.arange(len(missing)), nearest]
    cost[1:, 1:] = rows[:, missing]
    try:
        found = arborescence_destroying(cost, 0)[1:]
    except InfeasibleError:
        return None
    parents = np.full(len(inside), -1, dtype=np.int64)
    parents[missing] = np.where(found == 0, nearest, missing[found - 1])
    added = distances.routes(parents)
    return Routes(graph, *_joined(routes.parents, routes.starts, routes.links, *_arrays(added)))


def _arrays(routes: Routes) -> tuple[Ints, Ints, Ints]:
    return routes.parents, routes.starts, routes.links


@kernel
def without_lost_edges(parents: Ints, starts: Ints, links: Ints) -> tuple[Ints, Ints, Ints]:
    """A tree without the edges whose parent or one of whose links is -1."""
    size = parents.shape[0]
    left, fresh, ways = parents.copy(), np.zeros(size + 1, dtype=np.int64), np.empty(links.shape[0], np.int64)
    count = 0
    for child in range(size):
        whole = parents[child] >= 0
        for place in range(starts[child], starts[child + 1]):
            whole &= links[place] >= 0
        if whole:
            for place in range(starts[child], starts[child + 1]):
                ways[count] = links[place]
                count += 1
        else:
            left[child] = -1
        fresh[child + 1] = count
    return left, fresh, ways[:count].copy()


@kernel
def tops_of(parents: Ints) -> Ints:
    """For each rank the one without a parent from which its edges come."""
    size = parents.shape[0]
    tops = np.full(size, -1)
    for start in range(size):
        here = start
        while tops[here] < 0 and parents[here] >= 0:
            here = parents[here]
        top = tops[here] if tops[here] >= 0 else here
        here = start
        while tops[here] < 0:
            tops[here] = top
            if parents[here] < 0:
                break
            here = parents[here]
    return tops


@kernel
def _root_costs(
    parents: Ints, starts: Ints, links: Ints, root: int, lengths: Ints, reverse: Ints
) -> tuple[Ints, Flags]:
    """What a tree costs more from each rank than from its root: the edges between them turn round."""
    size = parents.shape[0]
    costs, known = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.bool_)
    known[root] = True
    way = np.empty(size, np.int64)
    lost = np.zeros(size, dtype=np.bool_)
    for start in range(size):
        length, here = 0, start
        while not known[here] and not lost[here] and parents[here] >= 0:
            way[length] = here
            length += 1
            here = parents[here]
        if not known[here]:
            lost[here] = True
            for place in range(length):
                lost[way[place]] = True
            continue
        total = costs[here]
        for place in range(length - 1, -1, -1):
            child = way[place]
            for position in range(starts[child], starts[child + 1]):
                link = links[position]
                back = reverse[link]
                total += (lengths[back] if back >= 0 else _DEAR) - lengths[link]
            costs[child] = total
            known[child] = True
    return costs, known


@kernel
def _joined(
    parents: Ints, starts: Ints, links: Ints, more: Ints, more_starts: Ints, more_links: Ints
) -> tuple[Ints, Ints, Ints]:
    """One tree from two sets of edges; where both have one into a rank, the second counts."""
    size = parents.shape[0]
    both, ways = parents.copy(), np.empty(links.shape[0] + more_links.shape[0], np.int64)
    fresh = np.zeros(size + 1, dtype=np.int64)
    count = 0
    for child in range(size):
        if more[child] >= 0:
            both[child] = more[child]
            for place in range(more_starts[child], more_starts[child + 1]):
                ways[count] = more_links[place]
                count += 1
        elif parents[child] >= 0:
            for place in range(starts[child], starts[child + 1]):
                ways[count] = links[place]
                count += 1
        fresh[child + 1] = count
    return both, fresh, ways[:count].copy()
