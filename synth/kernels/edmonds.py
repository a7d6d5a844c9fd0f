"""The dense minimum-cost arborescence, as numba kernels (Edmonds 1967; path growing after Gabow et al. 1986).

Rows are heads and columns are tails. Only rows are ever merged: the columns stay the original vertices, so
that a contraction costs O(n) per vertex of its cycle and the whole run O(n^2). `synth.kernels.arborescence`
is the door to it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.kernels.compiled import Flags, Ints, kernel

LengthArray: TypeAlias = NDArray[Any]  # int64 or float64

LOST = -2  # in the answer: this vertex cannot be reached from the root


@kernel
def edmonds(entering: LengthArray, root: int, limit: float) -> Ints:
    """Parents of a cheapest arborescence of `entering[head, tail]`, which is overwritten.

    Costs of `limit` and more forbid an edge. The root's parent is -1. Where there is no arborescence, the
    vertices of one set that no edge enters carry `LOST` and all others -1.
    """
    size = entering.shape[0]
    row_of = np.arange(size)  # the row that stands for a vertex now
    ring = np.arange(size)  # the vertices that share a row, each with the next one
    name = np.arange(size)  # the vertex, or the contraction (numbered from `size` on), that a row stands for
    origin = np.empty((size, size), dtype=np.int32)  # of a contracted row: the vertex that an entry enters
    contracted = np.zeros(size, dtype=np.bool_)
    cycle_of, tail, head = np.full(2 * size, -1), np.empty(2 * size, np.int64), np.empty(2 * size, np.int64)
    cheapest = np.zeros(size, dtype=entering.dtype)
    state = np.zeros(size, dtype=np.int8)  # 0 not seen, 1 on the path, 2 joined to the root
    state[root] = 2
    path = np.empty(size, dtype=np.int64)  # rows, each entered from the next one
    contractions = 0
    for vertex in range(size):
        entering[vertex, vertex] = limit
    for begin in range(size):
        if state[row_of[begin]] == 2:
            continue
        path[0], length = begin, 1
        state[begin] = 1
        while length > 0:
            here = path[length - 1]
            source = _position_of_minimum(entering[here])
            if entering[here, source] >= limit:
                return _lost(ring, here)
            cheapest[here] = entering[here, source]
            tail[name[here]] = source
            head[name[here]] = origin[here, source] if contracted[here] else here
            before = row_of[source]
            if state[before] == 0:
                path[length] = before
                state[before] = 1
                length += 1
            elif state[before] == 1:  # the path met itself: from `before` on it is a cycle
                cycle = size + contractions
                contractions += 1
                first = length - 1
                while path[first] != before:
                    first -= 1
                for position in range(first, length):
                    cycle_of[name[path[position]]] = cycle
                _contract(path[first:length], entering, limit, cheapest, origin, contracted, row_of, ring)
                name[before] = cycle
                length = first + 1
            else:
                for position in range(length):
                    state[path[position]] = 2
                length = 0
    return _expand(size, root, size + contractions, cycle_of, tail, head)


@kernel
def _position_of_minimum(row: LengthArray) -> int:
    least = row[0]
    for position in range(1, row.shape[0]):  # on its own, this loop becomes vector instructions
        least = min(least, row[position])
    position = 0
    while row[position] != least:
        position += 1
    return position


@kernel
def _lost(ring: Ints, row: int) -> Ints:
    parents = np.full(ring.shape[0], -1)
    vertex = row
    while parents[vertex] != LOST:
        parents[vertex] = LOST
        vertex = ring[vertex]
    return parents


@kernel
def _contract(
    cycle: Ints,
    entering: LengthArray,
    limit: float,
    cheapest: LengthArray,
    origin: NDArray[np.int32],
    contracted: Flags,
    row_of: Ints,
    ring: Ints,
) -> None:
    """Merge a cycle's rows into its first, at what entering there costs more than the edge it replaces."""
    size = entering.shape[0]
    into = cycle[0]
    merged, origins = entering[into], origin[into]
    if not contracted[into]:
        contracted[into] = True
        origins[:] = into
    drop = cheapest[into]
    for vertex in range(size):
        if merged[vertex] < limit:
            merged[vertex] -= drop
    for other in cycle[1:]:
        row, drop = entering[other], cheapest[other]
        for vertex in range(size):
            if row[vertex] < limit and row[vertex] - drop < merged[vertex]:
                merged[vertex] = row[vertex] - drop
                origins[vertex] = origin[other, vertex] if contracted[other] else other
        ring[into], ring[other] = ring[other], ring[into]
    vertex = into
    while True:
        row_of[vertex] = into
        merged[vertex] = limit
        vertex = ring[vertex]
        if vertex == into:
            break


@kernel
def _expand(size: int, root: int, names: int, cycle_of: Ints, tail: Ints, head: Ints) -> Ints:
    """Open the contractions from the last one on: each drops the one edge of its cycle that is replaced."""
    parents = np.full(size, -1)
    entered = np.zeros(names, dtype=np.bool_)  # names whose entering edge is already decided from outside
    for outer in range(names - 1, -1, -1):
        if entered[outer] or outer == root:
            continue
        vertex = head[outer]
        parents[vertex] = tail[outer]
        inner = vertex
        while inner != outer:
            entered[inner] = True
            inner = cycle_of[inner]
    return parents
