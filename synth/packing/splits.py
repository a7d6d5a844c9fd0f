"""How an allreduce shares each link between gathering and spreading, among the splits that are known.

Free roots by the linear program, halves of every link with equal roots or with free ones: all exact, some
with lower trees, some in a moment at a thousand ranks. `synth.packing.tree_solver` packs what comes out.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from arborcast.synth.bounds.capacity_lp import SplitCapacities, split_bandwidth
from arborcast.synth.bounds.root_demands import (
    LARGEST_TWO_WAY,
    is_connected,
    root_demands_of,
    spread_roots,
    symmetric_part,
)
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.topology import Topology

_FREE_ROOTS_UP_TO = 64  # ranks; above, roots stay equal where that reaches the bound


def best_splits(topology: Topology, collective: Collective, limit: Fraction) -> list[SplitCapacities]:
    """The ways to split the links of a fabric that reach the best rate: one, or for an allreduce several.

    Args:
        topology: ranks that all take part, and switches.
        collective: a broadcast, an allgather or an allreduce.
        limit: the proven limit of its rate, GB/s; what reaches it is not compared with more.
    """
    if collective.kind is not Kind.ALLREDUCE:
        return [split_bandwidth(topology, collective)]
    splits = _splits(topology, collective, limit)
    rate = max(split.rate for split in splits)
    return [split for split in splits if split.rate == rate]


def _splits(topology: Topology, collective: Collective, limit: Fraction) -> list[SplitCapacities]:
    """Free roots, and equal roots: a reduce-scatter and an allgather on half of each link.

    Equal roots reach the same rate on regular graphs, often with lower trees.
    """
    equal = _equal_roots(topology, collective)
    if equal and equal.rate == limit and topology.ranks > _FREE_ROOTS_UP_TO:
        return [equal]
    if topology.is_symmetric and topology.ranks > _FREE_ROOTS_UP_TO:
        free = _halves_of_free_roots(topology)
        if free.rate == limit:
            return [free]
        return [_spread(topology, split_bandwidth(topology, collective))]
    if topology.ranks > LARGEST_TWO_WAY:
        part = symmetric_part(topology)
        if is_connected(part):
            return [_halves_of_free_roots(part), *([equal] if equal else [])]
    free = split_bandwidth(topology, collective)
    return [free, equal] if equal else [free]


def _halves_of_free_roots(topology: Topology) -> SplitCapacities:
    """Half of each link for each direction, and the roots that make the most of it."""
    found = root_demands_of(topology)
    demands = {root: demand for root, demand in enumerate(found.demands) if demand}
    return SplitCapacities(found.rate, demands, _halved(topology))


def _spread(topology: Topology, split: SplitCapacities) -> SplitCapacities:
    """The split of one root, with as much for every root."""
    (root,) = split.roots
    out, roots = spread_roots(topology, split.out, root, split.rate)
    return SplitCapacities(split.rate, roots, out)


def _halved(topology: Topology) -> Topology:
    links = tuple(replace(link, bandwidth=link.bandwidth / 2) for link in topology.links)
    return replace(topology, links=links, symmetries=())


def _equal_roots(topology: Topology, collective: Collective) -> SplitCapacities | None:
    """The split in halves; None where a switch could not pass on all it receives."""
    if topology.unbalanced(range(topology.ranks, topology.size)):
        return None
    halves = _halved(topology)
    gathered = replace(collective, kind=Kind.ALLGATHER)
    out = split_bandwidth(halves, gathered)
    if topology.is_symmetric:
        return out
    into = split_bandwidth(halves.reversed(), gathered)
    least = min(out, into, key=lambda split: split.rate)
    return SplitCapacities(least.rate, least.roots, halves, halves)
