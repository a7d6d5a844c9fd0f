"""Trees that are known before a packing: taken out first, as far as cuts allow, and grown where edges lack.

After a fault most trees of the old packing still stand, and the others lack a few edges: these are *partial*.
A demand is shared out among them by their weights, one that may start anywhere gets the cheapest root, and
what is missing is joined at the least cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from arborcast.synth.errors import InfeasibleError
from arborcast.synth.kernels.arborescence import FORBIDDEN, LogicalGraph, Routes, arborescence_destroying
from arborcast.synth.kernels.compiled import Flags, Ints, kernel
from arborcast.synth.packing.packer import Packer, as_often_as_fits
from arborcast.synth.packing.weighted_tree import WeightedTree, rerooted

GROWING_BATCH = 32
"""Partial trees that are grown before the cuts are asked."""
LEAST_YIELD = 8
"""Growing ends with a batch of which cuts allow less than one part in so many."""
ROUNDS = 3
"""Times that a proposal of any root is tried, each time with what the cuts have said before."""


def take_first(packer: Packer, partials: Sequence[WeightedTree]) -> None:
    """Take out as much of the trees as every cut allows; notes the parts in `packer.first_parts`."""
    waiting = [
        (largest_part(partial) if partial.free and not partial.is_whole else partial, units)
        for partial, units in zip(partials, shares_of(partials, packer.demand), strict=True)
        if units
    ]
    whole = [entry for entry in waiting if entry[0].is_whole]
    broken = [entry for entry in waiting if not entry[0].is_whole]
    for entries, size in ((whole, max(1, len(whole))), (broken, GROWING_BATCH)):
        group = entries
        # What a cut has limited is free to start elsewhere, once the cut is known.
        for _ in range(ROUNDS if any(partial.free for partial, _ in group) else 1):
            left = []
            for first in range(0, len(group), size):
                batch, before = group[first : first + size], int(packer.demand.sum())
                left += _take_batch(packer, batch)
                carried, asked = before - int(packer.demand.sum()), sum(units for _, units in batch)
                if entries is broken and LEAST_YIELD * carried < asked:
                    left += group[first + size :]  # the search is quicker than growing what no cut allows
                    break
            if len(left) == len(group):
                break
            group = left
        packer.first_parts.append(Fraction(packer.total - int(packer.demand.sum()), packer.total))


def _take_batch(
    packer: Packer, entries: Sequence[tuple[WeightedTree, int]]
) -> list[tuple[WeightedTree, int]]:
    """Take out as much of the partials as fits; returns what of them is left to do."""
    remaining, demand = packer.remaining.copy(), packer.demand.copy()
    proposed: list[WeightedTree] = []
    source: list[int] = []
    left = [units for _, units in entries]
    for place, (partial, _) in enumerate(entries):
        if packer.deadline.has_passed:
            break
        while left[place]:
            found = _placed(packer, partial, left[place], remaining, demand)
            if found is None:
                break
            times = int(found.weight)
            remaining -= times * found.uses
            demand[found.root] -= times
            left[place] -= times
            proposed.append(found)
            source.append(place)
    if proposed:
        allowed = packer.cuts.allow(packer.remaining, packer.demand, proposed)
        for tree, times, place in zip(proposed, allowed, source, strict=True):
            left[place] += int(tree.weight) - times
            if times:
                packer.take(tree, times)
    return [(partial, units) for (partial, _), units in zip(entries, left, strict=True) if units]


def _placed(
    packer: Packer, partial: WeightedTree, units: int, remaining: Ints, demand: Ints
) -> WeightedTree | None:
    """The partial as a tree that fits what is left, as often as it does; None where it does not."""
    lengths = packer.lengths(remaining) if partial.free or not partial.is_whole else remaining
    if partial.free:
        root = cheapest_root(partial, lengths, demand > 0)
        if root < 0:
            return None
        partial = started_at(partial, root)
        if (partial.out.links < 0).any():
            return None  # a way that only leads in one direction
    routes = partial.out
    if not partial.is_whole:
        parent_cost = packer.hop_price * packer.graph.hops(partial.root, remaining > 0)
        whole = grown(partial, lengths, parent_cost)
        if whole is None:
            return None
        routes = whole
    wanted = Fraction(min(units, int(demand[partial.root])))
    found = as_often_as_fits(WeightedTree(partial.root, wanted, routes), remaining)
    return found if found.weight > 0 else None


_DEAR = 1 << 44
"""More than any usable link costs; a way of such links still fits int64."""


@dataclass(frozen=True, slots=True)
class StartingTrees:
    """Trees of an old schedule, over links of the topology in which trees are packed: what to start from.

    Attributes:
        out: for out-trees.
        into: for the in-trees of an allreduce, where those are packed by themselves.
    """

    out: tuple[WeightedTree, ...] = ()
    into: tuple[WeightedTree, ...] = ()


NOTHING_KNOWN = StartingTrees()
"""To pack from nothing."""


def rebound(partial: WeightedTree, graph: LogicalGraph) -> WeightedTree:
    """The partial over another graph of the same vertices; edges over links that it lacks are lost."""
    routes = partial.out.over(graph)
    kept = without_lost_edges(routes.parents, routes.starts, routes.links)
    return replace(partial, out=Routes(graph, *kept))


def shares_of(partials: Sequence[WeightedTree], demand: Ints) -> list[int]:
    """How many units each partial should carry: each root's demand in proportion to the weights.

    Stumps that are free share the demand of all roots. Largest remainders come first, so that a demand with
    any partial is shared out completely.
    """
    groups: dict[int, list[int]] = {}
    for place, partial in enumerate(partials):
        groups.setdefault(-1 if partial.free else partial.root, []).append(place)
    units = [0] * len(partials)
    for root, members in groups.items():
        total = int(demand.sum()) if root < 0 else int(demand[root])
        weight = sum((partials[place].weight for place in members), Fraction(0))
        exact = {place: total * partials[place].weight / weight for place in members}
        for place in members:
            units[place] = int(exact[place])
        left = total - sum(units[place] for place in members)
        for place in sorted(members, key=lambda place: (int(exact[place]) - exact[place], place))[:left]:
            units[place] += 1
    return units


def largest_part(partial: WeightedTree) -> WeightedTree:
    """A free partial started in its largest connected part, whose top becomes the root."""
    tops = tops_of(partial.out.parents)
    top = int(np.argmax(np.bincount(tops, minlength=len(tops))))
    return replace(partial, root=top)


def started_at(partial: WeightedTree, root: int) -> WeightedTree:
    """A free partial with another rank of its root's part as the root."""
    if root == partial.root:
        return partial
    return replace(partial, root=root, out=rerooted(partial.out, root))


def cheapest_root(partial: WeightedTree, lengths: Ints, wanted: Flags) -> int:
    """The rank among those wanted from which the partial's part of the root is cheapest; -1 for none."""
    routes = partial.out
    # A link that must not be used is dear, not infinite: it may be the one that another root turns round.
    priced = np.minimum(lengths, _DEAR)
    reverse = routes.graph.reverse
    costs, known = _root_costs(routes.parents, routes.starts, routes.links, partial.root, priced, reverse)
    usable = np.flatnonzero(known & wanted)
    return int(usable[np.argmin(costs[usable])]) if usable.size else -1


def grown(partial: WeightedTree, lengths: Ints, parent_cost: Ints) -> Routes | None:
    """The partial with the ranks that its root does not reach joined to it at the least cost.

    Args:
        partial: what is left of a tree; all that hangs on a lost edge is joined anew.
        lengths: int64 lengths of the links, `FORBIDDEN` for those that must not be used.
        parent_cost: what each rank charges for every child that it takes.

    Returns:
        None where the links do not reach them.
    """
    routes = partial.out
    graph = routes.graph
    assert isinstance(graph, LogicalGraph), "proposals are over the graph that is packed"
    inside = tops_of(routes.parents) == partial.root
    missing = np.flatnonzero(~inside)
    if not missing.size:
        return routes
    distances = graph.distances(lengths, missing)
    cost, nearest = _joining_costs(distances.entering, parent_cost, inside, missing)
    try:
        found = arborescence_destroying(cost, 0)[1:]
    except InfeasibleError:
        return None
    parents = np.full(len(inside), -1, dtype=np.int64)
    parents[missing] = np.where(found == 0, nearest, missing[found - 1])
    added = distances.routes(parents)
    return routes.joined(added)


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
def _joining_costs(entering: Ints, parent_cost: Ints, inside: Flags, missing: Ints) -> tuple[Ints, Ints]:
    """What edges into missing ranks cost, as `arborescence_destroying` takes it, and where to join inside.

    Row and column 0 stand for all ranks inside, of which each missing one takes the nearest; ties fall to the
    lowest.
    """
    count = missing.shape[0]
    cost, nearest = np.full((count + 1, count + 1), FORBIDDEN), np.full(count, -1)
    for place in range(count):
        row = entering[missing[place]]
        least = 0
        for parent in range(inside.shape[0]):
            if inside[parent] and (nearest[place] < 0 or row[parent] + parent_cost[parent] < least):
                least = row[parent] + parent_cost[parent]
                nearest[place] = parent
        cost[place + 1, 0] = least
        for other in range(count):
            cost[place + 1, other + 1] = row[missing[other]] + parent_cost[missing[other]]
    return cost, nearest
