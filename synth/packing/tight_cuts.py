"""Which trees may be taken out: every cut must keep enough bandwidth for the demands that stay.

The invariant of `synth.packing.exact`: for each set of vertices that lacks a rank, the links that leave it
still hold at least the demands of the ranks inside. Maximum flows test it; a set that breaks it says how
much must be given back, and goes into the pool of tight cuts, which the next trees pay for leaving.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from arborcast.synth.errors import InfeasibleError
from arborcast.synth.kernels.arborescence import LogicalGraph
from arborcast.synth.kernels.compiled import Flags, Ints, kernel
from arborcast.synth.kernels.max_flow import dinic, members, reachable, residual_graph
from arborcast.synth.packing.weighted_tree import WeightedTree
from arborcast.synth.topology import Vertex


class OverloadedCutError(InfeasibleError):
    """The demands inside a set of vertices exceed what the links out of it carry.

    Attributes:
        side: the vertices.
        capacity: GB/s of the links that leave them.
        demand: GB/s that their ranks must send out.
    """

    def __init__(self, side: frozenset[Vertex], capacity: Fraction, demand: Fraction) -> None:
        super().__init__(
            f"cut {sorted(side)}: its ranks must send {demand} GB/s to ranks outside, "
            f"but its links out carry {capacity} GB/s"
        )
        self.side = side
        self.capacity = capacity
        self.demand = demand


class TightCuts:
    """The pool of cuts that have been found to bind, and the flow network that finds them.

    Attributes:
        crossings: how many pooled cuts each link leaves (a cut counts once for each time it was found).
        size: how many cuts were pooled.
    """

    def __init__(self, graph: LogicalGraph) -> None:
        ranks, size = graph.topology.ranks, graph.topology.size
        self._tails, self._heads = graph.tails, graph.heads
        # Beside the links, a super-source sends each rank its demand.
        sources, targets = np.full(ranks, size, dtype=np.int64), np.arange(ranks, dtype=np.int64)
        self._network = residual_graph(
            size + 1, np.concatenate((graph.tails, sources)), np.concatenate((graph.heads, targets))
        )
        self._sinks = targets.copy()  # those whose cuts broke last come first
        self.crossings = np.zeros(len(graph.tails), dtype=np.int64)
        self.size = 0

    def check(self, remaining: Ints, demand: Ints, unit: Fraction) -> None:
        """See that the invariant holds for integer capacities and demands in multiples of `unit` GB/s.

        Raises:
            OverloadedCutError: it does not; names the cut.
        """
        _, _, broken, side = self._feasible(remaining, demand, (), ends=True)
        if broken >= 0:
            out = side[self._tails] & ~side[self._heads]
            raise OverloadedCutError(
                members(side[:-1]),
                int(remaining[out].sum()) * unit,
                int(demand[side[: len(demand)]].sum()) * unit,
            )

    def trim(self, remaining: Ints, demand: Ints, trees: Sequence[WeightedTree]) -> list[int]:
        """How often each of some trees, in this order, can be taken out without breaking the invariant.

        The first tree that must be taken less often than asked for ends the list (dropped when it is not
        taken at all), and the cut that limits it joins the pool.

        Args:
            remaining: capacity of each link before any of these trees is taken out.
            demand: demand of each rank before.
            trees: of whole weights, how often each is to be taken out; together they fit `remaining` and
                `demand`.
        """
        allowed, kept, broken, side = self._feasible(remaining, demand, trees, ends=True)
        if broken >= 0:
            self.crossings += side[self._tails] & ~side[self._heads]
            self.size += 1
            last = self._sinks[broken]
            self._sinks[1 : broken + 1] = self._sinks[:broken]
            self._sinks[0] = last
        return allowed[:kept]

    def allow(self, remaining: Ints, demand: Ints, trees: Sequence[WeightedTree]) -> list[int]:
        """How often each of many trees can be taken out; unlike in `trim`, one that is limited ends nothing.

        Each cut that breaks is met by those of the trees, from the first on, that overdraw what it has left,
        and joins the pool. Arguments as in `trim`.
        """
        allowed, _, broken, _ = self._feasible(remaining, demand, trees, ends=False)
        self.size += broken + 1
        return allowed

    def _feasible(
        self, remaining: Ints, demand: Ints, trees: Sequence[WeightedTree], *, ends: bool
    ) -> tuple[list[int], int, int, Flags]:
        side = np.zeros(len(self._network[0]) - 1, dtype=np.bool_)
        uses = np.array([tree.uses for tree in trees], dtype=np.int64).reshape(len(trees), len(remaining))
        roots = np.array([tree.root for tree in trees], dtype=np.int64)
        times = np.array([int(tree.weight) for tree in trees], dtype=np.int64)
        kept, broken = _keep_feasible(
            *self._network, self._tails, self._heads, remaining, demand, uses, roots, times,
            self._sinks, side, self.crossings, ends,
        )  # fmt: skip
        return times.tolist(), kept, broken, side


@kernel
def _keep_feasible(
    start: Ints,
    arcs: Ints,
    head: Ints,
    tails: Ints,
    heads: Ints,
    remaining: Ints,
    demand: Ints,
    uses: Ints,
    roots: Ints,
    times: Ints,
    sinks: Ints,
    side: Flags,
    crossings: Ints,
    ends: bool,
) -> tuple[int, int]:
    """Cut down `times` until every sink can receive all demands that stay.

    A tree leaves every cut with its root inside, so that sinks that were met stay met when fewer are taken.
    One sink's flow is rerouted to the next: much less work than a new one. With `ends` the first tree that is
    limited ends the list; else `crossings` counts the links out of each cut that breaks.

    Returns the number of trees kept, and with `ends` the position in `sinks` where a cut broke last (`side`
    is then that cut), else one less than the number of cuts that broke; -1 for none.
    """
    source = start.shape[0] - 2
    kept, position, broken, carrier = roots.shape[0], 0, -1, source
    capacity = np.empty(arcs.shape[0], dtype=np.int64)
    total = _fill(capacity, remaining, demand, uses, roots, times, kept)
    while position < sinks.shape[0] and total > 0:
        sink = sinks[position]
        if dinic(start, arcs, head, capacity, carrier, sink, total) == total:
            carrier = sink
            position += 1
            continue
        # The part of the flow that could not be moved shows the way back to the source, so that what the
        # carrier reaches is the source's side of a minimum cut.
        side[:] = reachable(start, arcs, head, capacity, carrier)
        broken = position if ends else broken + 1
        if not ends:
            for link in range(tails.shape[0]):
                if side[tails[link]] and not side[heads[link]]:
                    crossings[link] += 1
        kept = _cut_down(side, tails, heads, remaining, demand, uses, roots, times, kept, ends)
        if times[:kept].sum() == 0:
            break
        carrier = source
        total = _fill(capacity, remaining, demand, uses, roots, times, kept)
    return kept, broken


@kernel
def _cut_down(
    side: Flags,
    tails: Ints,
    heads: Ints,
    remaining: Ints,
    demand: Ints,
    uses: Ints,
    roots: Ints,
    times: Ints,
    kept: int,
    ends: bool,
) -> int:
    """Cut down the trees that overdraw what those before them leave of a cut; returns how many stay.

    With `ends` only the first of them, and those after it are forgotten.
    """
    slack = 0
    out = np.empty(tails.shape[0], dtype=np.int64)
    leaving = 0
    for link in range(tails.shape[0]):
        if side[tails[link]] and not side[heads[link]]:
            out[leaving] = link
            leaving += 1
            slack += remaining[link]
    for rank in range(demand.shape[0]):
        if side[rank]:
            slack -= demand[rank]
    for tree in range(kept):
        excess = -1 if side[roots[tree]] else 0
        for position in range(leaving):
            excess += uses[tree, out[position]]
        if excess * times[tree] > slack:
            times[tree] = slack // excess
            if ends:
                return tree + 1 if times[tree] > 0 else tree
        slack -= excess * times[tree]
    return 0 if ends else kept  # with `ends` only when the cut is broken before any tree is taken out


@kernel
def _fill(
    capacity: Ints,
    remaining: Ints,
    demand: Ints,
    uses: Ints,
    roots: Ints,
    times: Ints,
    kept: int,
) -> int:
    """Residual capacities of the empty flow once the trees are taken out; returns the demand that stays."""
    links = remaining.shape[0]
    capacity[:] = 0
    for link in range(links):
        capacity[2 * link] = remaining[link]
    for rank in range(demand.shape[0]):
        capacity[2 * (links + rank)] = demand[rank]
    total = int(demand.sum())
    for tree in range(kept):
        for link in range(links):
            capacity[2 * link] -= times[tree] * uses[tree, link]
        capacity[2 * (links + roots[tree])] -= times[tree]
        total -= times[tree]
    return total
