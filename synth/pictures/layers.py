"""Hierarchies of switches in rows, found from the graph alone: ranks at the bottom, every level above.

A level is the fewest links to a rank, so links join a row to itself or to the next one. Each switch stands
over the middle of what hangs below it, and rows are so far apart that no line passes behind a vertex.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

from arborcast.synth.topology import Vertex

Neighbours = Mapping[Vertex, Collection[Vertex]]
Row = list[Vertex]

CLEARANCE = 0.4
"""Least distance of a line to the middle of a vertex that it does not end at, in spacings."""

_GAP = 1.8
"""Least distance of two rows, in spacings: a name stands below each switch."""

_SLOPE = 0.3
"""Least slope of the flattest line between two rows."""


def levels_of(
    neighbours: Neighbours, ranks: Iterable[Vertex], vertices: Collection[Vertex]
) -> dict[Vertex, int]:
    """The fewest links to a rank, without leaving `vertices`; those that reach none are left out."""
    levels = dict.fromkeys(sorted(ranks), 0)
    frontier: Collection[Vertex] = list(levels)
    within = set(vertices)
    while frontier:
        reached = {other for vertex in frontier for other in neighbours[vertex]} & within - levels.keys()
        level = max(levels.values()) + 1
        frontier = sorted(reached)
        levels |= dict.fromkeys(frontier, level)
    return levels


def layered(
    neighbours: Neighbours, ranks: Collection[Vertex], spacing: float
) -> dict[Vertex, tuple[float, float]] | None:
    """Points in rows; None where switches have one level only, or a line would run along a row.

    Time is linear in the links, but for sorting.
    """
    levels = levels_of(neighbours, ranks, neighbours)
    top = max(levels.values())
    if top < 2 or len(levels) < len(neighbours):
        return None
    rows = _ordered(neighbours, levels, top)
    seats = {vertex: seat for row in rows for seat, vertex in enumerate(row)}
    if any(
        levels[vertex] == levels[other] and abs(seats[vertex] - seats[other]) > 1
        for vertex in neighbours
        for other in neighbours[vertex]
    ):
        return None
    across: dict[Vertex, float] = dict(zip(rows[0], _apart([0.0] * len(rows[0]), spacing), strict=True))
    up = dict.fromkeys(rows[0], 0.0)
    for below, row in pairwise(rows):
        under = {vertex: [across[v] for v in neighbours[vertex] if v in across] for vertex in row}
        middles = [(min(under[vertex]) + max(under[vertex])) / 2 for vertex in row]
        across |= dict(zip(row, _apart(middles, spacing), strict=True))
        reach = max(abs(across[vertex] - x) for vertex in row for x in under[vertex])
        height = up[below[0]] + _gap(reach, min(_nearest(across, below), _nearest(across, row)), spacing)
        up |= dict.fromkeys(row, height)
    return {vertex: (across[vertex], up[vertex]) for vertex in sorted(across)}


def _ordered(neighbours: Neighbours, levels: Mapping[Vertex, int], top: int) -> list[Row]:
    """Rows from the ranks up; from the top down each is in the order of what it hangs from."""
    rows: list[Row] = [[] for _ in range(top + 1)]
    for vertex in sorted(levels):
        rows[levels[vertex]].append(vertex)
    for level in range(top - 1, -1, -1):
        seats = {vertex: seat for seat, vertex in enumerate(rows[level + 1])}
        first = {
            vertex: min((seats[v] for v in neighbours[vertex] if v in seats), default=len(seats))
            for vertex in rows[level]
        }
        rows[level].sort(key=lambda vertex: (first[vertex], vertex))
    return rows


def _apart(wanted: Sequence[float], spacing: float) -> list[float]:
    """Places in this order, the spacing apart or more, as near to the wanted ones as can be.

    Least squares by pooling: whoever is too close to the one before joins its run, which stands around the
    mean of what its members want (isotonic regression, Ayer et al. 1955).
    """
    runs: list[tuple[float, int]] = []  # the sum of what its members want less their offsets, their number
    for index, place in enumerate(wanted):
        total, count = place - index * spacing, 1
        while runs and runs[-1][0] * count >= total * runs[-1][1]:
            before, members = runs.pop()
            total, count = total + before, count + members
        runs.append((total, count))
    starts = [total / count for total, count in runs for _ in range(count)]
    return [start + index * spacing for index, start in enumerate(starts)]


def _nearest(across: Mapping[Vertex, float], row: Row) -> float:
    return min((across[right] - across[left] for left, right in pairwise(row)), default=math.inf)


def _gap(reach: float, nearest: float, spacing: float) -> float:
    """How far apart two rows are, so that a line with this reach clears the neighbours of its ends."""
    clearance = CLEARANCE * spacing
    # The neighbour's distance to the line is nearest * gap / hypot(reach, gap); infinite for a single one.
    steep = 0.0 if math.isinf(nearest) else reach * clearance / math.sqrt(nearest**2 - clearance**2)
    return max(_GAP * spacing, _SLOPE * reach, steep)
