"""A schedule that is there at once: along shortest ways, without a solver and without compiled kernels.

It serves a collective until its table has been found. Each block goes along a tree of shortest ways to or
from the rank that it belongs to, an allreduce's along one tree to a rank and along another from it. Where
every two ranks are joined, a rank sends to those alone that are a power of two away in the circle of ranks:
all are then reached in a logarithm of steps, and nobody has more than twice a logarithm of peers. A block
between one rank and the root goes by one way of the root's tree, which is thinned out nowhere.

    of 8 ranks, what rank 0 has:      step 0: 0 -> 1, 2, 4, 6, 7      step 1: 1 -> 3, 5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product

from arborcast.backends.errors import ExecutionError
from arborcast.backends.programs.traffic import Ways, straight_ways
from arborcast.backends.schedules.schedule_table import ScheduleTable
from arborcast.synth.certificate import Bound, Cut
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.selection import Choice
from arborcast.synth.topology import Topology
from arborcast.synth.tree import Tree, TreeEdge
from arborcast.synth.verification.verifier import verify

SIMPLE = "shortest-ways"
"""The method of such a schedule."""

MOST_TRANSFERS = 1 << 16
"""Where there would be more, making them would take seconds."""

MOST_TREES = 16
"""Of an allreduce: more would only be more messages."""


def is_simple(table: ScheduleTable) -> bool:
    """Whether a table is one that serves until there is another."""
    return table.entries[0].schedule.method.name == SIMPLE


def simple_table(topology: Topology, collective: Collective) -> ScheduleTable | None:
    """The table of a simple schedule, verified; None where there is none that is made at once.

    Args:
        topology: of any kind; its switches only forward here.
        collective: among all its ranks; of any kind but an alltoall or a custom one.

    Raises:
        ExecutionError: the checker objects.
    """
    ranks = topology.ranks
    owners = _owners(collective, ranks)
    if 2 * len(owners) * ranks > MOST_TRANSFERS:
        return None
    kind, ends = collective.kind, _ends(collective)
    ways = _thinned(straight_ways(topology), ranks) if ends[0] is None else straight_ways(topology)
    is_in = kind.reduces or kind is Kind.GATHER
    is_out = kind not in {Kind.REDUCE_SCATTER, Kind.REDUCE, Kind.GATHER}
    towards = _trees({pair[::-1]: way for pair, way in ways.items()}, owners, ranks) if is_in else {}
    away = _trees(ways, owners, ranks) if is_out else {}
    if towards is None or away is None:
        return None
    chunks: list[Chunk] = []
    transfers: list[Transfer] = []
    for owner, end in product(owners, ends):
        number, step = len(chunks), 0
        if end is None:
            chunks.append(Chunk(Fraction(1, len(owners)), owner))
        else:
            chunks.append(Chunk(Fraction(1, ranks), *((end, owner) if is_in else (owner, end))))
        if owner in towards:
            tree = _part(towards[owner], end)
            step = tree.height
            transfers += _up(tree, number, reduce=kind.reduces)
        if owner in away:
            transfers += _down(_part(away[owner], end), number, step)
    bound = _bound(topology, collective)
    if bound is None:
        return None
    schedule = Schedule.build(topology, collective, Method(SIMPLE), bound, chunks, transfers)
    verdict = verify(schedule)
    if not verdict.correct:
        raise ExecutionError(f"method {SIMPLE} made a schedule that is not correct: {verdict.errors[0]}")
    return ScheduleTable.of([Choice(0, schedule)])


def _owners(collective: Collective, ranks: int) -> Sequence[int]:
    """To whom, or from whom, each chunk goes."""
    if collective.root is not None:
        return (collective.root,)
    if collective.kind is Kind.ALLREDUCE and ranks > MOST_TREES:
        return [place * ranks // MOST_TREES for place in range(MOST_TREES)]
    return range(ranks)


def _ends(collective: Collective) -> Sequence[int | None]:
    """The ranks that exchange a block of their own with the root; None alone for all as one."""
    if collective.kind in {Kind.GATHER, Kind.SCATTER}:
        return [rank for rank in collective.ranks if rank != collective.root]
    return [None]


def _thinned(ways: Ways, ranks: int) -> Ways:
    """Where all are joined, the ways to ranks that are a power of two away; else all."""
    if len(ways) < ranks * (ranks - 1):
        return ways
    apart = {1 << bit for bit in range(ranks.bit_length()) if 1 << bit < ranks}
    return {
        (src, dst): way
        for (src, dst), way in ways.items()
        if (dst - src) % ranks in apart or (src - dst) % ranks in apart
    }


def _trees(ways: Ways, owners: Sequence[int], ranks: int) -> dict[int, Tree] | None:
    """A tree of shortest ways from each owner, whose weights say nothing; None where it does not reach all.

    Neighbours come in the order of their distance in the circle, so that the trees of a full mesh are turned
    copies of each other and load all ranks alike.
    """
    after: dict[int, list[int]] = {rank: [] for rank in range(ranks)}
    for src, dst in ways:
        after[src].append(dst)
    for src, others in after.items():
        others.sort(key=lambda dst, src=src: (dst - src) % ranks)  # type: ignore[misc]
    found = {}
    for owner in owners:
        edges, known = list[TreeEdge](), {owner}
        reached = [owner]
        for src in reached:  # grows meanwhile
            new = [dst for dst in after[src] if dst not in known]
            edges += (TreeEdge(src, dst, ways[src, dst]) for dst in new)
            known.update(new)
            reached += new
        if len(reached) < ranks:
            return None
        found[owner] = Tree(owner, Fraction(1), tuple(edges))
    return found


def _part(tree: Tree, end: int | None) -> Tree:
    """What of a tree leads to one rank; all of it for None."""
    into = {edge.child: edge for edge in tree.edges}
    way: list[TreeEdge] = []
    while end in into:
        way.append(into[end])
        end = way[-1].parent
    return replace(tree, edges=tuple(way[::-1])) if way else tree


def _up(tree: Tree, chunk: int, *, reduce: bool) -> list[Transfer]:
    """Towards the owner: who is far away sends first. The edges are turned round."""
    depth, height = tree.depth, tree.height
    return [
        Transfer(chunk, it.child, it.parent, height - depth[it.child], reduce=reduce, via=it.via)
        for it in tree.edges
    ]


def _down(tree: Tree, chunk: int, first_step: int) -> list[Transfer]:
    """Copies from the owner."""
    depth = tree.depth
    return [
        Transfer(chunk, it.parent, it.child, first_step + depth[it.parent], via=it.via) for it in tree.edges
    ]


def _bound(topology: Topology, collective: Collective) -> Bound | None:
    """The least that the links out of one rank, or into one, prove: no good limit, but a proven one."""
    from arborcast.synth.certification import certified_rate  # compiled kernels come with it

    capacity_out = dict.fromkeys(range(topology.ranks), Fraction(0))
    capacity_in = dict(capacity_out)
    for link in topology.links:
        if link.src in capacity_out:
            capacity_out[link.src] += link.bandwidth
        if link.dst in capacity_in:
            capacity_in[link.dst] += link.bandwidth
    everything = frozenset(range(topology.size))
    best: Bound | None = None
    for rank in range(topology.ranks):
        for side, capacity in (
            (frozenset({rank}), capacity_out[rank]),
            (everything - {rank}, capacity_in[rank]),
        ):
            cut = Cut(side, capacity)
            try:
                rate = certified_rate(topology, collective, cut)
            except InputError:
                continue  # nothing has to leave that side
            if best is None or rate < best.rate:
                best = Bound(rate, cut)
    return best
