"""Trees into a schedule: the last, pure step of every tree method.

A chunk per carrier, a transfer per edge, the depth as the step. What reduces was packed on the reversed
topology and is turned round here; relays, which the packings pass like switches, become ranks that
receive and send on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise

from arborcast.synth.certificate import Bound
from arborcast.synth.collective import TREE_KINDS, Collective, Kind
from arborcast.synth.errors import CollectiveError
from arborcast.synth.packing.carrier import Carrier, Pair, breadth_first, centred, merge
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Topology
from arborcast.synth.tree import Tree, TreeEdge


def lift_trees(
    topology: Topology, collective: Collective, method: Method, bound: Bound, trees: Iterable[Tree]
) -> Schedule:
    """A schedule of a broadcast, reduce, allgather or reduce-scatter from trees.

    Args:
        topology: the fabric, relays included.
        collective: what the trees are for.
        method: what made them.
        bound: the limit of the rate.
        trees: from the root, or from each rank, to all ranks of the collective, their `via` naming
            switches and relays; for reduce and reduce-scatter they are trees of `topology.reversed()`.
            Each root's trees carry its block in proportion to their weights.

    Raises:
        CollectiveError: a kind that single trees cannot do.
    """
    if collective.kind not in TREE_KINDS or collective.kind is Kind.ALLREDUCE:
        raise CollectiveError(f"{collective.kind}: trees are lifted into {_names(TREE_KINDS[:-1])}")
    merged = merge(trees)
    carried: dict[int, Fraction] = defaultdict(Fraction)
    for tree in merged:
        carried[tree.root] += tree.weight
    block = Fraction(1, len(carried))
    chunks, transfers = [], []
    for index, tree in enumerate(merged):
        chunks.append(Chunk(block * tree.weight / carried[tree.root], tree.root))
        hops = relayed(tree, topology)
        transfers += gathering(hops, index) if collective.kind.reduces else spreading(hops, index)
    return Schedule.build(topology, collective, method, bound, chunks, transfers)


def lift_pairs(
    topology: Topology, collective: Collective, method: Method, bound: Bound, pairs: Iterable[Pair]
) -> Schedule:
    """A schedule of an allreduce: each pair sums its part of the buffer at its root and spreads it.

    Pairs that gather along the edges on which they spread get their root moved to the centre.

    Args:
        topology: the fabric, relays included.
        collective: an allreduce.
        method: what made the pairs.
        bound: the limit of the rate.
        pairs: see `Pair`; the parts of the buffer are in proportion to the weights.

    Raises:
        CollectiveError: the collective is no allreduce.
    """
    if collective.kind is not Kind.ALLREDUCE:
        raise CollectiveError(f"{collective.kind}: pairs of trees are lifted into an allreduce only")
    merged = merge(centred(pair) for pair in pairs)
    total = sum((pair.weight for pair in merged), Fraction(0))
    chunks, transfers = [], []
    for index, pair in enumerate(merged):
        chunks.append(Chunk(pair.weight / total, pair.root))
        into = relayed(pair.into, topology)
        transfers += gathering(into, index)
        transfers += spreading(relayed(pair.out, topology), index, first_step=into.height)
    return Schedule.build(topology, collective, method, bound, chunks, transfers)


def spreading(tree: Tree, chunk: int, first_step: int = 0) -> list[Transfer]:
    """Each rank sends to its children one step after it has received."""
    depth = tree.depth
    return [
        Transfer(chunk, edge.parent, edge.child, first_step + depth[edge.parent], False, edge.via)
        for edge in tree.edges
    ]


def gathering(tree: Tree, chunk: int) -> list[Transfer]:
    """Each rank adds up what its children send, then sends the sum to its parent; edges turned round."""
    height = dict.fromkeys(tree.depth, 0)
    for edge in reversed(tree.edges):
        height[edge.parent] = max(height[edge.parent], height[edge.child] + 1)
    return [
        Transfer(chunk, edge.child, edge.parent, height[edge.child], True, edge.via[::-1])
        for edge in tree.edges
    ]


def relayed(tree: Tree, topology: Topology) -> Tree:
    """The tree with the relays on its edges made into ranks of their own.

    Two edges may pass the same relay. It then receives once and sends on twice (turned round: it adds up
    and sends once), so that loads only fall and no contribution counts twice. Relays that serve nobody
    after that are left out.
    """
    if not any(vertex < topology.ranks for edge in tree.edges for vertex in edge.via):
        return tree
    leaving: dict[int, list[TreeEdge]] = defaultdict(list)
    for edge in tree.edges:
        for hop in _split_at_relays(edge, topology.ranks):
            leaving[hop.parent].append(hop)
    members = set(tree.depth)
    return Tree(tree.root, tree.weight, _without_idle_leaves(breadth_first(tree.root, leaving), members))


def _split_at_relays(edge: TreeEdge, ranks: int) -> list[TreeEdge]:
    """The pieces of an edge between one rank and the next, whether it takes part or relays."""
    path = (edge.parent, *edge.via, edge.child)
    stops = [position for position, vertex in enumerate(path) if vertex < ranks]
    return [TreeEdge(path[start], path[end], path[start + 1 : end]) for start, end in pairwise(stops)]


def _without_idle_leaves(edges: Sequence[TreeEdge], members: set[int]) -> tuple[TreeEdge, ...]:
    """The edges that lead to a member; children come after their parents."""
    needed = set(members)
    kept = []
    for edge in reversed(edges):
        if edge.child in needed:
            needed.add(edge.parent)
            kept.append(edge)
    return tuple(kept[::-1])


def _names(kinds: Iterable[Kind]) -> str:
    *most, last = (kind.value for kind in kinds)
    return f"{', '.join(most)} and {last}"


def lift(
    topology: Topology, collective: Collective, method: Method, bound: Bound, carriers: Iterable[Carrier]
) -> Schedule:
    """`lift_pairs` for an allreduce, `lift_trees` for the other kinds."""
    carriers = list(carriers)
    if collective.kind is Kind.ALLREDUCE:
        pairs = [carrier for carrier in carriers if isinstance(carrier, Pair)]
        assert len(pairs) == len(carriers), "an allreduce is made of pairs"
        return lift_pairs(topology, collective, method, bound, pairs)
    trees = [carrier for carrier in carriers if isinstance(carrier, Tree)]
    assert len(trees) == len(carriers), "only an allreduce is made of pairs"
    return lift_trees(topology, collective, method, bound, trees)
