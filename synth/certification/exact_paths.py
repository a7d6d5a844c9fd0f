"""Shortest ways between vertices, where only some vertices may be passed, in exact integers.

Distances are potentials: no link leads further than its length. The search ends when that holds of every
link, so that what it returns is a lower limit of every way whatever it did before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.kernels.compiled import Flags, Ints, kernel
from arborcast.synth.topology import Topology, Vertex

FAR = 1 << 60
"""The distance of what cannot be reached, in int64; what lengths add up to must stay below it."""

Matrix: TypeAlias = NDArray[Any]
"""int64, or Python integers (an array of objects) where sums might not fit."""


def ways_between(
    topology: Topology, lengths: Matrix, ends: Sequence[Vertex], through: Iterable[Vertex], far: int = FAR
) -> Matrix:
    """The length of the shortest way from each of some vertices (row) to each of them (column).

    Args:
        topology: whose links may be used.
        lengths: one per link, whole and not negative.
        ends: where ways start and end.
        through: the vertices that they may pass on the way.
        far: what stands for no way; more than all lengths together.

    The time is that of Bellman 1958 and Ford 1956, on all ends at once: links times ends times the most
    links on a shortest way.
    """
    starts = np.array(ends, dtype=np.int64)
    tails = np.array([link.src for link in topology.links], dtype=np.int64)
    heads = np.array([link.dst for link in topology.links], dtype=np.int64)
    found = np.full((topology.size, len(ends)), far, dtype=lengths.dtype)
    row = np.full(topology.size, -1)
    row[starts] = np.arange(len(ends))
    first = row[tails] >= 0
    found[heads[first], row[tails[first]]] = lengths[first]
    found[starts, row[starts]] = 0
    passable = np.zeros(topology.size, dtype=np.bool_)
    passable[list(through)] = True
    onward = passable[tails]
    settle = _settle_int64 if lengths.dtype == np.int64 else _settle
    settle(tails[onward], heads[onward], lengths[onward], found, np.ones(topology.size, dtype=np.bool_))
    return found[starts].T


def _settle(tails: Ints, heads: Ints, lengths: Matrix, found: Matrix, changed: Flags) -> None:
    """Shorten the ways to heads until no link leads to a shorter one; `changed` starts all true."""
    settled = False
    while not settled:
        settled = True
        before = changed.copy()  # ways to other vertices were looked at when they last changed
        changed[:] = False
        for link in range(len(tails)):
            tail, head, length = tails[link], heads[link], lengths[link]
            if not before[tail] and not changed[tail]:
                continue
            for end in range(found.shape[1]):
                onward = found[tail, end] + length
                if onward < found[head, end]:
                    found[head, end] = onward
                    changed[head] = True
                    settled = False


_settle_int64 = kernel(_settle)
