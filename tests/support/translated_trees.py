"""Implicit schedules of every kind for tests: trees from each representative, moved by all translations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from hypothesis import strategies as st

from arborcast.synth.bounds import bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Chunk, Method, Transfer
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Link, Topology, Vertex

KINDS = (Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE, Kind.ALLTOALL)

Edge = tuple[int, int, tuple[Vertex, ...], int]  # parent, child, switches between them, depth of the parent


def circulant(ranks: int, rates: dict[int, int], latency_us: str = "0") -> Topology:
    """Ranks on a circle, each with links both ways to those so many places on, of so many GB/s."""
    links = [
        Link(*pair, Fraction(rate), Fraction(latency_us))
        for offset, rate in rates.items()
        for rank in range(ranks)
        for pair in ((rank, (rank + offset) % ranks), ((rank + offset) % ranks, rank))
    ]
    turned = [(rank + 1) % ranks for rank in range(ranks)]
    return Topology.build(f"circle of {ranks}", ranks, links, symmetries=[turned])


def hub(ranks: int) -> Topology:
    """Ranks around one switch, which every translation keeps."""
    links = [
        Link(*pair, Fraction(2), Fraction(1, 2))
        for rank in range(ranks)
        for pair in ((rank, ranks), (ranks, rank))
    ]
    return Topology.build("hub", ranks, links, ["hub"], [[*range(1, ranks), 0, ranks]])


def reached_from(topology: Topology, rank: int) -> Iterator[tuple[int, tuple[Vertex, ...]]]:
    """The ranks to which a way leads from a rank over switches only, with the switches."""
    waiting: list[tuple[Vertex, tuple[Vertex, ...]]] = [(rank, ())]
    seen = {rank}
    for here, via in waiting:
        for link in topology.links:
            if link.src == here and link.dst not in seen:
                seen.add(link.dst)
                if topology.is_switch(link.dst):
                    waiting.append((link.dst, (*via, link.dst)))
                else:
                    yield link.dst, via


def tree(topology: Topology, root: int, dice: random.Random) -> list[Edge]:
    """A tree of fewest edges from a rank to all others; dice decide which."""
    depth = {root: 0}
    edges: list[Edge] = []
    for rank in iter_growing([root], edges):
        reached = list(reached_from(topology, rank))
        dice.shuffle(reached)
        for child, via in reached:
            if child not in depth:
                depth[child] = depth[rank] + 1
                edges.append((rank, child, via, depth[rank]))
    return edges


def iter_growing(first: Sequence[int], edges: list[Edge]) -> Iterator[int]:
    """The root, then the children of the edges that are appended while this goes on."""
    yield from first
    for _, child, _, _ in edges:
        yield child


def translated(
    topology: Topology,
    kind: Kind,
    *,
    seed: int = 0,
    shares: Sequence[Fraction] = (Fraction(1),),
    translations: Translations | None = None,
) -> ImplicitSchedule:
    """A schedule of one tree (to each target its path) per representative and part of its block."""
    group = translations or Translations.generated(topology, topology.symmetries)
    collective = Collective.on(topology, kind)
    dice = random.Random(seed)
    chunks: list[Chunk] = []
    transfers: list[Transfer] = []
    for root in group.representatives:
        for share in shares:
            edges = tree(topology, root, dice)
            whole = share / topology.ranks
            if kind is Kind.ALLTOALL:
                for target in range(topology.ranks):
                    if target != root:
                        transfers += path(len(chunks), edges, target)
                        chunks.append(Chunk(whole, root, target))
            else:
                transfers += along(len(chunks), edges, kind)
                chunks.append(Chunk(whole, root))
    return ImplicitSchedule.build(
        topology, collective, Method("drawn"), bound(topology, collective), group, chunks, transfers
    )


def along(chunk: int, edges: list[Edge], kind: Kind) -> list[Transfer]:
    """A chunk up the tree, down the tree, or both."""
    height = 1 + max(depth for *_, depth in edges)
    up = [
        Transfer(chunk, child, parent, height - 1 - depth, True, via[::-1])
        for parent, child, via, depth in edges
    ]
    down = 0 if kind is Kind.ALLGATHER else height
    spread = [Transfer(chunk, parent, child, down + depth, False, via) for parent, child, via, depth in edges]
    return (up if kind.reduces else []) + (spread if kind is not Kind.REDUCE_SCATTER else [])


def path(chunk: int, edges: list[Edge], target: int) -> list[Transfer]:
    """A chunk down the tree to one rank."""
    into = {child: (parent, via, depth) for parent, child, via, depth in edges}
    found = []
    while target in into:
        parent, via, depth = into[target]
        found.append(Transfer(chunk, parent, target, depth, False, via))
        target = parent
    return found


@st.composite
def circulants(draw: Callable, latency_us: str = "0") -> Topology:
    """Circles on which only the identity keeps a link."""
    ranks = draw(st.integers(3, 9))
    offsets = draw(st.sets(st.integers(1, (ranks - 1) // 2), max_size=2))
    return circulant(ranks, {1: draw(st.integers(1, 3)), **dict.fromkeys(offsets - {1}, 2)}, latency_us)


@st.composite
def parts(draw: Callable) -> list[Fraction]:
    """The whole of a block in up to three parts."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    return [Fraction(size, sum(sizes)) for size in sizes]
