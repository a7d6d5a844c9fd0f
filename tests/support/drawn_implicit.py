"""Implicit schedules for the tests of lowering and running: trees and paths of breadth-first searches.

They are correct and not fast. Each representative has chunks of unequal shares, which take different ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from hypothesis import strategies as st

from arborcast.synth.certificate import Bound, Cut
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Chunk, Method, Transfer
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Link, Topology, Vertex

KINDS = (Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE, Kind.ALLTOALL)

Way = tuple[Vertex, ...]  # from rank to rank, through switches


def circulant(ranks: int, strides: Sequence[int]) -> Topology:
    """Rank r is linked with r + s both ways for every stride s; turning it is its symmetry."""
    links = {(r, (r + s * sign) % ranks) for r in range(ranks) for s in strides for sign in (1, -1)}
    return Topology.build(
        f"circulant-{ranks}",
        ranks,
        [Link(a, b, Fraction(1)) for a, b in sorted(links)],
        symmetries=[[(r + 1) % ranks for r in range(ranks)]],
    )


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


def implicit(
    topology: Topology,
    kind: Kind,
    *,
    translations: Translations | None = None,
    shares: Sequence[Fraction] = (Fraction(2, 3), Fraction(1, 3)),
) -> ImplicitSchedule:
    """One chunk per share for each block of a representative: a tree, a pair of trees, or a path.

    `shares` are parts of a block (for allreduce of a representative's part of the buffer).
    """
    group = Translations.generated(topology, topology.symmetries) if translations is None else translations
    collective = Collective.on(topology, kind)
    chunks: list[Chunk] = []
    transfers: list[Transfer] = []
    for root in group.representatives:
        targets = [r for r in range(topology.ranks) if r != root] if kind is Kind.ALLTOALL else [None]
        for target in targets:
            for turn, share in enumerate(shares):
                transfers += _moved(_tree(topology, root, turn), kind, root, target, len(chunks))
                chunks.append(Chunk(share / topology.ranks, root, target))
    bound = Bound(Fraction(topology.ranks), Cut(frozenset({0}), Fraction(topology.ranks)))
    return ImplicitSchedule.build(topology, collective, Method("drawn"), bound, group, chunks, transfers)


def _tree(topology: Topology, root: int, turn: int) -> dict[int, tuple[int, Way]]:
    """The depth of each rank, and its way from the rank before it; another turn, another tree."""
    out: dict[Vertex, list[Vertex]] = {vertex: [] for vertex in range(topology.size)}
    for link in topology.links:
        out[link.src].append(link.dst)
    tree: dict[int, tuple[int, Way]] = {root: (0, ())}
    ranks, seen = [root], set[Vertex]()
    for rank in ranks:
        ways: list[Way] = [(rank,)]
        for way in ways:
            heads = out[way[-1]]
            for head in heads[turn % len(heads) :] + heads[: turn % len(heads)]:
                if topology.is_switch(head) and (rank, head) not in seen:
                    seen.add((rank, head))
                    ways.append((*way, head))
                elif not topology.is_switch(head) and head not in tree:
                    tree[head] = (tree[rank][0] + 1, (*way, head))
                    ranks.append(head)
    assert len(tree) == topology.ranks, "the test's fabric is connected"
    return tree


def _moved(
    tree: dict[int, tuple[int, Way]], kind: Kind, root: int, target: int | None, chunk: int
) -> list[Transfer]:
    """The transfers of one chunk down the tree, up the tree, both, or along the path to its target."""
    height = max(depth for depth, _ in tree.values())
    if target is not None:
        kept = {target}
        while (before := tree[min(kept, key=lambda rank: tree[rank][0])][1][0]) != root:
            kept.add(before)
        return [_down(tree[rank], chunk, 0) for rank in kept]
    edges = [edge for edge in tree.values() if edge[0]]
    up = [
        Transfer(chunk, way[-1], way[0], height - depth, True, tuple(reversed(way[1:-1])))
        for depth, way in edges
    ]
    down = [_down(edge, chunk, height if kind is Kind.ALLREDUCE else 0) for edge in edges]
    match kind:
        case Kind.ALLGATHER:
            return down
        case Kind.REDUCE_SCATTER:
            return up
        case _:
            return up + down


def _down(edge: tuple[int, Way], chunk: int, first: int) -> Transfer:
    depth, way = edge
    return Transfer(chunk, way[0], way[-1], first + depth - 1, via=way[1:-1])


@st.composite
def implicit_schedules(draw: Callable, max_ranks: int = 12) -> ImplicitSchedule:
    """All kinds on circulants, tori and rows of switches, also by some of the translations only."""
    if draw(st.booleans()):
        ranks = draw(st.integers(3, max_ranks))
        strides = draw(st.sets(st.integers(2, max(2, ranks // 2)), max_size=2))
        topology = circulant(ranks, [1, *sorted(strides - {ranks})])
    else:
        columns = draw(st.integers(2, 4))
        topology = grid(draw(st.integers(2, max_ranks // columns)), columns, draw(st.booleans()))
    kept = [draw(st.booleans()) for _ in topology.symmetries]
    some = [one for one, keep in zip(topology.symmetries, kept, strict=True) if keep]
    parts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    return implicit(
        topology,
        draw(st.sampled_from(KINDS)),
        translations=Translations.generated(topology, some),
        shares=[Fraction(part, sum(parts)) for part in parts],
    )
