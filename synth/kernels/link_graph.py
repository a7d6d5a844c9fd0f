"""The links of a topology as arrays: what all kernels on graphs start from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from arborcast.synth.kernels.compiled import Flags, Ints, kernel
from arborcast.synth.kernels.max_flow import by_vertex, link_arrays
from arborcast.synth.topology import Topology


@dataclass(frozen=True, eq=False)
class LinkGraph:
    """Tails and heads of the links in the order of `topology.links`, each link as it is or turned round."""

    topology: Topology
    turned: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks; vertices from there on are switches."""
        return self.topology.ranks

    @property
    def size(self) -> int:
        """Number of vertices."""
        return self.topology.size

    @cached_property
    def _ends(self) -> tuple[Ints, Ints]:
        src, dst = link_arrays(self.topology)
        return (dst, src) if self.turned else (src, dst)

    @property
    def tails(self) -> Ints:
        """Where each link starts."""
        return self._ends[0]

    @property
    def heads(self) -> Ints:
        """Where it ends."""
        return self._ends[1]

    @cached_property
    def leaving(self) -> tuple[Ints, Ints]:
        """Links by tail: those of vertex v are `order[start[v]:start[v + 1]]`."""
        return by_vertex(self.tails, self.size)

    @cached_property
    def arriving(self) -> tuple[Ints, Ints]:
        """Links by head, likewise."""
        return by_vertex(self.heads, self.size)

    @cached_property
    def turned_round(self) -> LinkGraph:
        """The same links turned round."""
        return LinkGraph(self.topology, not self.turned)

    @cached_property
    def _keys(self) -> Ints:
        """Of each link, ascending: links are sorted by their ends as they are."""
        src, dst = link_arrays(self.topology)
        return src * self.size + dst

    def numbers(self, src: Ints, dst: Ints) -> Ints:
        """The links between pairs of vertices; -1 where there is none, or a vertex is -1."""
        keys = self._keys
        if self.turned:
            src, dst = dst, src
        if not len(keys):
            return np.full(len(src), -1, dtype=np.int64)
        wanted = np.where((src >= 0) & (dst >= 0), src * self.size + dst, -1)
        place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where(keys[place] == wanted, place, -1).astype(np.int64)

    def numbers_as(self, other: LinkGraph) -> bool:
        """Whether both have the same links in the same order."""
        return np.array_equal(self.tails, other.tails) and np.array_equal(self.heads, other.heads)

    @cached_property
    def reverse(self) -> Ints:
        """For each link the one that leads back, -1 for none."""
        return self.numbers(self.heads, self.tails)

    def hops(self, root: int, usable: Flags | None = None) -> Ints:
        """Fewest tree edges, which may pass switches, from a root to each rank; `ranks` where no way leads.

        Args:
            root: where to count from.
            usable: one flag per link; None for all.
        """
        every = np.ones(len(self.tails), dtype=np.bool_) if usable is None else usable
        return _hops(self.ranks, *self.leaving, self.heads, every, root)


@kernel
def _hops(ranks: int, start: Ints, order: Ints, heads: Ints, usable: Flags, root: int) -> Ints:
    size = start.shape[0] - 1
    hops = np.full(size, ranks)
    hops[root] = 0
    wave = np.array([root])
    level = 0
    while wave.shape[0] > 0:
        reached, following, count, passed = np.empty(size, np.int64), np.empty(size, np.int64), 0, 0
        reached[: wave.shape[0]] = wave
        found = wave.shape[0]
        while passed < found:  # switches join the wave that reaches them, ranks the next one
            here = reached[passed]
            passed += 1
            for place in range(start[here], start[here + 1]):
                there = heads[order[place]]
                if not usable[order[place]] or hops[there] < ranks:
                    continue
                if there < ranks:
                    hops[there] = level + 1
                    following[count] = there
                    count += 1
                else:
                    hops[there] = level
                    reached[found] = there
                    found += 1
        wave = following[:count]
        level += 1
    return hops[:ranks].copy()
