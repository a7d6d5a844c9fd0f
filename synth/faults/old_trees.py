"""The trees of an old schedule over a topology with faults: what a repair starts from.

Works on columns of transfers, so that neither a million objects nor, for an implicit schedule, the schedule
itself is ever written out. Edges over links or ranks that are gone are left out of the trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from arborcast.synth.collective import Kind
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.kernels.arborescence import LogicalGraph, Routes
from arborcast.synth.kernels.compiled import Flags, Ints
from arborcast.synth.packing.warm_start import PartialTree, without_lost_edges
from arborcast.synth.schedule import Schedule


@dataclass(frozen=True, eq=False)
class _Rows:
    """Transfers as columns; those of row i pass the vertices `path[starts[i]:starts[i + 1]]`."""

    chunk: Ints
    step: Ints
    reduce: Flags
    starts: Ints
    path: Ints

    def only(self, rows: Ints) -> _Rows:
        """Some of the rows, in this order."""
        lengths = np.diff(self.starts)[rows]
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        places = np.repeat(self.starts[rows] - starts[:-1], lengths) + np.arange(starts[-1])
        return _Rows(self.chunk[rows], self.step[rows], self.reduce[rows], starts, self.path[places])

    def turned(self) -> _Rows:
        """Every path turned round."""
        lengths = np.diff(self.starts)
        ends = np.repeat(self.starts[:-1] + self.starts[1:] - 1, lengths)
        return _Rows(
            self.chunk, self.step, self.reduce, self.starts, self.path[ends - np.arange(len(self.path))]
        )


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
    size: int
    _spread: _Rows
    _gather: _Rows

    @classmethod
    def of(cls, schedule: Schedule | ImplicitSchedule) -> OldTrees | None:
        """The trees of a schedule; None where its chunks do not move along spanning trees of its ranks."""
        relays = schedule.collective.relays(schedule.topology)
        if schedule.rounds is not None or relays or schedule.uses_switches:
            return None
        if isinstance(schedule, ImplicitSchedule):
            shares, owners, rows = _of_implicit(schedule)
        else:
            shares, owners, rows = _of_explicit(schedule)
        ranks, kind = schedule.topology.ranks, schedule.collective.kind
        spread = _in_order(rows.only(np.flatnonzero(~rows.reduce)))
        gather = _in_order(rows.only(np.flatnonzero(rows.reduce)).turned())
        found = cls(shares, owners, ranks, schedule.topology.size, spread, gather)
        if kind is Kind.ALLREDUCE:
            sound = found._spans(spread, 1) and found._spans(gather, -1)
        elif kind.reduces:
            sound = not len(spread.chunk) and found._spans(gather, -1)
        else:
            sound = not len(gather.chunk) and found._spans(spread, 1)
        return found if sound else None

    def _spans(self, rows: _Rows, direction: int) -> bool:
        """Whether each chunk's rows are the edges of one tree from its owner, in order of time."""
        count = len(self.shares)
        if len(rows.chunk) != count * (self.ranks - 1):
            return False
        parent, child = rows.path[rows.starts[:-1]], rows.path[rows.starts[1:] - 1]
        keys = rows.chunk * self.ranks + child
        expected = np.delete(np.arange(count * self.ranks), np.arange(count) * self.ranks + self.owners)
        if not np.array_equal(keys, expected):
            return False
        # A parent has received before it sends on (and sends the sum after it has added up): no cycles.
        step = np.full(count * self.ranks, -1 if direction > 0 else np.iinfo(np.int64).max, dtype=np.int64)
        step[keys] = rows.step
        return bool((direction * (rows.step - step[rows.chunk * self.ranks + parent]) > 0).all())

    @property
    def are_mirrored(self) -> bool:
        """Whether every chunk gathers along exactly the edges on which it spreads."""
        one, two = self._spread, self._gather
        return np.array_equal(one.starts, two.starts) and np.array_equal(one.path, two.path)

    def outward(self, graph: LogicalGraph, number: Ints, *, free: bool) -> tuple[PartialTree, ...]:
        """The trees along which chunks spread, over the links of another graph.

        Args:
            graph: of the topology with faults.
            number: for each old vertex its number there, -1 where it is gone.
            free: whether they may start anywhere.
        """
        return self._stumps(self._spread, graph, number, free)

    def inward(self, graph: LogicalGraph, number: Ints, *, free: bool) -> tuple[PartialTree, ...]:
        """The trees along which chunks are gathered, over the links of another graph.

        Args:
            graph: of the topology with faults, reversed.
            number: as in `outward`.
            free: whether they may start anywhere.
        """
        return self._stumps(self._gather, graph, number, free)

    def _stumps(self, rows: _Rows, graph: LogicalGraph, number: Ints, free: bool) -> tuple[PartialTree, ...]:
        path = number[rows.path]
        links = graph.numbers(path[:-1], path[1:])
        # The last vertex of a path and the first of the next one are no hop.
        is_hop = np.ones(len(path), dtype=np.bool_)
        is_hop[rows.starts[1:] - 1] = False
        hops = np.concatenate(([0], np.cumsum(is_hop)))[rows.starts]
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
            above[children] = path[rows.starts[first : first + edges]]
            counts[children] = np.diff(hops[first : first + edges + 1])
            mine = links[hops[first] : hops[first + edges]]
            if len(known) < self.ranks:
                kept = np.repeat(number[: self.ranks] >= 0, counts)
                mine, counts, above = mine[kept], counts[known], above[known]
            starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
            assert len(above) == new_ranks, "ranks that are left are the ranks of the graph"
            parents, fresh, ways = without_lost_edges(above, starts, mine)
            root = int(number[owner])
            if root < 0 and not free:
                continue
            found.append(PartialTree(root, share, Routes(graph, parents, fresh, ways), free))
        return tuple(found)


def _in_order(rows: _Rows) -> _Rows:
    """By chunk and last vertex."""
    return rows.only(np.lexsort((rows.path[rows.starts[1:] - 1], rows.chunk)))


def _of_explicit(schedule: Schedule) -> tuple[list[Fraction], Ints, _Rows]:
    owners = np.array([chunk.owner for chunk in schedule.chunks], dtype=np.int64)
    return [chunk.share for chunk in schedule.chunks], owners, _rows_of(schedule)


def _of_implicit(schedule: ImplicitSchedule) -> tuple[list[Fraction], Ints, _Rows]:
    """Every image of every representative, without making it an object."""
    move, order = schedule.translations.apply, schedule.translations.order
    elements = np.arange(order, dtype=np.int64)
    shares = [chunk.share for chunk in schedule.chunks for _ in range(order)]
    owners = np.array([chunk.owner for chunk in schedule.chunks], dtype=np.int64)
    rows = _rows_of(schedule.representative)
    lengths = np.tile(np.diff(rows.starts), order)
    every = _Rows(
        (rows.chunk * order + elements[:, None]).reshape(-1),
        np.tile(rows.step, order),
        np.tile(rows.reduce, order),
        np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        move(elements[:, None], rows.path).reshape(-1),
    )
    return shares, move(elements, owners[:, None]).reshape(-1), every


def _rows_of(schedule: Schedule) -> _Rows:
    moves = schedule.columns
    return _Rows(moves.chunk, moves.step, moves.reduce, *moves.paths)
