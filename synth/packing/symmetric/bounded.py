"""The cheapest trees of a bounded height for the groups of a problem on few ranks, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from arborcast.synth.kernels.arborescence import LogicalGraph
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.packing.bounded_tree import LARGEST_EXACT, UNUSABLE, cheapest_bounded, effort_of
from arborcast.synth.packing.symmetric.columns import Column
from arborcast.synth.packing.symmetric.growth import Grown
from arborcast.synth.packing.symmetric.problem import Problem

_EFFORT = 20_000_000  # additions that one pricing is worth, a tenth of a second


def is_small(problem: Problem, height: int) -> bool:
    """Whether the best trees of a height can be found by a recursion over sets of ranks."""
    ranks = problem.topology.ranks
    return ranks <= LARGEST_EXACT and effort_of(ranks, len(problem.groups), height) <= _EFFORT


def bounded_trees(problem: Problem, lengths: Ints, height: int) -> Iterator[Column]:
    """For each group a cheapest tree of at most a height.

    Args:
        problem: a small one.
        lengths: of the orbits.
        height: the most edges between a root and a rank.
    """
    orbits = problem.orbits
    of_links = lengths[orbits.of_link] + np.where(orbits.twin >= 0, lengths[orbits.twin], 0)
    for turned in (False, True):
        members = [index for index, group in enumerate(problem.groups) if group.turned == turned]
        if not members:
            continue
        graph, order = _logical(problem, turned)
        distances = graph.distances(of_links[order])
        roots = np.array([problem.groups[index].root for index in members])
        found = cheapest_bounded(distances.entering, roots, height)
        for place, index in enumerate(members):
            if found.cost[place] >= UNUSABLE:
                continue
            routes = distances.routes(found.parents[place])
            links = order[routes.links]
            twins = orbits.twin[links]
            uses = np.bincount(orbits.of_link[links], minlength=orbits.count)
            uses += np.bincount(twins[twins >= 0], minlength=orbits.count)
            levels = _levels(found.parents[place])
            grown = Grown(
                int(roots[place]), found.parents[place], levels, links, routes.starts, tuple(uses.tolist())
            )
            yield Column(index, grown)


@lru_cache(maxsize=8)
def _logical(problem: Problem, turned: bool) -> tuple[LogicalGraph, Ints]:
    """The graph to close over its switches, and the link of the problem behind each of its links."""
    size = problem.topology.size
    graph = LogicalGraph(problem.topology.reversed() if turned else problem.topology)
    side = problem.graph(turned=turned)
    here = side.tails * size + side.heads
    order = np.argsort(here)
    return graph, order[np.searchsorted(here[order], graph.tails * size + graph.heads)]


def _levels(parents: Ints) -> Ints:
    levels = np.where(parents < 0, 0, -1)
    while (levels < 0).any():
        above = levels[np.maximum(parents, 0)]
        levels = np.where((levels < 0) & (above >= 0), above + 1, levels)
    return levels
