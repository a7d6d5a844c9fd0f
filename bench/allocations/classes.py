"""The allocations of a box that differ: sets of ranks whose fragments are not isomorphic.

Two sets are alike when one's fragment becomes the other's by renumbering, as graphs with bandwidths; they
need not be images of each other under an automorphism of the box. The automorphisms come first all the same,
because they join most sets at no cost; only one set of each orbit is then compared, link by link.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import comb
from typing import Any

from synth.automorphisms import automorphisms_of
from synth.errors import InputError
from synth.refinement import Partition, Refiner, Trace, around
from synth.topology import Permutation, Topology, Vertex

MOST_RANKS = 16
"""Of these there are 65,519 sets of two and more; every further rank doubles them."""

_EFFORT = 10_000_000  # ends of links that one comparison may look at: far more than 32 vertices can need


@dataclass(frozen=True)
class Fragment:
    """One of several allocations that are alike.

    Attributes:
        ranks: of the box, ascending; the first of the alike sets.
        allocations: how many sets of as many ranks are like it, itself included.
        topology: what these ranks have among them, renumbered 0, 1, 2...
    """

    ranks: tuple[int, ...]
    allocations: int
    topology: Topology


def representatives(topology: Topology, sizes: Iterable[int] | None = None) -> tuple[Fragment, ...]:
    """One fragment of each class of alike ones, by size and then by ranks.

    The classes of a size count C(ranks, size) allocations together. Bandwidths tell fragments apart,
    latencies do not: no rate depends on them.

    Args:
        topology: a box of at most `MOST_RANKS` ranks, with or without switches.
        sizes: how many ranks a fragment has; None for all from 2 on.

    Raises:
        InputError: more ranks than that, or a size that is not between 2 and the number of ranks.
    """
    if topology.ranks > MOST_RANKS:
        raise InputError(
            f"topology {topology.name}: to list its fragments it must have at most {MOST_RANKS} ranks, "
            f"got {topology.ranks}"
        )
    wanted = range(2, topology.ranks + 1) if sizes is None else sorted(set(sizes))
    for size in wanted:
        if not 2 <= size <= topology.ranks:
            raise InputError(
                f"fragment of {topology.name}: must have 2 to {topology.ranks} ranks, got {size}"
            )
    generators = automorphisms_of(topology, latencies=False).generators
    return tuple(fragment for size in wanted for fragment in _of_size(topology, size, generators))


def _of_size(topology: Topology, size: int, generators: Iterable[Permutation]) -> list[Fragment]:
    alike: dict[Any, list[_Class]] = {}
    for ranks, count in _orbits(topology.ranks, size, tuple(generators)):
        shape = _Shape(topology.subset(ranks))
        known = alike.setdefault(shape.invariant, [])
        for found in known:
            if found.shape.is_like(shape):
                found.allocations += count
                break
        else:
            known.append(_Class(ranks, shape, count))
    classes = sorted((each for group in alike.values() for each in group), key=lambda each: each.ranks)
    if sum(each.allocations for each in classes) != comb(topology.ranks, size):
        raise AssertionError(f"{topology.name}: the classes of {size} ranks do not count every allocation")
    return [Fragment(each.ranks, each.allocations, each.shape.topology) for each in classes]


@dataclass
class _Class:
    ranks: tuple[int, ...]
    shape: _Shape
    allocations: int


def _orbits(
    ranks: int, size: int, generators: tuple[Permutation, ...]
) -> Iterator[tuple[tuple[int, ...], int]]:
    """The first set of each orbit of the box's automorphisms, ascending, and how many sets the orbit has."""
    seen: set[tuple[int, ...]] = set()
    for chosen in combinations(range(ranks), size):
        if chosen in seen:
            continue
        orbit, waiting = {chosen}, [chosen]
        while waiting:
            here = waiting.pop()
            for generator in generators:
                image = tuple(sorted(generator[rank] for rank in here))
                if image not in orbit:
                    orbit.add(image)
                    waiting.append(image)
        seen |= orbit
        yield chosen, len(orbit)


@dataclass(frozen=True)
class _Level:
    """A vertex made special: its colour before, and what the refinement saw after."""

    colour: int
    trace: Trace


class _Shape:
    """A fragment prepared for comparisons."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        # In order of bandwidth, so that alike links have the same number in alike fragments.
        kinds = dict(sorted(topology.bandwidth.items(), key=lambda link: link[1]))
        self._refiner = Refiner(around(topology.size, kinds), _EFFORT)
        colours = [
            (topology.is_switch(vertex), topology.is_switch(vertex) and self._switch_reduces(vertex))
            for vertex in range(topology.size)
        ]
        self._start = self._refiner.refined(Partition.of(colours))

    def _switch_reduces(self, vertex: Vertex) -> bool:
        return self.topology.switches[vertex - self.topology.ranks].reduces

    @cached_property
    def invariant(self) -> Any:
        """The same for fragments that are alike, and for few others."""
        colours = self._start.colours
        links = sorted(
            (colours[src], colours[dst], rate) for (src, dst), rate in self.topology.bandwidth.items()
        )
        return tuple(sorted(colours)), tuple(links)

    @cached_property
    def _base(self) -> tuple[list[_Level], Partition]:
        """Vertices made special one after the other until each has a colour of its own."""
        partition, levels = self._start, []
        while (vertex := partition.least_ambiguous()) is not None:
            colour = partition.colours[vertex]
            partition, trace = self._refiner.individualized(partition, vertex)
            levels.append(_Level(colour, trace))
        return levels, partition

    def is_like(self, other: _Shape) -> bool:
        """Whether renumbering makes one of the other; for fragments with the same invariant."""
        levels, last = self._base
        return self._matches(other, other._start, levels, last)

    def _matches(self, other: _Shape, partition: Partition, levels: list[_Level], last: Partition) -> bool:
        """Follow the levels in the other fragment, each choice of a vertex in turn."""
        if not levels:
            image = [partition.members(colour)[0] for colour in last.colours]
            theirs = other.topology.bandwidth
            return all(
                theirs.get((image[src], image[dst])) == rate
                for (src, dst), rate in self.topology.bandwidth.items()
            )
        first, *rest = levels
        for vertex in partition.members(first.colour):
            after = other._refiner.followed(partition, vertex, first.trace)
            if after is not None and self._matches(other, after, rest, last):
                return True
        return False
