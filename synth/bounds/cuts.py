"""The tightest cut: how much each unit of supply can send to every sink at once, exactly.

With `supply(v)` units at each source the answer is `min over S of bandwidth out of S / supply(S)`, over the
sets S that some sink is not part of. Broadcast, allgather and gather are this question with other supplies
and sinks; their mirror images are the same question on the reversed topology.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from arborcast.synth.certificate import Cut
from arborcast.synth.kernels.compiled import Flags, Ints, kernel
from arborcast.synth.kernels.max_flow import (
    checked_int64,
    dinic,
    link_arrays,
    members,
    reachable,
    residual_graph,
)
from arborcast.synth.topology import Topology, Vertex


@dataclass(frozen=True, slots=True)
class TightCut:
    """A set that limits the rate.

    Attributes:
        rate: GB/s per unit of supply.
        cut: the set and the bandwidth that leaves it.
    """

    rate: Fraction
    cut: Cut


def cut_out_of(topology: Topology, side: Iterable[Vertex]) -> Cut:
    """The cut that a set of vertices makes, with the bandwidth of the links that leave it."""
    inside = frozenset(side)
    leaving = (link.bandwidth for link in topology.links if link.src in inside and link.dst not in inside)
    return Cut(inside, sum(leaving, Fraction(0)))


def tightest_cut(topology: Topology, supply: Mapping[int, int], sinks: Sequence[int]) -> TightCut:
    """The cut that limits how fast all sinks can receive all supplies.

    Newton's method on violated cuts (Dinkelbach 1967): each violated cut gives the next, smaller rate
    exactly. A flow that satisfies one sink is rerouted to the next one instead of starting over, and one
    pass over the sinks is enough, because what a sink can take at some rate it can take at less.

    Args:
        topology: every vertex may forward (and, for the bound to be attained, copy).
        supply: positive units per source.
        sinks: ranks each of which must receive all supplies; at least one differs from some source.

    Raises:
        TopologyError: bandwidths are too fine for int64 arithmetic.
    """
    total = sum(supply.values())
    src, dst = link_arrays(topology)
    checked_int64(topology.capacities, factor=total)  # every amount below is at most this sum
    capacity = checked_int64(topology.capacities)
    sources = np.array(sorted(supply), dtype=np.int64)
    units = np.array([supply[int(source)] for source in sources], dtype=np.int64)
    graph = residual_graph(
        topology.size + 1,
        np.concatenate([src, np.full(len(sources), topology.size)]),
        np.concatenate([dst, sources]),
    )
    arriving = np.zeros(topology.size, dtype=np.int64)
    np.add.at(arriving, dst, capacity)
    first = min(
        (Fraction(int(arriving[sink]), total - supply.get(sink, 0)), sink)
        for sink in sinks
        if supply.get(sink, 0) < total
    )
    side = np.ones(topology.size + 1, dtype=np.bool_)
    side[[first[1], topology.size]] = False
    _tighten(
        *graph,
        capacity,
        units,
        np.array(list(sinks), dtype=np.int64),
        first[0].numerator,
        first[0].denominator,
        side,
    )
    cut = cut_out_of(topology, members(side[:-1]))
    return TightCut(cut.capacity / sum(supply.get(vertex, 0) for vertex in cut.side), cut)


@kernel
def _reset(capacity: Ints, units: Ints, above: int, below: int, residual: Ints) -> None:
    """Zero flow with links of `below` times their capacity and sources of `above` per unit."""
    links = capacity.shape[0]
    residual[:] = 0
    for i in range(links):
        residual[2 * i] = capacity[i] * below
    for i in range(units.shape[0]):
        residual[2 * (links + i)] = units[i] * above


@kernel
def _ratio(head: Ints, capacity: Ints, units: Ints, side: Flags) -> tuple[int, int]:
    """Capacity out of a set and supply inside it."""
    links = capacity.shape[0]
    leaving, supplied = 0, 0
    for i in range(links):
        if side[head[2 * i + 1]] and not side[head[2 * i]]:
            leaving += capacity[i]
    for i in range(units.shape[0]):
        if side[head[2 * (links + i)]]:
            supplied += units[i]
    return leaving, supplied


@kernel
def _tighten(
    start: Ints,
    arcs: Ints,
    head: Ints,
    capacity: Ints,
    units: Ints,
    sinks: Ints,
    above: int,
    below: int,
    side: Flags,
) -> None:
    """Lower the rate `above / below` until no cut is violated; `side` becomes the last violated cut."""
    source = start.shape[0] - 2
    total = units.sum()
    residual = np.empty(head.shape[0], dtype=np.int64)
    satisfied = -1
    for sink in sinks:
        # A flow into `satisfied` becomes one into `sink` when all of it can be sent on.
        if (
            satisfied >= 0
            and dinic(start, arcs, head, residual, satisfied, sink, total * above) == total * above
        ):
            satisfied = sink
            continue
        while above > 0:
            _reset(capacity, units, above, below, residual)
            if dinic(start, arcs, head, residual, source, sink, total * above) == total * above:
                break
            side[:] = reachable(start, arcs, head, residual, source)
            leaving, supplied = _ratio(head, capacity, units, side)
            shared, rest = leaving, supplied
            while rest:
                shared, rest = rest, shared % rest
            above, below = leaving // shared, supplied // shared
        satisfied = sink


def orbit_lengths(topology: Topology, side: Iterable[Vertex]) -> tuple[Fraction, ...]:
    """How many images of a set each link leaves or enters, one length per link.

    The orbit is cut off at four images per vertex: fewer still give valid lengths, only not the best.

    Args:
        topology: one without symmetries has a single image.
        side: the set.
    """
    mask = np.zeros(topology.size, dtype=np.bool_)
    mask[list(side)] = True
    src, dst = link_arrays(topology)
    lengths = np.zeros(len(src), dtype=np.int64)
    seen, queue = {mask.tobytes()}, [mask]
    for member in queue:  # grows while it is walked
        lengths += member[src] != member[dst]
        for images in topology.symmetries:
            moved = np.zeros_like(member)
            moved[list(images)] = member
            if moved.tobytes() not in seen and len(seen) < 4 * topology.size:
                seen.add(moved.tobytes())
                queue.append(moved)
    return tuple(Fraction(int(length)) for length in lengths)
