"""A schedule that is there at once: along shortest ways, without a solver and without compiled kernels.

It serves a collective until its table has been found. Each block goes along a tree of shortest ways to or
from the rank that it belongs to, an allreduce's along one tree to a rank and along another from it. Where
every two ranks are joined, a rank sends to those alone that are a power of two away in the circle of ranks:
all are then reached in a logarithm of steps, and nobody has more than twice a logarithm of peers. A block
between one rank and the root goes by one way of the root's tree, which is thinned out nowhere.

    of 8 ranks, what rank 0 has:      step 0: 0 -> 1, 2, 4, 6, 7      step 1: 1 -> 3, 5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from arborcast.synth.verification.verifier import verify

SIMPLE = "shortest-ways"
"""The method of such a schedule."""

MOST_TRANSFERS = 1 << 16
"""Where there would be more, making them would take seconds."""

MOST_TREES = 16
"""Of an allreduce: more would only be more messages."""


@dataclass(frozen=True)
class _DistanceTree:
    """How one rank reaches all others: the rank before each, and how many steps away each is."""

    before: Mapping[int, int]
    depth: Mapping[int, int]

    @property
    def height(self) -> int:
        return max(self.depth.values())

    def towards(self, end: int | None) -> _DistanceTree:
        """What of it leads to one rank; all of it for None."""
        if end is None:
            return self
        way = [end]
        while way[-1] in self.before:
            way.append(self.before[way[-1]])
        return _DistanceTree({it: self.before[it] for it in way[:-1]}, {it: self.depth[it] for it in way})


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
    towards = _trees([(dst, src) for src, dst in ways], owners, ranks) if is_in else {}
    away = _trees(list(ways), owners, ranks) if is_out else {}
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
            tree = towards[owner].towards(end)
            step = tree.height
            transfers += _up(tree, number, ways, reduce=kind.reduces)
        if owner in away:
            transfers += _down(away[owner].towards(end), number, step, ways)
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


def _trees(
    pairs: Sequence[tuple[int, int]], owners: Sequence[int], ranks: int
) -> dict[int, _DistanceTree] | None:
    """A tree of shortest ways from each owner; None where it does not reach all.

    Neighbours come in the order of their distance in the circle, so that the trees of a full mesh are turned
    copies of each other and load all ranks alike.
    """
    after: dict[int, list[int]] = {rank: [] for rank in range(ranks)}
    for src, dst in pairs:
        after[src].append(dst)
    for src, others in after.items():
        others.sort(key=lambda dst, src=src: (dst - src) % ranks)  # type: ignore[misc]
    found = {}
    for owner in owners:
        before: dict[int, int] = {}
        depth = {owner: 0}
        reached = [owner]
        for src in reached:  # grows meanwhile
            for dst in after[src]:
                if dst not in depth:
                    before[dst], depth[dst] = src, depth[src] + 1
                    reached.append(dst)
        if len(depth) < ranks:
            return None
        found[owner] = _DistanceTree(before, depth)
    return found


def _up(tree: _DistanceTree, chunk: int, ways: Ways, *, reduce: bool) -> list[Transfer]:
    """Towards the owner: who is far away sends first. The tree's pairs are those of `ways` reversed."""
    return [
        Transfer(chunk, rank, into, tree.height - tree.depth[rank], reduce=reduce, via=ways[rank, into])
        for rank, into in tree.before.items()
    ]


def _down(tree: _DistanceTree, chunk: int, first_step: int, ways: Ways) -> list[Transfer]:
    """Copies from the owner."""
    return [
        Transfer(chunk, of, rank, first_step + tree.depth[of], via=ways[of, rank])
        for rank, of in tree.before.items()
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
