"""FAST's idea of an alltoall of blocks of any sizes, for boxes with a port for each rank (arXiv 2505.09764).

What a box has for another is shared evenly among the ports of the box, boxes exchange in the rounds of
Birkhoff's decomposition, and the other box brings each part to its rank. This one shares every block; FAST
only moves what one rank has above the mean. Inside boxes links are so much faster that both wait for the
ports.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from arborcast.synth.alltoallv.block_planner import AlltoallvPlanner
from arborcast.synth.alltoallv.pairwise import Part, as_schedule
from arborcast.synth.alltoallv.rounds import decompose
from arborcast.synth.certificate import Bound
from arborcast.synth.errors import CollectiveError
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Vertex


def balanced(planner: AlltoallvPlanner, sizes: Sequence[Sequence[int]], bound: Bound) -> Schedule:
    """Blocks for other boxes shared evenly among the ports of the box.

    Raises:
        CollectiveError: the fabric is not made of boxes of equally many ranks.
    """
    boxes = boxes_of(planner)
    count = len(boxes[0])
    home = {rank: (box, place) for box, ranks in enumerate(boxes) for place, rank in enumerate(ranks)}
    between = np.zeros((len(boxes), len(boxes)), dtype=np.int64)
    for source, row in enumerate(sizes):
        for target, size in enumerate(row):
            between[home[source][0], home[target][0]] += size
    np.fill_diagonal(between, 0)
    rounds: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for turn, src, dst, amount in zip(*(column.tolist() for column in decompose(between)), strict=True):
        rounds[src, dst].append((turn, amount))
    parts: list[Part] = []
    for source, row in enumerate(sizes):
        for target, size in enumerate(row):
            if source == target or not size:
                continue
            if home[source][0] == home[target][0]:
                parts.append((planner.way(source, target), size * count, 0))
                continue
            pair = home[source][0], home[target][0]
            turn = _take(rounds[pair], size)
            for port, other in zip(boxes[pair[0]], boxes[pair[1]], strict=True):
                way = _joined(planner, (source, port, other, target))
                parts.append((way, size, turn + (source == port)))
    return as_schedule(planner, sizes, bound, "balanced", parts, count)


def boxes_of(planner: AlltoallvPlanner) -> list[list[int]]:
    """The ranks of each box: those that the fastest links join.

    Raises:
        CollectiveError: there are none, or they are not of one size.
    """
    topology = planner.topology
    fastest = max(topology.capacities)
    beside: dict[Vertex, set[Vertex]] = defaultdict(set)
    for link, capacity in zip(topology.links, topology.capacities, strict=True):
        if capacity == fastest:
            beside[link.src].add(link.dst)
            beside[link.dst].add(link.src)
    boxes: list[list[int]] = []
    known: set[Vertex] = set()
    for rank in range(topology.ranks):
        if rank not in known:
            found, queue = {rank}, [rank]
            for vertex in queue:
                queue.extend(beside[vertex] - found)
                found |= beside[vertex]
            known |= found
            boxes.append(sorted(vertex for vertex in found if vertex < topology.ranks))
    if len(boxes) < 2 or len({len(box) for box in boxes}) > 1 or len(boxes[0]) < 2:
        raise CollectiveError(f"{topology.name}: is not made of several boxes of equally many ranks")
    return boxes


def _take(rounds: list[tuple[int, int]], size: int) -> int:
    """The round in which a block of a box begins to leave; what its rounds have left is less by it."""
    first = rounds[0][0]
    while size:
        turn, left = rounds.pop(0)
        if left > size:
            rounds.insert(0, (turn, left - size))
        size -= min(left, size)
    return first


def _joined(planner: AlltoallvPlanner, stops: Sequence[int]) -> tuple[Vertex, ...]:
    way: tuple[Vertex, ...] = (stops[0],)
    for src, dst in itertools.pairwise(stops):
        if src != dst:
            way += planner.way(src, dst)[1:]
    return way
