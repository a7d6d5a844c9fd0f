"""The trees of an old schedule over a topology with faults: what a repair starts from.

Works on columns of transfers, so that a million of them never become objects. Edges over links or ranks that
are gone are left out of the trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from arborcast.synth.collective import Kind
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.kernels.arborescence import LogicalGraph, Routes
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.packing.warm_start import without_lost_edges
from arborcast.synth.packing.weighted_tree import WeightedTree
from arborcast.synth.schedule import Schedule
from arborcast.synth.transfers import Transfers


@dataclass(frozen=True, eq=False)
class OldTrees:
    """What an old schedule is made of, in its own numbering of vertices.

    Attributes:
        shares: of the buffer, one per chunk.
        owners: of the chunks.
    """

    shares: Sequence[Fraction]
    owners: Ints
    ranks: int
    _spread: Transfers
    _gather: Transfers

    @classmethod
    def of(cls, schedule: Schedule | ImplicitSchedule) -> OldTrees | None:
        """The trees of a schedule; None where its chunks do not move along spanning trees of its ranks."""
        relays = schedule.collective.relays(schedule.topology)
        if schedule.rounds is not None or relays or schedule.uses_switches:
            return None
        whole = schedule.expand()
        ranks, kind, moves = whole.topology.ranks, whole.collective.kind, whole.columns
        spread = _in_order(moves.taken(np.flatnonzero(~moves.reduce)))
        gather = _in_order(moves.taken(np.flatnonzero(moves.reduce)).turned)
        found = cls(
            [chunk.share for chunk in whole.chunks],
            np.array([chunk.owner for chunk in whole.chunks], dtype=np.int64),
            ranks,
            spread,
            gather,
        )
        if kind is Kind.ALLREDUCE:
            sound = found._spans(spread, 1) and found._spans(gather, -1)
        elif kind.reduces:
            sound = not len(spread.chunk) and found._spans(gather, -1)
        else:
            sound = not len(gather.chunk) and found._spans(spread, 1)
        return found if sound else None

    def _spans(self, rows: Transfers, direction: int) -> bool:
        """Whether each chunk's rows are the edges of one tree from its owner, in order of time."""
        count = len(self.shares)
        if len(rows.chunk) != count * (self.ranks - 1):
            return False
        keys = rows.chunk * self.ranks + rows.dst
        expected = np.delete(np.arange(count * self.ranks), np.arange(count) * self.ranks + self.owners)
        if not np.array_equal(keys, expected):
            return False
        # A parent has received before it sends on (and sends the sum after it has added up): no cycles.
        step = np.full(count * self.ranks, -1 if direction > 0 else np.iinfo(np.int64).max, dtype=np.int64)
        step[keys] = rows.step
        return bool((direction * (rows.step - step[rows.chunk * self.ranks + rows.src]) > 0).all())

    @property
    def are_mirrored(self) -> bool:
        """Whether every chunk gathers along exactly the edges on which it spreads."""
        return all(map(np.array_equal, self._spread.paths, self._gather.paths))

    def over(
        self, graph: LogicalGraph, number: Ints, *, gathering: bool = False, free: bool = False
    ) -> tuple[WeightedTree, ...]:
        """The trees along which chunks spread, over the links of another graph.

        Args:
            graph: of the topology with faults; reversed for the trees along which chunks are gathered.
            number: for each old vertex its number there, -1 where it is gone.
            gathering: whether the trees along which chunks are gathered are meant.
            free: whether they may start anywhere.
        """
        rows = self._gather if gathering else self._spread
        starts, path = rows.paths
        path = number[path]
        links = graph.numbers(path[:-1], path[1:])
        # The last vertex of a path and the first of the next one are no hop.
        is_hop = np.ones(len(path), dtype=np.bool_)
        is_hop[starts[1:] - 1] = False
        hops = np.concatenate(([0], np.cumsum(is_hop)))[starts]
        links = np.append(links, -1)[is_hop]
        edges = self.ranks - 1
        known = np.flatnonzero(number[: self.ranks] >= 0)
        new_ranks = graph.topology.ranks
        found = []
        for chunk, (share, owner) in enumerate(zip(self.shares, self.owners.tolist(), strict=True)):
            first = chunk * edges
            above = np.full(self.ranks, -1, dtype=np.int64)
            counts = np.zeros(self.ranks, dtype=np.int64)
            children = np.delete(np.arange(self.ranks), owner)
            above[children] = number[rows.src[first : first + edges]]
            counts[children] = np.diff(hops[first : first + edges + 1])
            mine = links[hops[first] : hops[first + edges]]
            if len(known) < self.ranks:
                kept = np.repeat(number[: self.ranks] >= 0, counts)
                mine, counts, above = mine[kept], counts[known], above[known]
            offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
            assert len(above) == new_ranks, "ranks that are left are the ranks of the graph"
            parents, fresh, ways = without_lost_edges(above, offsets, mine)
            root = int(number[owner])
            if root < 0 and not free:
                continue
            found.append(WeightedTree(root, share, Routes(graph, parents, fresh, ways), free=free))
        return tuple(found)


def _in_order(rows: Transfers) -> Transfers:
    """By chunk and receiver."""
    return rows.taken(np.lexsort((rows.dst, rows.chunk)))
