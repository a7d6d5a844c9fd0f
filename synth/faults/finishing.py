"""Plans how a collective that was broken off is finished on what is left of the fabric.

What has been added up is kept: of each lot either some rank holds what all must have, which is then spread
from all who hold it; or sums that have no contribution in common and make up the whole are gathered at one
rank, and spread from there. Trees grow by cheapest ways, where a way costs more the longer its links are
busy, so that many parts share the links; what a greedy choice loses is bounded by nothing, and reported.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from arborcast.synth.errors import InfeasibleError
from arborcast.synth.faults.faulty import without
from arborcast.synth.schedule import Transfer
from arborcast.synth.topology import Hop, Topology, Vertex
from arborcast.synth.unfinished import Finish, Lot, Mask, Part, Unfinished

PARTS = 64
"""Into about so many parts all that is missing is cut: the more, the better links are shared."""

LEAST_BYTES = 32 << 10
"""Of a part: less would cost more for its messages than it saves."""

MOST_WAYS = 4
"""Between two ranks through different switches."""

_CONVEX = 4  # the price of a link grows with this power of how long it is busy
_TRIES = 10_000  # sets that a search for disjoint sums may look at

Way: TypeAlias = tuple[Vertex, ...]
"""The vertices from one rank to another, both ends included, with only switches between."""


def plan_finish(
    state: Unfinished,
    topology: Topology,
    *,
    closed: Collection[Hop] = (),
    item_bytes: int = 4,
    parts: int = PARTS,
) -> Finish:
    """How what is missing gets where it must be; the same on every machine for the same state.

    Args:
        state: what lies where.
        topology: what is left; its ranks are those of the state. Its switches only forward here.
        closed: pairs of ranks that cannot reach each other without a third, in either direction.
        item_bytes: of an element.
        parts: about how many there shall be.

    Raises:
        InfeasibleError: the sums that are left do not make up the whole without counting one twice, or ranks
            cannot be reached.
    """
    shut = frozenset(closed) | {(dst, src) for src, dst in closed}
    roads = _Roads(topology, shut)
    missing = [(lot, *_needs(state, lot)) for lot in state.lots]
    total = sum(lot.length for lot, targets, needed in missing if not _have_all(lot, targets, needed))
    grain = max(-(-total // max(1, parts)), -(-LEAST_BYTES // item_bytes), 1)
    made: list[Part] = []
    transfers: list[Transfer] = []
    for batch in _batches(missing, grain):
        lot, (targets, needed) = batch.lot, batch.needs
        used, moves = _moves(lot.held, targets, needed, batch.elements, roads)
        for number, start, stop in batch.spans:
            transfers += [
                Transfer(len(made), way[0], way[-1], step, reduce, tuple(way[1:-1]))
                for way, step, reduce in moves
            ]
            made.append(Part(number, start, stop, used))
    transfers.sort(key=lambda it: (it.step, it.chunk, it.src, it.dst))
    return Finish(state, topology, shut, tuple(made), tuple(transfers))


def without_pairs(topology: Topology, pairs: Iterable[Hop]) -> Topology:
    """A topology of the same name without the links between some pairs of its ranks, where there are any."""
    joined = [pair for pair in sorted(pairs) if {pair, pair[::-1]} & topology.bandwidth.keys()]
    return replace(without(topology, links=joined).topology, name=topology.name) if joined else topology


def _needs(state: Unfinished, lot: Lot) -> tuple[tuple[int, ...], Mask]:
    """Who must have a lot in the end, and the sum of whose contributions."""
    collective, chunk = state.collective, state.chunks[lot.chunk]
    block = collective.block_of(chunk.owner, chunk.target, chunk.demand)
    after = {rank: collective.after(rank, block) for rank in collective.ranks}
    targets = tuple(rank for rank, who in after.items() if who is not None)
    whose = next(who for who in after.values() if who is not None)
    return targets, sum(1 << rank for rank in whose)


def _have_all(lot: Lot, targets: Iterable[int], needed: Mask) -> bool:
    return all(needed in lot.held.get(rank, ()) for rank in targets)


# ------------------------------------------------------------------------------------------ parts


class _Batch(NamedTuple):
    """Parts that lie alike and so travel alike: lots with start and stop."""

    lot: Lot
    needs: tuple[tuple[int, ...], Mask]
    elements: int
    spans: Sequence[tuple[int, int, int]]


def _batches(missing: Sequence[tuple[Lot, tuple[int, ...], Mask]], grain: int) -> list[_Batch]:
    """Spans of lots that lie alike, put together until they have `grain` elements, cut where they have more.

    The largest come first, since those that follow find their way around them.
    """
    alike: dict[object, list[tuple[int, int, int]]] = {}
    for number, (lot, targets, needed) in enumerate(missing):
        kept = _have_all(lot, targets, needed)
        pieces = 1 if kept else -(-lot.length // grain)
        cuts = [lot.start + lot.length * piece // pieces for piece in range(pieces + 1)]
        key = (targets, needed, tuple(sorted(lot.held.items())))
        alike.setdefault(key, []).extend((number, start, stop) for start, stop in pairwise(cuts))
    found = []
    for spans in alike.values():
        lot, targets, needed = missing[spans[0][0]]
        together: list[tuple[int, int, int]] = []
        for at, span in enumerate(spans):
            together.append(span)
            elements = sum(stop - start for _, start, stop in together)
            if elements >= grain or at == len(spans) - 1:
                found.append(_Batch(lot, (targets, needed), elements, tuple(together)))
                together = []
    found.sort(key=lambda batch: (-batch.elements, batch.spans[0]))
    return found


# ------------------------------------------------------------------------------------------- moves


class _Move(NamedTuple):
    way: Way
    step: int
    reduce: bool


def _moves(
    held: Mapping[int, tuple[Mask, ...]],
    targets: Sequence[int],
    needed: Mask,
    elements: int,
    roads: _Roads,
) -> tuple[dict[int, tuple[Mask, ...]], list[_Move]]:
    """What ranks begin with, and what moves where."""
    full = [rank for rank in sorted(held) if needed in held[rank]]
    wanting = [rank for rank in targets if rank not in full]
    if full:
        used: dict[int, tuple[Mask, ...]] = dict.fromkeys(full, (needed,))
        return used, _spread(full, wanting, elements, 0, roads) if wanting else []
    used = disjoint_cover(held, needed)
    root = wanting[0] if len(wanting) == 1 else roads.idlest(used)
    gathered = _gather(root, [rank for rank in used if rank != root], elements, roads)
    steps = max((move.step + 1 for move in gathered), default=0)
    others = [rank for rank in wanting if rank != root]
    return used, gathered + (_spread([root], others, elements, steps, roads) if others else [])


def _spread(
    sources: Sequence[int], targets: Sequence[int], elements: int, first: int, roads: _Roads
) -> list[_Move]:
    """Copies from whoever holds it; who has got it passes it on."""
    reached = dict.fromkeys(sources, first)
    moves = []
    left = set(targets)
    while left:
        for way in roads.cheapest(reached, left, elements, backwards=False):
            src, dst = way[0], way[-1]
            moves.append(_Move(way, reached[src], reduce=False))
            reached[dst] = reached[src] + 1
            left.discard(dst)
    return moves


def _gather(root: int, holders: Sequence[int], elements: int, roads: _Roads) -> list[_Move]:
    """Sums to the root; who passes one on adds its own first."""
    depth = {root: 0}
    towards: list[Way] = []
    left = set(holders)
    while left:
        for way in roads.cheapest(depth, left, elements, backwards=True):
            src, dst = way[0], way[-1]
            depth[src] = depth[dst] + 1
            towards.append(way)
            left.discard(src)
    height = max(depth.values())
    return [_Move(way, height - depth[way[0]], reduce=True) for way in towards]


def disjoint_cover(held: Mapping[int, tuple[Mask, ...]], needed: Mask) -> dict[int, tuple[Mask, ...]]:
    """Sums that lie somewhere, have nothing in common and make up what is needed: few large ones.

    Raises:
        InfeasibleError: there are none, or the search takes too long.
    """
    where: dict[Mask, int] = {}
    for rank in sorted(held):
        for mask in held[rank]:
            where.setdefault(mask, rank)
    order = sorted(where, key=lambda mask: (-mask.bit_count(), mask))
    tries = 0

    def cover(left: Mask) -> list[Mask] | None:
        nonlocal tries
        if not left:
            return []
        lowest = left & -left
        for mask in order:
            tries += 1
            if mask & lowest and not mask & ~left and tries < _TRIES:
                rest = cover(left & ~mask)
                if rest is not None:
                    return [mask, *rest]
        return None

    chosen = cover(needed)
    if chosen is None:
        lying = ", ".join(f"{mask:b}" for mask in order) or "none"
        raise InfeasibleError(
            f"sums that make up {needed:b} must lie somewhere, each once; there are {lying}"
        )
    found: dict[int, tuple[Mask, ...]] = {}
    for mask in chosen:
        rank = where[mask]
        found[rank] = (*found.get(rank, ()), mask)
    return dict(sorted(found.items()))


# ------------------------------------------------------------------------------------------- roads


@dataclass
class _Load:
    bandwidth: float
    elements: int = 0


class _Roads:
    """The ways between ranks, and how much there is on each link so far."""

    def __init__(self, topology: Topology, closed: Collection[Hop]) -> None:
        self._ranks = topology.ranks
        self._loads = {hop: _Load(float(rate)) for hop, rate in topology.bandwidth.items()}
        fastest = max((load.bandwidth for load in self._loads.values()), default=1.0)
        for load in self._loads.values():
            load.bandwidth /= fastest
        self._out: list[list[tuple[int, list[Way]]]] = [[] for _ in range(topology.ranks)]
        self._in: list[list[tuple[int, list[Way]]]] = [[] for _ in range(topology.ranks)]
        for (src, dst), ways in sorted(_ways(topology).items()):
            if (src, dst) not in closed:
                self._out[src].append((dst, ways))
                self._in[dst].append((src, ways))

    def idlest(self, used: Mapping[int, tuple[Mask, ...]]) -> int:
        """Of the ranks with the largest sum the one whose links have least to do."""
        largest = max(max(mask.bit_count() for mask in masks) for masks in used.values())
        able = [rank for rank, masks in used.items() if max(it.bit_count() for it in masks) == largest]

        def busy(rank: int) -> float:
            return max(
                (
                    self._loads[hop].elements / self._loads[hop].bandwidth
                    for side in (self._out[rank], self._in[rank])
                    for _, ways in side
                    for hop in pairwise(ways[0])
                ),
                default=0.0,
            )

        return min(able, key=lambda rank: (busy(rank), rank))

    def cheapest(
        self, tree: Collection[int], left: Collection[int], elements: int, *, backwards: bool
    ) -> list[Way]:
        """The ways, one behind the other, that join a tree with the nearest of the ranks that are left.

        Args:
            tree: ranks.
            left: ranks, none of them in the tree.
            elements: that are to pass, which the links on the way are charged with.
            backwards: whether data moves towards the tree; the ways lead from the tree outwards all the same,
                but each has its vertices in the order in which data passes them.

        Raises:
            InfeasibleError: none can be reached.
        """
        queue = [(0.0, rank, -1) for rank in tree]
        heapq.heapify(queue)
        by: dict[int, Way] = {}
        done: set[int] = set()
        best = dict.fromkeys(tree, 0.0)
        while queue:
            price, rank, _ = heapq.heappop(queue)
            if rank in done:
                continue
            done.add(rank)
            if rank in left:
                return self._charged(rank, by, elements, backwards)
            for other, ways in self._in[rank] if backwards else self._out[rank]:
                if other in done:
                    continue
                cost, way = min((self._price(way, elements), way) for way in ways)
                if price + cost < best.get(other, float("inf")):
                    best[other] = price + cost
                    by[other] = way
                    heapq.heappush(queue, (price + cost, other, rank))
        raise InfeasibleError(f"ranks {sorted(left)} cannot be reached without the links that are gone")

    def _price(self, way: Way, elements: int) -> float:
        total = 0.0
        for hop in pairwise(way):
            load = self._loads[hop]
            before, after = (it / load.bandwidth for it in (load.elements, load.elements + elements))
            total += after**_CONVEX - before**_CONVEX
        return total

    def _charged(self, rank: int, by: Mapping[int, Way], elements: int, backwards: bool) -> list[Way]:
        ways: list[Way] = []
        while rank in by:
            ways.append(by[rank])
            rank = by[rank][-1] if backwards else by[rank][0]
        for way in ways:
            for hop in pairwise(way):
                self._loads[hop].elements += elements
        return ways[::-1]


def _ways(topology: Topology) -> dict[Hop, list[Way]]:
    """Between ranks that reach each other without a third: all links, else shortest ways through switches."""
    after: dict[Vertex, list[Vertex]] = {}
    for link in topology.links:
        after.setdefault(link.src, []).append(link.dst)
    found: dict[Hop, list[Way]] = {}
    for src in range(topology.ranks):
        level: list[Way] = [(src,)]
        seen = {src}
        while level:
            reached: dict[Vertex, list[Way]] = {}
            for way in level:
                for vertex in after.get(way[-1], ()):
                    if vertex not in seen:
                        reached.setdefault(vertex, []).append((*way, vertex))
            seen |= reached.keys()
            level = []
            for vertex, ways in sorted(reached.items()):
                kept = sorted(set(ways))[:MOST_WAYS]
                if topology.is_switch(vertex):
                    level += kept
                else:
                    found[src, vertex] = kept
    return found
