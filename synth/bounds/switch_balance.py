"""Switches that cannot send on all they receive: the part of a fabric's bandwidth that passes them.

One direction of a cable that failed leaves its switch with more bandwidth in than out, and then cuts alone
do not say what trees reach. Often the surplus limits nothing: what is left of it after a maximum flow
through the switches reaches the same rate as the cuts of the whole fabric, and no linear program is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from arborcast.synth.bounds.cuts import tightest_cut
from arborcast.synth.kernels.max_flow import checked_int64, dinic, link_arrays, residual_graph
from arborcast.synth.topology import Topology


def balanced_part(topology: Topology) -> Topology:
    """As much of the bandwidth of links at switches as a flow from ranks to ranks can use.

    Every switch then receives what it sends. Links between ranks keep all they have; a link that a flow does
    not need is gone. The flow starts from the smaller of the two directions of each cable, so that what one
    direction lost the other gives up first.

    Raises:
        TopologyError: bandwidths are too fine for int64 arithmetic.
    """
    ranks, size = topology.ranks, topology.size
    src, dst = link_arrays(topology)
    capacity = checked_int64(topology.capacities, factor=4)
    capacity //= 4
    back = np.array(
        [int(topology.bandwidth.get((dst, src), Fraction(0)) / topology.bandwidth_unit)
         for src, dst in zip(src.tolist(), dst.tolist(), strict=True)],
        dtype=np.int64,
    )  # fmt: skip
    between = (src < ranks) & (dst < ranks)
    # Ranks are split: what leaves them starts at `size`, what enters them ends at `size + 1`.
    tails, heads = np.where(src < ranks, size, src), np.where(dst < ranks, size + 1, dst)
    graph = residual_graph(size + 2, tails, heads)
    residual = np.zeros(len(graph[2]), dtype=np.int64)
    for allowed in (np.minimum(capacity, back), capacity):
        used = residual[1::2]
        residual[0::2] = np.where(between, 0, allowed - used)
        dinic(*graph, residual, size, size + 1, int(capacity.sum()) + 1)
    flow = np.where(between, capacity, residual[1::2])
    links = tuple(
        replace(link, bandwidth=int(amount) * topology.bandwidth_unit)
        for link, amount in zip(topology.links, flow.tolist(), strict=True)
        if amount
    )
    return replace(topology, links=links, symmetries=())


def sufficient_part(topology: Topology, supply: Mapping[int, int], sinks: Sequence[int]) -> Topology | None:
    """The balanced part, where its tightest cut allows what that of the whole fabric does; else None."""
    part = balanced_part(topology)
    if (
        len(part.links) < 1
        or tightest_cut(part, supply, sinks).rate < tightest_cut(topology, supply, sinks).rate
    ):
        return None
    return part
