"""Implicit schedules of every kind for tests: trees from each representative, moved by all translations.

They are correct and not fast. Chunks of unequal shares take different ways.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial

from hypothesis import strategies as st

from arborcast.synth.bounds import bound
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Chunk, Method, Transfer
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Link, Topology, Vertex

KINDS = (Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE, Kind.ALLTOALL)

Edge = tuple[int, int, tuple[Vertex, ...], int]  # parent, child, switches between them, depth of the parent


# ------------------------------------------------------------------------------------------------ fabrics


def circulant(ranks: int, rates: Mapping[int, int], latency_us: str = "0") -> Topology:
    """Ranks on a circle, each with links both ways to those so many places on, of so many GB/s."""
    pairs = {
        (rank, (rank + offset * way) % ranks): rate
        for offset, rate in rates.items()
        for rank in range(ranks)
        for way in (1, -1)
    }
    links = [Link(*pair, Fraction(rate), Fraction(latency_us)) for pair, rate in pairs.items()]
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


def grid(rows: int, columns: int, hubs: bool) -> Topology:
    """A torus; with `hubs` a switch joins the ranks of each row instead of links between them."""
    ranks = rows * columns
    pairs = [(r, (r + columns) % ranks) for r in range(ranks)]
    if hubs:
        pairs += [(r, ranks + r // columns) for r in range(ranks)]
    else:
        pairs += [(r, r // columns * columns + (r + 1) % columns) for r in range(ranks)]
    links = sorted({pair for a, b in pairs if a != b for pair in ((a, b), (b, a))})
    down = [(r + columns) % ranks for r in range(ranks)]
    right = [r // columns * columns + (r + 1) % columns for r in range(ranks)]
    switches = [f"hub{row}" for row in range(rows)] if hubs else []
    if hubs:
        down += [ranks + (row + 1) % rows for row in range(rows)]
        right += [ranks + row for row in range(rows)]
    moves = [move for move, length in ((down, rows), (right, columns)) if length > 1]
    return Topology.build(
        f"grid-{rows}x{columns}", ranks, [Link(a, b, Fraction(1)) for a, b in links], switches, moves
    )


# ---------------------------------------------------------------------------------------------- schedules


def implicit(
    topology: Topology,
    kind: Kind,
    *,
    seed: int = 0,
    shares: Sequence[Fraction] = (Fraction(2, 3), Fraction(1, 3)),
    translations: Translations | None = None,
) -> ImplicitSchedule:
    """A schedule of one tree (to each target its path) per representative and part of its block.

    `shares` are parts of a block (for allreduce of a representative's part of the buffer).
    """
    group = translations or Translations.generated(topology, topology.symmetries)
    collective = Collective.on(topology, kind)
    dice = random.Random(seed)
    chunks: list[Chunk] = []
    transfers: list[Transfer] = []
    for root in group.representatives:
        for share in shares:
            edges = _tree(topology, root, dice)
            whole = share / topology.ranks
            if kind is Kind.ALLTOALL:
                for target in range(topology.ranks):
                    if target != root:
                        transfers += _path(len(chunks), edges, target)
                        chunks.append(Chunk(whole, root, target))
            else:
                transfers += _along(len(chunks), edges, kind)
                chunks.append(Chunk(whole, root))
    return of_orbits(topology, collective, chunks, transfers, translations=group)


def of_orbits(
    topology: Topology,
    collective: Collective | Kind,
    chunks: Sequence[Chunk],
    transfers: Iterable[Transfer],
    *,
    translations: Translations | None = None,
    limit: Bound | None = None,
) -> ImplicitSchedule:
    """A drawn schedule: by all declared symmetries and under its true limit, unless others are given."""
    group = translations or Translations.generated(topology, topology.symmetries)
    among = Collective.on(topology, collective) if isinstance(collective, Kind) else collective
    proven = limit or bound(topology, among)
    return ImplicitSchedule.build(topology, among, Method("drawn"), proven, group, chunks, transfers)


translated = partial(implicit, shares=(Fraction(1),))
"""One chunk for each block of a representative."""


def _reached_from(topology: Topology, rank: int) -> Iterator[tuple[int, tuple[Vertex, ...]]]:
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


def _tree(topology: Topology, root: int, dice: random.Random) -> list[Edge]:
    """A tree of fewest edges from a rank to all others; dice decide which."""
    depth = {root: 0}
    edges: list[Edge] = []
    ranks = [root]
    for rank in ranks:
        reached = list(_reached_from(topology, rank))
        dice.shuffle(reached)
        for child, via in reached:
            if child not in depth:
                depth[child] = depth[rank] + 1
                edges.append((rank, child, via, depth[rank]))
                ranks.append(child)
    return edges


def _along(chunk: int, edges: list[Edge], kind: Kind) -> list[Transfer]:
    """A chunk up the tree, down the tree, or both."""
    height = 1 + max(depth for *_, depth in edges)
    up = [
        Transfer(chunk, child, parent, height - 1 - depth, True, via[::-1])
        for parent, child, via, depth in edges
    ]
    down = 0 if kind is Kind.ALLGATHER else height
    spread = [Transfer(chunk, parent, child, down + depth, False, via) for parent, child, via, depth in edges]
    return (up if kind.reduces else []) + (spread if kind is not Kind.REDUCE_SCATTER else [])


def _path(chunk: int, edges: list[Edge], target: int) -> list[Transfer]:
    """A chunk down the tree to one rank."""
    into = {child: (parent, via, depth) for parent, child, via, depth in edges}
    found = []
    while target in into:
        parent, via, depth = into[target]
        found.append(Transfer(chunk, parent, target, depth, False, via))
        target = parent
    return found


# -------------------------------------------------------------------------------------------------- drawn


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


@st.composite
def implicit_schedules(draw: Callable, max_ranks: int = 12) -> ImplicitSchedule:
    """All kinds on circulants, tori and rows of switches, also by some of the translations only."""
    if draw(st.booleans()):
        ranks = draw(st.integers(3, max_ranks))
        strides = draw(st.sets(st.integers(2, max(2, ranks // 2)), max_size=2))
        topology = circulant(ranks, dict.fromkeys([1, *sorted(strides)], 1))
    else:
        columns = draw(st.integers(2, 4))
        topology = grid(draw(st.integers(2, max_ranks // columns)), columns, draw(st.booleans()))
    kept = [draw(st.booleans()) for _ in topology.symmetries]
    some = [one for one, keep in zip(topology.symmetries, kept, strict=True) if keep]
    return implicit(
        topology,
        draw(st.sampled_from(KINDS)),
        seed=draw(st.integers(0, 9)),
        translations=Translations.generated(topology, some),
        shares=draw(parts()),
    )
