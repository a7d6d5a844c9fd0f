"""How far data must travel under link lengths: the number that a dual certificate stands on.

Every distance is a lower limit of what each unit of the buffer takes, summed over links with their lengths:
shortest ways for what is never copied, cheapest trees for what is. `synth.certification.rates` sets it
against what all links offer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cached_property

import numpy as np

from arborcast.synth.certification.spanning import metric_mst_cost
from arborcast.synth.certification.trees import cheapest_cost, cheapest_costs
from arborcast.synth.certification.ways import FAR, Matrix, ways_between
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.kernels.compiled import Ints, kernel
from arborcast.synth.topology import Topology, Vertex

RANKS_BESIDE_RELAYS = 16
"""With relays a dual needs Steiner trees: exponential in the ranks, hence only up to so many."""

MANY = 256
"""Ends from which on a cheapest tree, alike from all roots, is found without all distances."""


class Others(StrEnum):
    """What ranks outside a collective may do for it."""

    COPY = "forward, copy and reduce"
    FORWARD = "forward, like switches"
    ABSENT = "nothing"


@dataclass(frozen=True, eq=False)
class Metric:
    """Link lengths in whole units.

    Attributes:
        topology: whose links they are.
        lengths: one per link, in the order of the topology.
        scale: how many units are 1.
    """

    topology: Topology
    lengths: Ints
    scale: int

    @classmethod
    def of(cls, topology: Topology, lengths: tuple[Fraction, ...]) -> Metric:
        """Lengths as they stand in a certificate.

        Raises:
            InputError: they do not fit the links, are negative, or have too many digits for int64.
        """
        if len(lengths) != len(topology.links):
            raise InputError(f"dual: needs one length per link ({len(topology.links)}), got {len(lengths)}")
        for link, length in zip(topology.links, lengths, strict=True):
            if length < 0:
                raise InputError(
                    f"dual: length of link {link.src}->{link.dst} must not be negative, got {length}"
                )
        scale = math.lcm(*(length.denominator for length in lengths))
        whole = [int(length * scale) for length in lengths]
        # No tree costs more than so many ways of all lengths together: it stays below what stands for none.
        if sum(whole) * max(2, topology.ranks) >= FAR:
            raise InputError("dual: lengths have too many digits for exact int64 arithmetic")
        return cls(topology, np.array(whole, dtype=np.int64), scale)

    def distance(self, collective: Collective, others: Others = Others.COPY) -> Fraction:
        """How far each unit of the buffer must travel at least; 0 where it need not.

        Args:
            collective: what travels.
            others: what the ranks outside it may do.

        Raises:
            InputError: some rank cannot be reached; with ranks that copy, more than `RANKS_BESIDE_RELAYS`.
        """
        if collective.kind is Kind.CUSTOM:
            units = self._of_demands(collective)
        elif collective.kind in {Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL}:
            units = self._of_routes(collective, others)
        else:
            units = self._of_trees(collective, others)
        return units / self.scale

    def undirected_tree(self, ends: tuple[int, ...]) -> int:
        """The cost of the cheapest tree that joins ranks where every way may be taken backwards, too."""
        through = range(self.topology.ranks, self.topology.size)
        if len(ends) >= MANY and self._is_symmetric:
            return metric_mst_cost(self.topology, self.lengths.tolist(), ends, through)
        ways = ways_between(self.topology, self.lengths, ends, through)
        return int(cheapest_costs(np.minimum(ways, ways.T))[0])

    @cached_property
    def _is_symmetric(self) -> bool:
        """Whether every link is as long as its reverse."""
        pairs = ((link.src, link.dst) for link in self.topology.links)
        length = dict(zip(pairs, self.lengths.tolist(), strict=True))
        return all(length.get((dst, src)) == far for (src, dst), far in length.items())

    def _present(self, collective: Collective, others: Others) -> list[Vertex]:
        """The vertices that its data may pass."""
        absent = set(collective.relays(self.topology)) if others is Others.ABSENT else set()
        return [vertex for vertex in range(self.topology.size) if vertex not in absent]

    def _of_routes(self, collective: Collective, others: Others) -> Fraction:
        """The mean over the blocks of the shortest way, which may pass any vertex."""
        ends = collective.ranks
        ways = ways_between(self.topology, self.lengths, ends, self._present(collective, others))
        root = [ends.index(collective.root)] if collective.root is not None else []
        if collective.kind is Kind.SCATTER:
            ways = ways[root]
        elif collective.kind is Kind.GATHER:
            ways = ways[:, root]
        if (ways >= FAR).any():
            raise InputError(f"dual for {collective.kind}: some rank cannot be reached, a cut shows that")
        return Fraction(int(ways.astype(object).sum()), len(ends))

    def _of_demands(self, collective: Collective) -> Fraction:
        """The mean over the blocks of how far the farthest target is from the nearest source."""
        ranks = range(self.topology.ranks)
        ways = ways_between(self.topology, self.lengths, ranks, range(self.topology.size))
        total = 0
        for demand in collective.demands:
            nearest = ways[np.ix_(sorted(demand.sources), sorted(demand.targets))].min(axis=0)
            if (nearest >= FAR).any():
                raise InputError("dual for custom: some rank cannot be reached, a cut shows that")
            total += int(nearest.max())
        return Fraction(total, len(collective.demands))

    def _of_trees(self, collective: Collective, others: Others) -> Fraction:
        """The cheapest out-tree, the mean over the roots, or for an allreduce the cheapest pair of trees."""
        ends = collective.ranks
        ranks = range(self.topology.ranks)
        pair = collective.kind is Kind.ALLREDUCE
        steiner = others is Others.COPY and bool(collective.relays(self.topology))
        if steiner:
            ways = ways_between(self.topology, self.lengths, ranks, range(self.topology.size))
        else:  # an edge of a tree passes no rank that takes part: two edges do
            through = [v for v in self._present(collective, others) if v not in collective.members]
            if len(ends) >= MANY and self._is_symmetric:
                alike = metric_mst_cost(self.topology, self.lengths.tolist(), ends, through)
                return Fraction(2 * alike if pair else alike)
            ways = ways_between(self.topology, self.lengths, ends, through)
        if collective.kind in {Kind.REDUCE, Kind.REDUCE_SCATTER}:
            ways = ways.T
        if collective.root is not None:
            if not steiner:
                return Fraction(cheapest_cost(ways, ends.index(collective.root)))
            costs = _steiner_costs(ways, collective)[[collective.root]]
        elif pair:
            out = _steiner_costs(ways, collective) if steiner else cheapest_costs(ways)
            into = _steiner_costs(ways.T, collective) if steiner else cheapest_costs(ways.T)
            reached = np.maximum(out, into) < FAR
            costs = (out + into)[reached] if reached.any() else np.array([FAR])
            costs = costs.min(keepdims=True)
        else:
            costs = _steiner_costs(ways, collective)[list(ends)] if steiner else cheapest_costs(ways)
        if (costs >= FAR).any():
            raise InputError(f"dual for {collective.kind}: some rank cannot be reached, a cut shows that")
        return Fraction(int(costs.astype(object).sum()), len(costs))


def _steiner_costs(ways: Matrix, collective: Collective) -> Ints:
    """The cost of the cheapest out-tree from each rank or relay to all ranks that take part.

    Dreyfus and Wagner 1971 over subsets of those ranks: a tree is a way to a vertex where it forks.
    """
    terminals = collective.ranks
    if len(terminals) > RANKS_BESIDE_RELAYS:
        raise InputError(
            f"dual for {collective.kind}: with relays at most {RANKS_BESIDE_RELAYS} ranks may take part, "
            f"got {len(terminals)}"
        )
    costs: Ints = _fork(np.ascontiguousarray(ways), np.array(terminals))[-1]
    return costs


@kernel
def _fork(ways: Matrix, terminals: Ints) -> Matrix:
    """Row `group` holds the costs from each vertex to the terminals whose bits are set in `group`."""
    size, count = ways.shape[0], terminals.shape[0]
    costs = np.full((1 << count, size), FAR)
    for bit in range(count):
        costs[1 << bit] = ways[:, terminals[bit]]
    forked = np.empty(size, dtype=np.int64)
    for group in range(1, 1 << count):  # its parts have lower numbers and are done before
        lowest = group & -group
        rest = group ^ lowest
        if rest == 0:
            continue
        forked[:] = FAR
        part = rest
        while part:
            part = (part - 1) & rest
            for vertex in range(size):
                forked[vertex] = min(
                    forked[vertex], costs[part | lowest, vertex] + costs[group ^ part ^ lowest, vertex]
                )
        for start in range(size):
            for vertex in range(size):
                costs[group, start] = min(costs[group, start], ways[start, vertex] + forked[vertex])
    return costs
