"""Every tree of a fabric of few ranks, and the best rates of trees that are low or few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, pairwise, product

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.topology import Topology
from tests.fuzzing.exact_lp import Program
from tests.fuzzing.limits import Way, ways

Uses = tuple[tuple[tuple[int, int], int], ...]
AnyUses = Uses | Mapping[tuple[int, int], int]


@lru_cache(maxsize=64)
def _parents(count: int, root: int) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
    """Every way to give each rank but the root a parent without a cycle: its height and its edges."""
    others = [rank for rank in range(count) if rank != root]
    found = []
    for chosen in product(range(count), repeat=len(others)):
        above = dict(zip(others, chosen, strict=True))
        depth = [_depth(above, rank, root) for rank in others]
        if None not in depth:
            found.append((max(depth), tuple((above[rank], rank) for rank in others)))  # type: ignore[type-var]
    return tuple(found)


def _depth(above: dict[int, int], rank: int, root: int) -> int | None:
    for depth in range(len(above) + 1):
        if rank == root:
            return depth
        rank = above[rank]
    return None


def trees(topology: Topology, root: int, height: int | None = None) -> Iterator[tuple[Way, ...]]:
    """Every out-tree from a root to all ranks, as its ways through switches, of at most a height."""
    between: dict[tuple[int, int], list[Way]] = {}
    for way in ways(topology, range(topology.ranks), range(topology.ranks, topology.size)):
        between.setdefault((way[0], way[-1]), []).append(way)
    for tall, edges in _parents(topology.ranks, root):
        if height is None or tall <= height:
            yield from product(*(between.get(edge, ()) for edge in edges))


def loads(topology: Topology, root: int, height: int | None = None, *, turned: bool = False) -> set[Uses]:
    """How often trees of at most a height use each link; in-trees where `turned`."""
    graph = topology.reversed() if turned else topology
    found = set()
    for tree in trees(graph, root, height):
        count = Counter(hop[::-1] if turned else hop for way in tree for hop in pairwise(way))
        found.add(tuple(sorted(count.items())))
    return found


def best_of(
    topology: Topology, groups: Mapping[tuple[int, bool], Iterable[AnyUses]], *, any_root: bool = False
) -> Fraction:
    """What each group of trees carries at the same time, at most.

    A group is named by its root and whether its trees lead there. With `any_root` a root carries what both
    of its groups do, and the roots' rates add up.
    """
    program = Program()
    using: dict[tuple[int, int], dict[object, int]] = {}
    for (root, turned), group in groups.items():
        weights = {(root, turned, number): tree for number, tree in enumerate(group)}
        program.at_most({("root", root) if any_root else "each": 1, **dict.fromkeys(weights, -1)})
        for weight, tree in weights.items():
            for hop, count in dict(tree).items():
                using.setdefault(hop, {})[weight] = count
    if any_root:
        program.at_most({"each": 1, **{("root", root): -1 for root, _ in groups}})
    for hop, users in using.items():
        program.at_most(users, topology.bandwidth[hop])
    return program.maximum("each")


def best_of_height(topology: Topology, roots: Sequence[int] | None, height: int) -> Fraction:
    """The best rate of all roots together by out-trees that are so low; by pairs where roots are None."""
    groups = {
        (root, turned): sorted(loads(topology, root, height, turned=turned))
        for root in (range(topology.ranks) if roots is None else roots)
        for turned in ((False, True) if roots is None else (False,))
    }
    return best_of(topology, groups, any_root=roots is None) * len(roots or [None])


def best_together(topology: Topology, chosen: Iterable[AnyUses]) -> Fraction:
    """The best rate of some carriers of one group together."""
    return best_of(topology, {(0, False): chosen})


def best_of_few(topology: Topology, carriers: Sequence[Uses], count: int) -> Fraction:
    """The best rate of so many of some carriers, by trying all choices."""
    most = min(count, len(carriers))
    return max(best_together(topology, chosen) for chosen in combinations(carriers, most))


def best_with_relays(topology: Topology, collective: Collective) -> Fraction:
    """The best rate along trees in which relays copy and add; no switches, and an allreduce has any root."""
    kind, ranks = collective.kind, frozenset(collective.ranks)
    own = (collective.root,) if collective.root is not None else collective.ranks
    both = kind is Kind.ALLREDUCE
    groups = {
        (root, turned): [Counter(tree) for tree in sorted(_steiner(topology, root, ranks, turned=turned))]
        for root in (range(topology.ranks) if both else own)
        for turned in ((False, True) if both else (kind in {Kind.REDUCE, Kind.REDUCE_SCATTER},))
    }
    return best_of(topology, groups, any_root=both) * (1 if both else len(own))


def _steiner(
    topology: Topology, root: int, ranks: frozenset[int], *, turned: bool
) -> set[tuple[tuple[int, int], ...]]:
    """The links of every tree between a root and some ranks, over any others."""
    links = {hop[::-1] for hop in topology.bandwidth} if turned else set(topology.bandwidth)
    relays = [rank for rank in range(topology.ranks) if rank not in ranks and rank != root]
    found = set()
    for size in range(len(relays) + 1):
        for taken in combinations(relays, size):
            inside = sorted(ranks | {root, *taken})
            for _, edges in _parents(len(inside), inside.index(root)):
                tree = [(inside[src], inside[dst]) for src, dst in edges]
                if links.issuperset(tree):
                    found.add(tuple(sorted(hop[::-1] if turned else hop for hop in tree)))
    return found


def distance(topology: Topology, collective: Collective, lengths: Sequence[Fraction]) -> Fraction:
    """How far a unit of the buffer travels at least: along the shortest ways or the cheapest trees."""
    length = {(link.src, link.dst): each for link, each in zip(topology.links, lengths, strict=True)}
    kind, ranks, root = collective.kind, collective.ranks, collective.root
    if kind in {Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL}:
        through = range(topology.size)
        pairs = [
            (src, dst)
            for src in (ranks if kind is not Kind.SCATTER else [root])
            for dst in (ranks if kind is not Kind.GATHER else [root])
            if src != dst
        ]
        far = _shortest(topology, length, through)
        return sum((far[pair] for pair in pairs), Fraction(0)) / len(ranks)  # type: ignore[index]
    far = _shortest(topology, length, range(topology.ranks, topology.size))
    if kind is Kind.ALLREDUCE:
        return min(
            _cheapest(far, rank, topology.ranks, 0) + _cheapest(far, rank, topology.ranks, 1)
            for rank in ranks
        )
    roots = ranks if root is None else (root,)
    turned = kind in {Kind.REDUCE, Kind.REDUCE_SCATTER}
    return sum((_cheapest(far, rank, topology.ranks, turned) for rank in roots), Fraction(0)) / len(roots)


def _shortest(
    topology: Topology, length: dict[tuple[int, int], Fraction], through: Sequence[int]
) -> dict[tuple[int, int], Fraction]:
    """Distances between vertices over those that may be passed."""
    far = dict(length)
    for between in through:
        for src, dst in product(range(topology.size), repeat=2):
            if (src, between) in far and (between, dst) in far and src != dst:
                way = far[src, between] + far[between, dst]
                far[src, dst] = min(far.get((src, dst), way), way)
    return far


def _cheapest(far: dict[tuple[int, int], Fraction], root: int, count: int, turned: int) -> Fraction:
    """The cost of the cheapest tree of all."""
    best = None
    for _, edges in _parents(count, root):
        tree = [edge[::-1] for edge in edges] if turned else edges
        if all(edge in far for edge in tree):
            cost = sum((far[edge] for edge in tree), Fraction(0))
            best = cost if best is None else min(best, cost)
    return Fraction(10**30) if best is None else best


def crossings(topology: Topology, lengths: Sequence[Fraction]) -> Fraction:
    """A limit of how far a unit of any allreduce travels, trees or not.

    Ranks that ways shorter than t join, one way or the other, are as one; between k such sets at least
    2 (k - 1) messages travel t or more: k - 1 until the first of them knows all, then one into each other.
    """
    length = {(link.src, link.dst): each for link, each in zip(topology.links, lengths, strict=True)}
    far = _shortest(topology, length, range(topology.ranks, topology.size))
    near = {(s, d): far[s, d] for s, d in far if max(s, d) < topology.ranks}
    total, before = Fraction(0), Fraction(0)
    for t in sorted({*near.values()}):
        total += (
            2 * (_sets(topology.ranks, [pair for pair, way in near.items() if way < t]) - 1) * (t - before)
        )
        before = t
    return total


def _sets(count: int, pairs: Sequence[tuple[int, int]]) -> int:
    """How many sets the pairs leave."""
    of = list(range(count))
    for src, dst in pairs:
        of = [of[src] if each == of[dst] else each for each in of]
    return len(set(of))
