"""What has to leave or enter some ranks, against the links that lead there: limits that cost microseconds.

Candidates are fixed by the fabric: every rank, every set that only slower links join to the rest (the ranks
of a box, of a rack), and where there are few ranks and no switches, all sets. Which is the tightest is a
question of the sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import combinations

import numpy as np

from arborcast.synth.certificate import Cut
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.topology import Topology, Vertex, parts_of

ALL_SETS_UP_TO = 10
"""Ranks of a fabric without switches whose sets are all candidates: 1,022 of 10."""

_NEAR = 1e-9


class Cuts:
    """The candidates of one fabric.

    Args:
        topology: whose links are cut.
    """

    def __init__(self, topology: Topology) -> None:
        self._sides = list(dict.fromkeys(_sides(topology)))
        inside = np.zeros((len(self._sides), topology.size), dtype=np.bool_)
        for place, side in enumerate(self._sides):
            inside[place, list(side)] = True
        tails = [link.src for link in topology.links]
        heads = [link.dst for link in topology.links]
        leaves = inside[:, tails] & ~inside[:, heads]
        self._capacity: Ints = leaves.astype(np.int64) @ np.array(topology.capacities, dtype=np.int64)
        self._inside: Ints = inside[:, : topology.ranks].astype(np.int64)
        self._unit = topology.bandwidth_unit

    def tightest(self, sizes: Ints) -> tuple[Fraction, Cut]:
        """Bytes per unit of bandwidth that pass the tightest cut, and the cut.

        Args:
            sizes: bytes from each rank of the topology to each that it can reach, none to itself.
        """
        leaving = ((self._inside @ sizes) * (1 - self._inside)).sum(axis=1)
        ratio = leaving / np.maximum(self._capacity, 1)
        near = np.flatnonzero(ratio >= ratio.max() * (1 - _NEAR)).tolist()
        exact = {at: Fraction(int(leaving[at]), int(self._capacity[at])) for at in near if leaving[at]}
        best = max(exact, key=exact.__getitem__)
        return exact[best], Cut(self._sides[best], int(self._capacity[best]) * self._unit)


def _sides(topology: Topology) -> Iterator[frozenset[Vertex]]:
    """Sets that something may have to leave; those that something has to enter are the others' sides."""
    everything = frozenset(range(topology.size))
    for side in _candidates(topology):
        ranks = sum(vertex < topology.ranks for vertex in side)
        if 0 < ranks < topology.ranks:
            yield side
            yield everything - side


def _candidates(topology: Topology) -> Iterable[frozenset[Vertex]]:
    ranks = range(topology.ranks)
    yield from (frozenset({rank}) for rank in ranks)
    for rate in sorted(set(topology.capacities)):
        yield from _joined(topology, rate)
    if not topology.switches and len(ranks) <= ALL_SETS_UP_TO:
        for count in range(2, len(ranks) // 2 + 1):
            yield from map(frozenset, combinations(ranks, count))


def _joined(topology: Topology, rate: int) -> Iterator[frozenset[Vertex]]:
    """The parts into which a fabric falls without the links that are slower than this."""
    fast = (
        link for link, capacity in zip(topology.links, topology.capacities, strict=True) if capacity >= rate
    )
    return map(frozenset, parts_of(range(topology.size), ((link.src, link.dst) for link in fast)))
