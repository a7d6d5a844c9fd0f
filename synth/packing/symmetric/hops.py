"""How many tree edges a rank is away from a root, through switches."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from arborcast.synth.kernels.compiled import Ints, kernel
from arborcast.synth.packing.symmetric.contraction import Graph


@lru_cache(maxsize=64)
def hops_from(graph: Graph, root: int) -> Ints:
    """The least number of edges from the root to each rank, each of which may pass switches; -1 for none."""
    found = _hops(graph.ranks, graph.size, *graph.leaving, graph.heads, root)
    found.flags.writeable = False
    return found


@kernel
def _hops(ranks: int, size: int, start: Ints, order: Ints, heads: Ints, root: int) -> Ints:
    hops = np.full(size, -1)
    hops[root] = 0
    wave, level = np.array([root]), 0
    while len(wave) > 0:
        reached, following = np.empty(size, np.int64), np.empty(size, np.int64)
        reached[: len(wave)] = wave
        found, count, passed = len(wave), 0, 0
        while passed < found:
            here = reached[passed]
            passed += 1
            for place in range(start[here], start[here + 1]):
                there = heads[order[place]]
                if hops[there] >= 0:
                    continue
                if there < ranks:
                    hops[there] = level + 1
                    following[count] = there
                    count += 1
                else:
                    hops[there] = level
                    reached[found] = there
                    found += 1
        wave = following[:count].copy()
        level += 1
    return hops[:ranks].copy()
