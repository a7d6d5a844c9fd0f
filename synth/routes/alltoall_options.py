"""By which ways a block may go in an alltoall of the best rate, told apart by the orbits of links they load.

Under the lengths that prove the limit only shortest ways may be used. Two of them that load the same orbits
equally often are worth the same, so a torus of a thousand ranks leaves a handful of different choices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import numpy as np

from arborcast.synth.bounds.routing_trees import BestRouting, OrbitPartition, RoutedTree
from arborcast.synth.bounds.shortest_paths import FAR, ShortestPaths
from arborcast.synth.collective import Collective
from arborcast.synth.routes.paths import Path, PathShare
from arborcast.synth.topology import Topology, Vertex

Load: TypeAlias = tuple[int, ...]
"""The orbit of every link of a way, sorted; one that is used twice stands there twice."""

MOST_LOADS = 24
"""Different loads that are followed to each vertex; the ways of the optimal flow come on top."""


@dataclass(frozen=True, slots=True)
class BlockPaths:
    """The ways of one block.

    Attributes:
        source: the first rank of its orbit.
        target: another rank.
        paths: one for each load, the fewest links first.
    """

    source: int
    target: int
    paths: dict[Load, Path]


def options_of(
    topology: Topology, collective: Collective, alike: OrbitPartition, best: BestRouting
) -> Iterator[BlockPaths]:
    """The ways of all blocks of the first rank of each orbit, by source and target.

    Args:
        topology: the fabric.
        collective: an alltoall whose ranks can all reach each other.
        alike: its orbits.
        best: the lengths that prove the limit and the flow that reaches it, whose ways are all among the
            answer, so that the limit can be reached by choosing from it.
    """
    ways = ShortestPaths(topology)
    lengths = best.lengths[alike.link_orbits] * (topology.size + 1) + 1
    assert int(best.lengths.max()) * (topology.size + 1) ** 2 < FAR, "exact, or rounded to few digits"
    for source in alike.sources:
        of_source = [tree for tree in best.trees if tree.source == source]
        found = _shortest(ways, alike, lengths, source)
        for target in sorted(collective.members - {source}):
            paths = {load: _path_to(ways, found, target, load) for load in found[target]}
            for tree in of_source:
                path, load = _path_in(ways, alike, tree, target)
                paths.setdefault(load, path)
            by_length = sorted(paths, key=lambda load: (len(load), load))
            yield BlockPaths(source, target, {load: paths[load] for load in by_length})


def shares_of_trees(
    topology: Topology, collective: Collective, alike: OrbitPartition, best: BestRouting
) -> Iterator[PathShare]:
    """The routes of the optimal flow."""
    ways = ShortestPaths(topology)
    for source in alike.sources:
        of_source = [tree for tree in best.trees if tree.source == source]
        for target in sorted(collective.members - {source}):
            shares: dict[Path, Fraction] = defaultdict(Fraction)
            for tree in of_source:
                shares[_path_in(ways, alike, tree, target)[0]] += tree.share
            for path in sorted(shares, key=lambda path: (len(path), path)):
                yield PathShare(path, shares[path])


def _shortest(
    ways: ShortestPaths,
    alike: OrbitPartition,
    lengths: np.ndarray[tuple[int], np.dtype[np.int64]],
    source: int,
) -> list[dict[Load, tuple[int, Load]]]:
    """For each vertex the loads of shortest ways to it, with the last link and the load before it."""
    tree = ways.tree(lengths, source)
    distance = tree.distance.tolist()
    before = tree.distance[ways.tails] + lengths == tree.distance[ways.heads]
    entering: list[list[int]] = [[] for _ in range(ways.topology.size)]
    for link in np.flatnonzero(before & (tree.distance[ways.tails] < FAR)).tolist():
        entering[ways.heads[link]].append(link)
    tails, orbits = ways.tails.tolist(), alike.link_orbits.tolist()
    found: list[dict[Load, tuple[int, Load]]] = [{} for _ in range(ways.topology.size)]
    found[source][()] = (-1, ())
    for vertex in tree.order[1:].tolist():
        assert distance[vertex] < FAR, "only reachable vertices are in the order"
        here = found[vertex]
        for link in entering[vertex]:
            for load in found[tails[link]]:
                if len(here) < MOST_LOADS:
                    here.setdefault(tuple(sorted((*load, orbits[link]))), (link, load))
    return found


def _path_to(
    ways: ShortestPaths, found: list[dict[Load, tuple[int, Load]]], target: Vertex, load: Load
) -> Path:
    path = [target]
    while load:
        link, load = found[path[-1]][load]
        path.append(int(ways.tails[link]))
    return tuple(reversed(path))


def _path_in(
    ways: ShortestPaths, alike: OrbitPartition, tree: RoutedTree, target: Vertex
) -> tuple[Path, Load]:
    path, load = [target], []
    while path[-1] != tree.source:
        link = tree.entering[path[-1]]
        load.append(int(alike.link_orbits[link]))
        path.append(int(ways.tails[link]))
    return tuple(reversed(path)), tuple(sorted(load))
