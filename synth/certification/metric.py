"""How far data must travel under link lengths: the number that a dual certificate stands on.

Every distance is a lower limit of what each unit of the buffer takes, summed over links with their lengths:
shortest ways for what is never copied, cheapest trees for what is. `synth.certification.proven_rates` sets it
against what all links offer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cached_property

import numpy as np

from arborcast.synth.certification.cheapest_spanning import metric_mst_cost
from arborcast.synth.certification.exact_paths import FAR, ways_between
from arborcast.synth.certification.steiner import Steiner
from arborcast.synth.certification.tree_costs import cheapest_cost, cheapest_costs
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.topology import Topology, Vertex

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
        adders: what a sum costs in each switch that has a limited adder.
    """

    topology: Topology
    lengths: Ints
    scale: int
    adders: dict[Vertex, int]

    @classmethod
    def of(
        cls, topology: Topology, lengths: tuple[Fraction, ...], adders: tuple[Fraction, ...] = ()
    ) -> Metric:
        """Lengths, and prices of limited adders if there are any, as they stand in a certificate.

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
        limited = topology.limited_adders
        if adders and len(adders) != len(limited):
            raise InputError(f"dual: needs one price per limited adder ({len(limited)}), got {len(adders)}")
        for vertex, price in zip(limited, adders, strict=False):
            if price < 0:
                raise InputError(
                    f"dual: price of the adder of {topology.label(vertex)} must not be negative, got {price}"
                )
        scale = math.lcm(*(number.denominator for number in (*lengths, *adders)))
        whole = [int(length * scale) for length in lengths]
        paid = {vertex: int(price * scale) for vertex, price in zip(limited, adders, strict=False)}
        # No tree costs more than so many ways of all lengths together: it stays below what stands for none.
        most = sum(whole) * max(2, topology.ranks)
        if topology.holders > topology.ranks:  # ways back and sums come on top
            most = (2 * sum(whole) + sum(paid.values())) * (topology.ranks + 1)
        if most >= FAR:
            raise InputError("dual: lengths have too many digits for exact int64 arithmetic")
        return cls(topology, np.array(whole, dtype=np.int64), scale, paid)

    def distance(self, collective: Collective, others: Others = Others.COPY) -> Fraction:
        """How far each unit of the buffer must travel at least; 0 where it need not.

        Args:
            collective: what travels.
            others: what the ranks outside it may do; where they do not copy, neither do switches.

        Raises:
            InputError: some rank cannot be reached; more ranks are apart than `steiner.MOST_APART` where
                other vertices may join or fork.
        """
        if collective.kind is Kind.CUSTOM:
            units = self._of_demands(collective)
        elif collective.kind in {Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL}:
            units = self._of_routes(collective, others)
        else:
            units = self._of_trees(collective, others)
        return units / self.scale

    def undirected_tree(self, collective: Collective) -> int | None:
        """The cost of the cheapest tree that joins the ranks where every way may be taken backwards, too.

        None where others than ranks that take part may join and fork what they pass.
        """
        if self._has_others(collective):
            steiner = self._steiner(collective)
            if steiner.relays or steiner.switches:
                return None
            return int(cheapest_costs(np.minimum(steiner.ways, steiner.ways.T))[0])
        ends = collective.ranks
        through = range(self.topology.ranks, self.topology.size)
        if len(ends) >= MANY and self._is_symmetric:
            return metric_mst_cost(self.topology, self.lengths.tolist(), ends, through)
        ways = ways_between(self.topology, self.lengths, ends, through)
        return int(cheapest_costs(np.minimum(ways, ways.T))[0])

    def _has_others(self, collective: Collective) -> bool:
        """Whether the topology has relays or able switches."""
        return self.topology.holders > len(collective.ranks)

    def _steiner(self, collective: Collective) -> Steiner:
        return Steiner(self.topology, self.lengths, self.adders, collective)

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
        if collective.sizes:
            return self._of_sizes(collective, ways)
        if (ways >= FAR).any():
            raise InputError(f"dual for {collective.kind}: some rank cannot be reached, a cut shows that")
        return Fraction(int(ways.astype(object).sum()), len(ends))

    @staticmethod
    def _of_sizes(collective: Collective, ways: Ints) -> Fraction:
        """The same where each block counts by its size."""
        sizes = np.array(collective.sizes, dtype=object)
        if (ways[sizes > 0] >= FAR).any():
            raise InputError(f"dual for {collective.kind}: some rank cannot be reached, a cut shows that")
        return Fraction(int((ways.astype(object) * sizes).sum()) * len(collective.ranks), collective.total)

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
        if others is Others.COPY and self._has_others(collective):
            costs = self._of_steiner_trees(collective)
        else:
            costs = self._of_spanning_trees(collective, others)
        if (costs >= FAR).any():
            raise InputError(f"dual for {collective.kind}: some rank cannot be reached, a cut shows that")
        return Fraction(int(costs.astype(object).sum()), len(costs))

    def _of_steiner_trees(self, collective: Collective) -> Ints:
        """What each root's cheapest tree costs, or the cheapest pair."""
        steiner = self._steiner(collective)
        if collective.kind is Kind.ALLREDUCE:
            return np.atleast_1d(steiner.pairs.min())
        trees = steiner.into if collective.kind in {Kind.REDUCE, Kind.REDUCE_SCATTER} else steiner.out
        roots = collective.ranks if collective.root is None else (collective.root,)
        return trees.any[[steiner.place(rank) for rank in roots]]

    def _of_spanning_trees(self, collective: Collective, others: Others) -> Ints:
        """The same where nobody else joins or forks: an edge of a tree passes no rank that takes part."""
        ends = collective.ranks
        pair = collective.kind is Kind.ALLREDUCE
        through = [v for v in self._present(collective, others) if v not in collective.members]
        if len(ends) >= MANY and self._is_symmetric:
            alike = metric_mst_cost(self.topology, self.lengths.tolist(), ends, through)
            return np.array([2 * alike if pair else alike])
        ways = ways_between(self.topology, self.lengths, ends, through)
        if collective.kind in {Kind.REDUCE, Kind.REDUCE_SCATTER}:
            ways = ways.T
        if collective.root is not None:
            return np.array([cheapest_cost(ways, ends.index(collective.root))])
        if pair:
            return np.atleast_1d((cheapest_costs(ways) + cheapest_costs(ways.T)).min())
        return cheapest_costs(ways)
