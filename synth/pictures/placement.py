"""Where the vertices of a topology go on paper, found from the graph alone.

Grids and tori become grids. Without switches everything else is a circle. Switches over switches become
rows: a level is the fewest links to a rank, so links join a row to itself or to the next one; each switch
stands over the middle of what hangs below it, and rows are so far apart that no line passes behind a vertex.
Of other switches the outermost go to the middle, and what falls apart without them becomes groups around it,
each placed by the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

from arborcast.synth.topology import Topology, Vertex, parts_of

Point = tuple[float, float]
Group = tuple[Vertex, ...]
Neighbours = Mapping[Vertex, Collection[Vertex]]

SPACING = 1.0
"""Least distance of neighbours on a circle; everything else scales with it."""


@dataclass(frozen=True)
class Placement:
    """Points for vertices around the origin.

    Attributes:
        points: where each vertex goes.
        radius: of the circle around the origin that holds them all.
        groups: vertices that belong together, as the innermost groups found.
        is_grid: whether lines of vertices lie on straight lines, so that long links have to bow.
    """

    points: dict[Vertex, Point]
    radius: float
    groups: tuple[Group, ...] = field(default=())
    is_grid: bool = False


def place(topology: Topology) -> Placement:
    """A readable place for every vertex, in time about quadratic in the vertices."""
    if not topology.switches:
        grid = _grid(topology)
        if grid is not None:
            return grid
    neighbours: dict[Vertex, set[Vertex]] = {vertex: set() for vertex in range(topology.size)}
    for link in topology.links:
        neighbours[link.src].add(link.dst)
        neighbours[link.dst].add(link.src)
    rows = layered(neighbours, range(topology.ranks), SPACING)
    if rows is not None:
        points = _centred(rows)
        return Placement(points, max(math.hypot(*point) for point in points.values()) + SPACING / 2)
    return _place(topology, neighbours, frozenset(neighbours), turned=False)


def _place(
    topology: Topology, neighbours: Neighbours, vertices: Collection[Vertex], *, turned: bool
) -> Placement:
    """Place some vertices; `turned` by half a step, so that lines to the outside pass between vertices."""
    switches = [vertex for vertex in sorted(vertices) if topology.is_switch(vertex)]
    if not switches:
        return _circle(sorted(vertices), turned=turned)
    middle = _outermost(topology, neighbours, vertices, switches)
    pairs = ((vertex, other) for vertex in vertices for other in neighbours[vertex])
    parts = [tuple(sorted(part)) for part in parts_of(set(vertices) - set(middle), pairs)]
    if all(len(part) == 1 for part in parts):
        return _around(neighbours, middle, [part[0] for part in parts], turned=turned)
    placements = [_place(topology, neighbours, part, turned=True) for part in parts]
    return _ring_of(middle, parts, placements)


def _outermost(
    topology: Topology,
    neighbours: Neighbours,
    vertices: Collection[Vertex],
    switches: Sequence[Vertex],
) -> Group:
    """The switches farthest from the ranks; among those the slowest, then the ones with the most ranks."""
    ranks = {vertex for vertex in vertices if not topology.is_switch(vertex)}
    distance = levels_of(neighbours, ranks, vertices)
    fastest = dict.fromkeys(switches, Fraction(0))
    for link in topology.links:
        for vertex in {link.src, link.dst} & fastest.keys():
            fastest[vertex] = max(fastest[vertex], link.bandwidth)
    order = {
        switch: (distance.get(switch, 0), -fastest[switch], len(ranks.intersection(neighbours[switch])))
        for switch in switches
    }
    largest = max(order.values())
    return tuple(switch for switch in switches if order[switch] == largest)


def _circle(vertices: Sequence[Vertex], *, turned: bool) -> Placement:
    radius = _radius(len(vertices), SPACING)
    return Placement(_on_circle(vertices, radius, turned / 2), radius + SPACING / 2)


def _around(
    neighbours: Neighbours, middle: Sequence[Vertex], ranks: Sequence[Vertex], *, turned: bool
) -> Placement:
    """Switches on an inner circle, ranks on an outer one in the order of their first switch."""
    first = {
        rank: min((middle.index(v) for v in neighbours[rank] if v in middle), default=0) for rank in ranks
    }
    ordered = sorted(ranks, key=lambda rank: (first[rank], rank))
    inner = _radius(len(middle), 1.2 * SPACING)
    outer = max(_radius(len(ranks), SPACING), inner + SPACING)
    # Where the ranks are shared out evenly, each switch faces the middle of its own.
    facing = 0.0 if len(set(first.values())) < len(middle) else (1 - len(middle) / len(ranks)) / 2
    points = _on_circle(middle, inner, facing) | _on_circle(ordered, outer, turned / 2)
    return Placement(points, outer + SPACING / 2)


def _ring_of(middle: Group, parts: Sequence[Group], placements: Sequence[Placement]) -> Placement:
    """Placements side by side on a circle around the switches that join them."""
    largest = max(placement.radius for placement in placements)
    inner = _radius(len(middle), 1.2 * SPACING)
    ring = max(_radius(len(parts), 2.1 * largest), largest + inner + SPACING)
    # Two boxes lie left and right of what joins them, rather than above and below.
    centres = _on_circle(range(len(parts)), ring, -0.5 if len(parts) == 2 else 0.0)
    points = _on_circle(middle, inner, 0.0)
    groups: list[Group] = []
    for index, (part, placement) in enumerate(zip(parts, placements, strict=True)):
        x, y = centres[index]
        points |= {vertex: (x + dx, y + dy) for vertex, (dx, dy) in placement.points.items()}
        groups += placement.groups or ((part,) if len(part) > 1 else ())
    return Placement(points, ring + largest, tuple(groups))


def _grid(topology: Topology) -> Placement | None:
    """Rows and columns where every link joins neighbours of a row or a column, wrapped round or not."""
    count = topology.ranks
    for rows in range(math.isqrt(count), 1, -1):
        columns = count // rows
        if count % rows == 0 and all(
            _are_adjacent(link.src, link.dst, rows, columns) for link in topology.links
        ):
            points = {
                rank: (1.6 * SPACING * (rank % columns), -1.6 * SPACING * (rank // columns))
                for rank in range(count)
            }
            centred = _centred(points)
            return Placement(
                centred, max(math.hypot(*point) for point in centred.values()) + SPACING, is_grid=True
            )
    return None


def _are_adjacent(first: Vertex, second: Vertex, rows: int, columns: int) -> bool:
    down = abs(first // columns - second // columns)
    across = abs(first % columns - second % columns)
    return (across == 0 and down in {1, rows - 1}) or (down == 0 and across in {1, columns - 1})


def _centred(points: dict[Vertex, Point]) -> dict[Vertex, Point]:
    xs, ys = zip(*points.values(), strict=True)
    x, y = (min(xs) + max(xs)) / 2, (min(ys) + max(ys)) / 2
    return {vertex: (px - x, py - y) for vertex, (px, py) in points.items()}


def _radius(count: int, spacing: float) -> float:
    """Of the circle on which so many points keep the spacing; one point needs none."""
    return 0.0 if count < 2 else max(spacing / (2 * math.sin(math.pi / count)), 0.6 * spacing)


def _on_circle(vertices: Sequence[Vertex], radius: float, turn: float) -> dict[Vertex, Point]:
    """Points clockwise from the top, turned by so many steps."""
    angles = [2 * math.pi * (index + turn) / len(vertices) for index in range(len(vertices))]
    return {
        vertex: (radius * math.sin(angle), radius * math.cos(angle))
        for vertex, angle in zip(vertices, angles, strict=True)
    }


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
