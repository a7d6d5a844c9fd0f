"""Schedules for the tests of lowering and running: a few drawn by hand, and random ones of every kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from hypothesis import strategies as st

from synth.certificate import Bound, Cut
from synth.collective import NAMED_KINDS, Collective, Kind
from synth.schedule import Chunk, Method, Schedule, Transfer
from synth.topology import Link, Topology


def full_mesh(ranks: int) -> Topology:
    return Topology.build(
        f"full-{ranks}",
        ranks,
        [Link(a, b, Fraction(1)) for a in range(ranks) for b in range(ranks) if a != b],
    )


def make(
    kind: Kind | str,
    chunks: Iterable[Chunk],
    transfers: Iterable[Transfer],
    *,
    total: int,
    ranks: Sequence[int] | None = None,
    root: int = 0,
) -> Schedule:
    """A schedule on a full mesh of `total` ranks; its bound is there for form's sake."""
    topology = full_mesh(total)
    return Schedule.build(
        topology,
        Collective.on(topology, kind, root=root, ranks=ranks),
        Method("drawn"),
        Bound(Fraction(total), Cut(frozenset({0}), Fraction(total))),
        chunks,
        transfers,
    )


def ring_allreduce(ranks: int) -> Schedule:
    """Chunk c is summed along the ring up to rank c, then passed round once more."""
    transfers = [
        Transfer(chunk, (chunk + 1 + step) % ranks, (chunk + 2 + step) % ranks, step, step < ranks - 1)
        for chunk in range(ranks)
        for step in range(2 * (ranks - 1))
    ]
    return make("allreduce", [Chunk(Fraction(1, ranks), c) for c in range(ranks)], transfers, total=ranks)


def tree_broadcast() -> Schedule:
    """Three chunks of shares 1/2, 1/3, 1/6 down different trees of five ranks, root 1."""
    chunks = [Chunk(Fraction(1, share), 1) for share in (2, 3, 6)]
    #                 chunk 0: a chain       chunk 1: a star   chunk 2: two levels
    edges = [
        [(1, 0), (0, 2), (2, 3), (3, 4)],
        [(1, r) for r in (0, 2, 3, 4)],
        [(1, 4), (1, 2), (4, 0), (2, 3)],
    ]
    steps = [[0, 1, 2, 3], [0, 0, 0, 0], [0, 0, 1, 1]]
    transfers = [
        Transfer(chunk, src, dst, step)
        for chunk in range(3)
        for (src, dst), step in zip(edges[chunk], steps[chunk], strict=True)
    ]
    return make("broadcast", chunks, transfers, total=5, root=1)


def recursive_doubling() -> Schedule:
    """Four ranks; in each step partners exchange the whole buffer and both add: sends read the old state."""
    transfers = [Transfer(0, rank, rank ^ (1 << step), step, True) for step in range(2) for rank in range(4)]
    return make("allreduce", [Chunk(Fraction(1), 0)], transfers, total=4)


def uneven_allreduce() -> Schedule:
    """Many chunks whose shares have nothing in common, each over a star with its own centre."""
    weights = [Fraction(1, prime) for prime in (7, 11, 13, 17, 19, 23, 29, 31)]
    weights.append(1 - sum(weights))
    chunks = [Chunk(weight, index % 3) for index, weight in enumerate(weights)]
    transfers = []
    for index, chunk in enumerate(chunks):
        leaves = [rank for rank in range(3) if rank != chunk.owner]
        transfers += [Transfer(index, leaf, chunk.owner, 0, True) for leaf in leaves]
        transfers += [Transfer(index, chunk.owner, leaf, 1) for leaf in leaves]
    return make("allreduce", chunks, transfers, total=3)


def allgather_over_relay() -> Schedule:
    """Ranks 2 and 0 (in this order of blocks) gather through rank 1, which takes no part."""
    chunks = [Chunk(Fraction(1, 2), 2), Chunk(Fraction(1, 2), 0)]
    transfers = [Transfer(0, 2, 1, 0), Transfer(0, 1, 0, 1), Transfer(1, 0, 1, 0), Transfer(1, 1, 2, 1)]
    return make("allgather", chunks, transfers, total=3, ranks=[2, 0])


def direct(kind: Kind | str, ranks: int, root: int = 0) -> Schedule:
    """Gather, scatter or alltoall in one step, every block straight to its target."""
    collective = Collective.on(full_mesh(ranks), kind, root=root)
    chunks, transfers = [], []
    for index, ((owner, target, _), share) in enumerate(collective.blocks().items()):
        assert owner is not None and target is not None
        chunks.append(Chunk(share, owner, target))
        transfers.append(Transfer(index, owner, target, 0))
    return make(kind, chunks, transfers, total=ranks, root=root)


@st.composite
def schedules(draw: st.DrawFn, kinds: Sequence[Kind] = NAMED_KINDS) -> Schedule:
    """Any kind on up to five ranks and two relays: random shares, trees, idle steps, exchanges."""
    kind = draw(st.sampled_from(kinds))
    members = draw(st.integers(2, 5))
    total = members + draw(st.integers(0, 2))
    ranks = draw(st.permutations(range(total)))[:members]
    collective = Collective.on(full_mesh(total), kind, root=draw(st.sampled_from(ranks)), ranks=ranks)
    chunks: list[Chunk] = []
    transfers: list[Transfer] = []
    for (owner, target, _), block in collective.blocks().items():
        weights = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
        for weight in weights:
            root = draw(st.sampled_from(ranks)) if owner is None else owner
            transfers += draw(_moves(collective, total, len(chunks), root, target))
            chunks.append(Chunk(block * Fraction(weight, sum(weights)), root, target))
    return make(kind, chunks, transfers, total=total, ranks=ranks, root=collective.root or 0)


@st.composite
def _moves(
    draw: st.DrawFn, collective: Collective, total: int, chunk: int, root: int, target: int | None
) -> list[Transfer]:
    """The transfers of one chunk."""
    ranks = collective.ranks
    if collective.kind is Kind.ALLREDUCE and len(ranks) in {2, 4} and draw(st.booleans()):
        return _exchange(draw(st.permutations(ranks)), chunk, draw(st.integers(0, 2)))
    reached = set(ranks) if target is None else {target}
    height = draw(st.integers(total, total + 2))
    edges = draw(_tree(root, total, reached, height))
    down = [Transfer(chunk, src, dst, step) for src, dst, step in edges]
    if not collective.kind.reduces:
        return down
    into = draw(_tree(root, total, reached, height))
    up = [Transfer(chunk, dst, src, height - 1 - step, True) for src, dst, step in into]
    if collective.kind is not Kind.ALLREDUCE:
        return up
    return up + [Transfer(chunk, src, dst, step + height) for src, dst, step in edges]


@st.composite
def _tree(
    draw: st.DrawFn, root: int, total: int, reached: set[int], height: int
) -> list[tuple[int, int, int]]:
    """Edges away from the root with steps that grow along every path, all below `height`.

    Ranks outside `reached` are only kept where they lead to one inside. Siblings may share a step.
    """
    steps: dict[int, int] = {root: -1}
    edges = []
    for rank in draw(st.permutations(sorted(set(range(total)) - {root}))):
        parent = draw(st.sampled_from([known for known in steps if steps[known] < height - 1]))
        steps[rank] = draw(st.integers(steps[parent] + 1, min(steps[parent] + 2, height - 1)))
        edges.append((parent, rank, steps[rank]))
    needed, kept = set(reached), []
    for parent, rank, step in reversed(edges):
        if rank in needed:
            needed.add(parent)
            kept.append((parent, rank, step))
    return kept


def _exchange(ranks: Sequence[int], chunk: int, first: int) -> list[Transfer]:
    return [
        Transfer(chunk, rank, ranks[position ^ bit], first + level, True)
        for level, bit in enumerate(bit for bit in (1, 2) if bit < len(ranks))
        for position, rank in enumerate(ranks)
    ]
