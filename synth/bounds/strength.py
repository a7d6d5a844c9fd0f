"""The strength of a graph: the partition of the ranks that limits an allreduce (Nash-Williams, Tutte).

To join the blocks of a partition P one tree needs |P| - 1 links between them, so trees of total weight w
need w (|P| - 1) GB/s there; the least ratio over all partitions is also reached. No schedule is faster,
with trees or without: collecting the sum takes |P| - 1 transfers between blocks and spreading it as many.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import numpy as np

from arborcast.synth.certificate import Partition
from arborcast.synth.kernels.compiled import Flags, Ints, kernel
from arborcast.synth.kernels.max_flow import checked_int64, dinic, link_arrays, reachable, residual_graph
from arborcast.synth.topology import Topology, Vertex


def partition_of(topology: Topology, blocks: Iterable[Iterable[Vertex]]) -> Partition:
    """The partition with its capacity: half the bandwidth of the links between different blocks."""
    sets = tuple(sorted((frozenset(block) for block in blocks), key=min))
    block_of = {vertex: number for number, block in enumerate(sets) for vertex in block}
    between = (link.bandwidth for link in topology.links if block_of[link.src] != block_of[link.dst])
    return Partition(sets, sum(between, Fraction(0)) / 2)


def strength(topology: Topology) -> Partition:
    """The partition whose capacity / (blocks - 1) is least, for a topology of ranks and symmetric links.

    Newton on violated partitions: for a rate, the partition that violates it most comes out of one
    maximum flow per rank (Dilworth truncation; Cunningham 1985, Barahona 1995).

    Args:
        topology: at least two ranks, no switches, symmetric links.

    Raises:
        TopologyError: bandwidths are too fine for int64 arithmetic.
    """
    assert topology.is_symmetric and not topology.switches, "strength is about undirected graphs of ranks"
    size = topology.ranks
    checked_int64(topology.capacities, factor=4 * size)
    capacity = checked_int64(topology.capacities)
    src, dst = link_arrays(topology)
    vertices = np.arange(size, dtype=np.int64)
    # Vertex `size` is the source and `size + 1` the sink of the flows; each rank has an arc from and to them.
    graph = residual_graph(
        size + 2,
        np.concatenate([src, np.full(size, size), vertices]),
        np.concatenate([dst, vertices, np.full(size, size + 1)]),
    )
    best = partition_of(topology, [[vertex] for vertex in range(size)])
    while best.capacity:
        rate = best.capacity / topology.bandwidth_unit / (len(best.blocks) - 1)
        labels = _most_violated(*graph, src, dst, capacity, rate.numerator, rate.denominator)
        found = partition_of(topology, ([int(v) for v in np.flatnonzero(labels == b)] for b in set(labels)))
        if len(found.blocks) == 1 or found.capacity * (len(best.blocks) - 1) >= best.capacity * (
            len(found.blocks) - 1
        ):
            break
        best = found
    return best


@kernel
def _most_violated(
    start: Ints, arcs: Ints, head: Ints, src: Ints, dst: Ints, capacity: Ints, above: int, below: int
) -> Ints:
    """The block of each rank in the partition that minimises capacity - rate * blocks.

    Ranks enter one by one. `potential` is the greedy vector below f(S) = boundary(S) - 2 rate (everything
    times `below`); each new rank gets the largest value that no set of the ranks so far forbids, and the
    set that forbids more becomes one block.
    """
    size = start.shape[0] - 3
    potential = np.zeros(size, dtype=np.int64)
    labels = np.arange(size)
    for newest in range(size):
        residual = _restricted(src, dst, capacity, below, potential, newest, head.shape[0])
        side = _cheapest_set(start, arcs, head, residual, newest)
        boundary = 0
        for i in range(src.shape[0]):
            if side[src[i]] and not side[dst[i]]:
                boundary += capacity[i] * below
        others = 0
        for vertex in range(newest):
            if side[vertex]:
                others += potential[vertex]
        potential[newest] = boundary - 2 * above - others
        for vertex in range(newest):
            if side[vertex]:
                joined = labels[vertex]
                for other in range(newest):
                    if labels[other] == joined:
                        labels[other] = newest
    return labels


@kernel
def _restricted(
    src: Ints, dst: Ints, capacity: Ints, below: int, potential: Ints, newest: int, arcs: int
) -> Ints:
    """Residual capacities of the flow whose minimum cut is the cheapest set of ranks up to `newest`."""
    size = potential.shape[0]
    links = src.shape[0]
    residual = np.zeros(arcs, dtype=np.int64)
    cost = np.zeros(size, dtype=np.int64)  # of a rank's being in the set
    for vertex in range(newest):
        cost[vertex] = -potential[vertex]
    for i in range(links):
        if src[i] <= newest:
            if dst[i] <= newest:
                residual[2 * i] = capacity[i] * below
            else:
                cost[src[i]] += capacity[i] * below
    for vertex in range(newest + 1):
        if cost[vertex] < 0:
            residual[2 * (links + vertex)] = -cost[vertex]
        else:
            residual[2 * (links + size + vertex)] = cost[vertex]
    return residual


@kernel
def _cheapest_set(start: Ints, arcs: Ints, head: Ints, residual: Ints, newest: int) -> Flags:
    """The smallest cheapest set that holds `newest`, which is made part of the source's side."""
    source = start.shape[0] - 3
    without_limit = 2**62
    residual[head.shape[0] - 4 * source + 2 * newest] = without_limit
    dinic(start, arcs, head, residual, source, source + 1, without_limit)
    return reachable(start, arcs, head, residual, source)
