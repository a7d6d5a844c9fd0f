"""Which ranks are near each other, read from the rates alone: hosts, racks, whatever the fabric has.

The published programs are told what a host is. Here ranks are together at a level if messages among them
need no path as narrow as those between groups; each distinct width between ranks may give a level.
"""

from __future__ import annotations

from typing import TypeAlias

from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import PlanError

Groups: TypeAlias = tuple[tuple[int, ...], ...]
"""Ranks, ascending, in groups by their first rank."""


def levels(network: LinkCosts) -> tuple[Groups, ...]:
    """Nested groupings of the ranks, the finest first, the last one of all ranks together.

    Only groupings into groups of one size, at least two, are levels: the programs that use them treat all
    groups alike. Single ranks are not a level.
    """
    import networkx

    ranks = network.topology.ranks
    pairs = {(a, b): _width(network, a, b) for a in range(ranks) for b in range(a)}
    graph = networkx.empty_graph(ranks)
    found: list[Groups] = []
    for width in sorted(set(pairs.values()), reverse=True):
        graph.add_edges_from(pair for pair, wide in pairs.items() if wide >= width > 0)
        groups = tuple(sorted(tuple(sorted(it)) for it in networkx.connected_components(graph)))
        sizes = {len(group) for group in groups}
        if len(sizes) == 1 and sizes != {1} and groups not in found:
            found.append(groups)
    whole = (tuple(range(ranks)),)
    return tuple(found) if found and found[-1] == whole else (*found, whole)


def _width(network: LinkCosts, a: int, b: int) -> float:
    """The narrowest link between two ranks, the narrower way; 0 where no path leads."""
    try:
        return float(min(network.width(a, b), network.width(b, a)))
    except PlanError:
        return 0.0
